"""The observer: turns module calls and tensor uses into the core's acquire and release.

Vocabulary: a *scope* is a running call of a module that has parameters below it. See csrc/runtime/access_tracker.h for
what scopes hold and how backward releases.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from patrickstar import _C
from patrickstar.chunked_parameter import ParamHandle


class Scope:
    """One running call of a module."""

    __slots__ = ("module", "begin", "grad_enabled", "uncovered", "touched")

    def __init__(self, module: nn.Module, begin: int, uncovered: set[int]):
        self.module = module
        self.begin = begin
        self.grad_enabled = torch.is_grad_enabled()
        self.uncovered = uncovered
        """Parameters that the call may use in a way no torch function showed; its outputs' backward acquires them."""
        self.touched: set[int] = set()


class Observer:
    """Knows the open scopes; told by module hooks and by chunked parameters, tells the core.

    One thread at a time: the user's in forward, autograd's in backward.
    """

    def __init__(self, runtime: _C.Runtime):
        self._runtime = runtime
        self._scopes: list[Scope] = []

    # Scopes, from module hooks.

    def open_scope(self, module: nn.Module, params: list[int], until: _C.HoldUntil) -> None:
        """Begins a call of ``module``, which acquires ``params``."""
        begin = self._runtime.open_scope(params, until)
        self._scopes.append(Scope(module, begin, set(params) if until == _C.HoldUntil.SCOPE_END else set()))

    def close_scope(self, module: nn.Module, output: Any) -> Scope | None:
        """Ends the innermost call, which must be ``module``'s; None when it never began."""
        if not self._scopes or self._scopes[-1].module is not module:
            return None
        scope = self._scopes.pop()
        if scope.uncovered and scope.grad_enabled and torch.is_grad_enabled():
            self._acquire_before(_nodes(output), scope.begin, self._runtime.tick(), sorted(scope.uncovered))
        self._runtime.close_scope()
        return scope

    def forget_scopes(self) -> None:
        """Drops what an exception left open."""
        self._scopes.clear()

    # Uses, from chunked parameters.

    def before_use(self, ids: list[int]) -> int:
        """An operation is about to read the memory of the parameters ``ids``; returns the tick of the use."""
        return self._runtime.touch(ids)

    def after_use(self, ids: list[int], tick: int, result: Any, *, needs_value_in_backward: bool) -> None:
        """The operation gave ``result``: its backward node acquires the parameters again before it runs."""
        scope = self._scopes[-1] if self._scopes else None
        if scope is not None:
            scope.touched.update(ids)
        if not torch.is_grad_enabled():
            if scope is not None and scope.grad_enabled:
                scope.uncovered.update(ids)  # inside an autograd.Function, perhaps
            return
        if scope is not None:
            scope.uncovered.difference_update(ids)
        if needs_value_in_backward:
            self._acquire_before(_nodes(result), tick, tick, ids)

    def _acquire_before(self, nodes: Iterable[torch.autograd.graph.Node], begin: int, end: int, ids: list[int]) -> None:
        hook = None
        for node in nodes:
            if hook is None:
                hook = functools.partial(_enter_backward, self._runtime, begin, end, ids)
            node.register_prehook(hook)

    # Values and gradients.

    def read_values(self, handle: ParamHandle, kind: _C.ArrayKind) -> torch.Tensor:
        """The float32 values of one array of a parameter: a new CPU tensor with the parameter's shape and strides."""
        with _C.HostAllocations(), torch._C.DisableTorchFunctionSubclass():
            values = torch.empty_strided(handle.shape, handle.stride, dtype=torch.float32)
        self._runtime.read_values(handle.id, kind, values.data_ptr())
        return values

    def write_values(self, handle: ParamHandle, kind: _C.ArrayKind, values: torch.Tensor) -> None:
        """Sets the values of one array of a parameter from a tensor of its shape, of any float dtype and device."""
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

    def has_gradient(self, handle: ParamHandle) -> bool:
        """Whether the parameter has a folded gradient."""
        return self._runtime.has_gradient(handle.id)

    def clear_gradient(self, handle: ParamHandle) -> None:
        """Forgets the parameter's folded gradient."""
        self._runtime.clear_gradient(handle.id)


def _enter_backward(runtime: _C.Runtime, begin: int, end: int, ids: list[int], _grad_outputs: Any) -> None:
    runtime.enter_backward(begin, end, ids)


def _nodes(result: Any) -> list[torch.autograd.graph.Node]:
    """The distinct autograd nodes that made the tensors in ``result``."""
    if isinstance(result, torch.Tensor):  # the common case, without recursion
        node = result.grad_fn
        return [] if node is None else [node]
    nodes: dict[int, torch.autograd.graph.Node] = {}
    for tensor in find_tensors(result):
        node = tensor.grad_fn
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
