import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from patrickstar.runtime import initialize_engine
from tests.models import VOCAB
from tests.ranks.divided import Model
from tests.training import make_config

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
            found.append((saved.total, engine.plan().tide_peak_bytes))
            saved._kept.clear()
    dist.barrier()
    dist.destroy_process_group()
    return found
