import pytest
import torch
import torch.utils.checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

from tests.models import Case
from tests.training import assert_same, make_config, train

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]
MIB = 2**20
LENGTHS = (128, 512, 4096, 256, 2048, 128, 4096, 1024)
VOCAB = 8192


def build():
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_positions=4096, n_embd=512, n_layer=6, n_head=4, bos_token_id=0, eos_token_id=0)
    )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def alternating(lengths):
    """Dropout is on: a repeated forward must draw the same numbers."""
    step = -1

    def batch(generator):
        nonlocal step
        step += 1
        tokens = torch.randint(0, VOCAB, (1, lengths[step % len(lengths)]), generator=generator)
        return {"input_ids": tokens, "labels": tokens}

    return Case(build, batch)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_alternating_sequence_lengths(precision):
    config = make_config(precision, default_chunk_size=MIB)
    expected = train(alternating(LENGTHS), config, steps=len(LENGTHS))
    longest = train(alternating([4096]), {**config, "device_memory": 16 * 2**30}, steps=2)
    activation_memory = longest.report["device_peak_bytes"] - 14 * longest.report["num_parameters"]
    budget = int(1.15 * activation_memory) + 200 * MIB
    run = train(alternating(LENGTHS), {**config, "device_memory": budget}, steps=len(LENGTHS))
    report = run.report
    print(
        f"{precision}: budget {budget / MIB:.0f} MiB, peak {report['device_peak_bytes'] / MIB:.0f}, "
        f"{report['num_pressure_evictions']} arrays made room"
    )
    assert report["device_peak_bytes"] <= budget
    assert_same(run, expected)


class Reaching(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2048, 2048) for _ in range(48))

    def forward(self, x, num_bytes):
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        reached = torch.empty(num_bytes, dtype=torch.uint8, device=x.device)
        return x.square().mean() + 0 * reached[0].float()


@pytest.mark.parametrize("reserve", range(700, 600, -25))
def test_an_activation_as_large_as_what_chunks_can_leave(reserve):
    budget = 4 * 2**30
    config = make_config("bf16", default_chunk_size=4 * MIB, device_memory=budget)
    sizes = [MIB, MIB, *(budget - (reserve - less) * MIB for less in (0, 7, 14, 21))]

    def batch(generator):
        return {"x": torch.randn(8, 2048, generator=generator), "num_bytes": sizes.pop(0)}

    case = Case(Reaching, batch, loss=lambda loss: loss)
    report = train(case, config, steps=len(sizes)).report
    assert report["device_peak_bytes"] <= budget
    assert report["num_pressure_evictions"] > 0


@pytest.mark.parametrize(("batch_size", "budget_gib"), [(4, 4), (8, 7)])
def test_nothing_cached_goes_back_in_steps_that_repeat(batch_size, budget_gib):
    """The head is larger than all other chunks. PyTorch would give back its whole cache where one piece cannot be
    had.
    """
    retries = []

    def before_step(engine, step):
        retries.append(torch.cuda.memory_stats()["num_alloc_retries"])

    def build():
        config = GPT2Config(vocab_size=50304, n_positions=1024, n_embd=1024, n_layer=24, n_head=8)
        config.tie_word_embeddings = False
        model = GPT2LMHeadModel(config)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def batch(generator):
        tokens = torch.randint(0, 50304, (batch_size, 1024), generator=generator)
        return {"input_ids": tokens, "labels": tokens}

    config = make_config("bf16", default_chunk_size=8 * MIB, device_memory=budget_gib * 2**30)
    train(Case(build, batch), config, steps=14, before_step=before_step)
    assert len(set(retries[-4:])) == 1, retries
