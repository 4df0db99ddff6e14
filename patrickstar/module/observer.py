"""The interface of chunked parameters to an engine: ``uses`` receives their uses (csrc/bind/use_observer.h), the rest
reads and writes their values and gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from patrickstar import _C
from patrickstar.module.forward_writes import ForwardWrites
from patrickstar.module.gradient_reads import GradientReader, NoGradients
from patrickstar.module.overwritten_masters import OverwrittenMasters
from patrickstar.module.param_handle import ParamHandle


class Observer:
    """Receives uses of chunked parameters, and reads and writes their values and gradients."""

    def __init__(self, runtime: _C.Runtime):
        """``runtime`` is the core, or its replacement during planning
        (:class:`patrickstar.planning.step_uses.UseRecorder`).
        """
        self._runtime = runtime
        self.uses = _C.UseObserver(runtime, _nodes)
        self.overwritten = OverwrittenMasters(self.uses)
        self.forward_writes = ForwardWrites()
        """Records parameters that a forward writes."""
        self.gradients: GradientReader = NoGradients()
        """Serves reads of ``param.grad``."""

    def read_values(self, handle: ParamHandle, kind: _C.ArrayKind) -> torch.Tensor:
        """The float32 values of one array of a parameter: a new CPU tensor with the parameter's shape and strides."""
        with _C.HostAllocations(), torch._C.DisableTorchFunctionSubclass():
            values = torch.empty_strided(handle.shape, handle.stride, dtype=torch.float32, device="cpu")
        self._runtime.read_values(handle.id, kind, values.data_ptr())
        return values

    def write_values(self, handle: ParamHandle, kind: _C.ArrayKind, values: torch.Tensor) -> None:
        """Sets one array of a parameter from a tensor of its shape, of any float dtype and device."""
        with _C.HostAllocations(), torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            source = values.detach()
            if source.device.type not in ("cpu", "cuda"):
                source = source.cpu()
            if source.dtype != torch.float32 or source.stride() != handle.stride:
                source = torch.empty_strided(
                    handle.shape, handle.stride, dtype=torch.float32, device=source.device
                ).copy_(source)
        where = _C.Tier.DEVICE if source.device.type == "cuda" else _C.Tier.HOST
        self._runtime.write_values(handle.id, kind, source.data_ptr(), where)

    def replace_values(self, handle: ParamHandle, masters: torch.Tensor, values: torch.Tensor) -> None:
        """Replaces ``masters`` by the user's ``values``. Elements equal to what a read of the masters gave keep their
        masters ([Note: put back]).

        Both are float32 CPU tensors with the parameter's shape and strides; ``values`` may be changed.
        """
        self.overwritten.put_back(handle, masters, values)
        self.overwritten.keep(handle, masters)
        self.write_values(handle, _C.ArrayKind.MASTER, values)

    def has_gradient(self, handle: ParamHandle) -> bool:
        """Tests whether the parameter has an accumulated gradient."""
        return self._runtime.has_gradient(handle.id)

    def clear_gradient(self, handle: ParamHandle) -> None:
        """Deletes the parameter's accumulated gradient."""
        self._runtime.clear_gradient(handle.id)


def _nodes(result: Any) -> list[torch.autograd.graph.Node]:
    """The distinct autograd nodes that made the tensors in ``result``; for a view, its base's node."""
    nodes: dict[int, torch.autograd.graph.Node] = {}
    for tensor in find_tensors(result):
        base = tensor._base
        node = tensor.grad_fn if base is None or base.grad_fn is None else base.grad_fn
        if node is not None:
            nodes[id(node)] = node
    return list(nodes.values())


def find_tensors(value: Any, depth: int = 8) -> Iterable[torch.Tensor]:
    """All tensors in nested containers, mappings, dataclasses and plain objects."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth == 0 or value is None or isinstance(value, (str, bytes, int, float, bool, nn.Module)):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from find_tensors(item, depth - 1)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from find_tensors(item, depth - 1)
    elif hasattr(value, "__dict__"):
        for item in vars(value).values():
            yield from find_tensors(item, depth - 1)
