import functools

import torch

from patrickstar.activations.activation_rules import Saved
from patrickstar.runtime import initialize_engine
from patrickstar.session import recompute_choice
from tests.distributed import run_ranks
from tests.models import VOCAB, llama
from tests.training import make_config

LAYERS = 4


def train(recompute, sizes):
    """Losses, and what calls saved in each step. ``sizes``: rows and tokens by step and rank."""
    recompute_choice.may_choose = lambda device: True
    recompute_choice._NUMEL = 2**16
    torch.manual_seed(0)
    build = functools.partial(llama, hidden=64, layers=LAYERS, length=64)
    config = make_config("bf16", default_chunk_size=2**14, activations={"recompute": recompute})
    engine, optimizer = initialize_engine(build, 0, config)
    with engine:
        engine.train()
        engine.module.gradient_checkpointing_enable({"use_reentrant": False})
        rank = torch.distributed.get_rank()
        generator = torch.Generator().manual_seed(rank)
        losses, saved = [], []
        for by_rank in sizes:
            tokens = torch.randint(0, VOCAB, by_rank[rank], generator=generator)
            loss = engine(input_ids=tokens, labels=tokens)["loss"]
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            saved.append([kept.value for kept in engine._session.checkpoint_calls.saved])
        return losses, saved


def test_ranks_with_uneven_batches_choose_alike():
    sizes = [((2, 32), (1, 64)), ((2, 32), (2, 32)), ((1, 16), (2, 32)), ((2, 32), (4, 64)), ((2, 32), (2, 32))]
    always, auto = (run_ranks(2, train, recompute, sizes) for recompute in ("always", "auto"))
    assert [losses for losses, _ in auto] == [losses for losses, _ in always]
    saved = auto[0][1]
    assert auto[1][1] == saved
    assert saved[0] == saved[1] == saved[2] == [Saved.EVERYTHING.value] * LAYERS
    assert saved[3] == saved[4] != saved[2]  # one rank's forward is twice as large as any before
