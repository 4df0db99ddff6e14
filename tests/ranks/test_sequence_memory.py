import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from patrickstar.module.layouts import make_layout
from patrickstar.module.preprocess import plan_params
from patrickstar.planning.machines import H200
from patrickstar.planning.sharded import PlannedDivision
from patrickstar.planning.timeline import play_accesses
from patrickstar.planning.uses import trace_uses
from patrickstar.runtime import initialize_engine
from patrickstar.sequence.choice import Links
from patrickstar.sequence.layout import Mode
from tests.distributed import run_ranks
from tests.models import VOCAB
from tests.ranks.sharded import Model
from tests.training import make_config

LENGTH = 128
CASES = [(1, "auto", LENGTH), (2, "zigzag", 2 * LENGTH), (4, "zigzag", 4 * LENGTH), (4, "ulysses", 4 * LENGTH)]


def planned_activation_memory(size, mode, length):
    with torch.device("meta"):
        module = LLAMA.build()
    params = plan_params(module, torch.float32, use_cpu_embedding=False)
    # Transfers take all of the time (ulysses has fewer), or none (the ring is chosen).
    links = Links(gbps=1e-3) if mode == "ulysses" else Links(attention_tflops=1e-9)
    division = PlannedDivision(module, 1, length, size, links)
    assert division.choice.mode is Mode(mode)
    inputs = {**division.inputs(1, module), "use_cache": False}
    uses = trace_uses(module, params, torch.float32, inputs, H200.gpu, divisions=[division])
    layout = make_layout(params, 8192)
    return play_accesses(uses, layout, [False] * layout.num_chunks).timed(uses).activation_peak_bytes


def test_memory_is_flat_where_the_length_grows_with_the_ranks():
    by_rank = run_ranks(4, saved_bytes, CASES)
    for size, mode, length in CASES:
        print(size, mode, length, [found[CASES.index((size, mode, length))] for found in by_rank])
    for found in by_rank:
        alone, two, four, heads = (saved for saved, _ in found)
        assert two == pytest.approx(alone, rel=0.02)  # equal today
        assert four == pytest.approx(alone, rel=0.02)
        # The output by heads and by tokens; each rank has one of two key heads for all tokens.
        assert heads == alone + 4 * (LENGTH * 64 + 2 * LENGTH * (64 - 32))
    for case, (_, activation_memory) in list(zip(CASES, by_rank[0], strict=True))[1:]:
        planned = planned_activation_memory(*case)
        print(
            f"{case}: activation memory {activation_memory} measured, {planned} planned, "
            f"{planned / activation_memory - 1:+.1%}"
        )
        assert planned == pytest.approx(activation_memory, rel=0.10)


LLAMA = Model("llama", {"max_position_embeddings": 2048, "hidden_size": 64, "intermediate_size": 128})


class SavedBytes:
    """Bytes that autograd keeps of a module's forward without parameters; each storage counts once."""

    def __init__(self, module: nn.Module):
        self._params = {param.untyped_storage()._cdata for param in module.parameters()}
        self._kept: dict[int, torch.UntypedStorage] = {}
        self._hooks = contextlib.ExitStack()
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end)

    @property
    def total(self) -> int:
        return sum(storage.nbytes() for storage in self._kept.values())

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._kept.clear()
        self._hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor))

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._hooks.close()

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._params:
            self._kept[storage._cdata] = storage
        return tensor


def saved_bytes(cases: list[tuple[int, str, int]]) -> list[tuple[int, int]]:
    dist.init_process_group("gloo")
    found = []
    for size, mode, length in cases:
        torch.manual_seed(0)
        config = make_config("fp32", default_chunk_size=8192)
        config["sequence_parallel"] = {"size": size, "mode": mode}
        engine, optimizer = initialize_engine(LLAMA.build, 0, config)
        with engine:
            engine.train()
            saved = SavedBytes(engine.module.model.layers[0])
            tokens = torch.randint(0, VOCAB, (1, length), generator=torch.Generator().manual_seed(0))
            for _ in range(2):
                loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
                engine.backward(loss)
                del loss
                optimizer.step()
            found.append((saved.total, engine.plan().activation_peak_bytes))
            saved._kept.clear()
    dist.barrier()
    dist.destroy_process_group()
    return found
