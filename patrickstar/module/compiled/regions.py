"""Splits a compiled module into *regions*, which are compiled as one each.

A region holds all its parameters on the device while it runs, since uses inside compiled code cannot be observed. A
model that is compiled as a whole is therefore cut at repeated blocks, as in PyTorch's regional compilation. Blocks are
regions, and so are the parts beside them (a head, an embedding of several layers). The code between regions runs
uncompiled. Blocks of one class share their compiled code. The cut depends on the module alone, so results do not depend
on a budget. ``fullgraph=True`` gives a single region.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator

import torch
from torch import nn

from patrickstar.module.compiled.door import get_call
from patrickstar.module.compiled.dynamo import Compiler, compiler_of_call, compiler_of_wrapper, is_wrapper, unwrapped

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclasses.dataclass(frozen=True)
class Region:
    """A module to be compiled as one."""

    module: nn.Module
    compiler: Compiler
    compiled: bool
    """The module's call is compiled with ``compiler`` already."""


@dataclasses.dataclass
class Cut:
    """The regions that replace the compiled modules in a module."""

    regions: list[Region] = dataclasses.field(default_factory=list)
    whole: list[nn.Module] = dataclasses.field(default_factory=list)
    """Modules that were compiled as a whole and whose parts are compiled instead."""


def cut_compiled(module: nn.Module) -> Cut:
    """Cuts ``module`` and everything in it that is compiled."""
    cut = Cut()
    seen: set[nn.Module] = set()

    def walk(child: nn.Module) -> None:
        if child in seen:
            return
        seen.add(child)
        compiler = _compiler_of(child)
        if compiler is not None:
            _cut_one(child, compiler, cut, compiled=True)
            return
        for grandchild in child.children():
            walk(grandchild)

    walk(module)
    return cut


def cut_for(module: nn.Module, compiler: Compiler) -> Cut:
    """Cuts ``module``, which is to be compiled with ``compiler``. Parts that are compiled already stay unchanged."""
    cut = Cut()
    _cut_one(module, compiler, cut, compiled=False)
    return cut


def _compiler_of(module: nn.Module) -> Compiler | None:
    return compiler_of_wrapper(module) if is_wrapper(module) else compiler_of_call(module, get_call(module))


def _cut_one(module: nn.Module, compiler: Compiler, cut: Cut, *, compiled: bool) -> None:
    inside = unwrapped(module)
    parts = [inside] if compiler.one_graph else list(_parts(inside, in_block=False))
    if parts == [inside] and (compiled or module is inside):
        cut.regions.append(Region(module, compiler, compiled))
        return
    cut.whole.append(module)
    known = {region.module for region in cut.regions}
    for part in parts:
        own = _compiler_of(part)
        if part in known:
            continue
        known.add(part)
        if own is not None:
            _cut_one(part, own, cut, compiled=True)
        elif parts == [inside] or not _is_single_layer(part):
            cut.regions.append(Region(part, compiler, compiled=False))


def _parts(module: nn.Module, *, in_block: bool) -> Iterator[nn.Module]:
    """The parts in which ``module`` is compiled: itself, if it repeats no blocks. A block that contains lists of blocks
    is cut only if these have most of its parameters (a stage of a network, a layer of experts).
    """
    if is_wrapper(module):
        yield module
        return
    lists = list(_block_lists(module))
    is_whole = not lists or (in_block and 2 * sum(map(_numel, lists)) <= _numel(module))
    if is_whole and not _is_holder(module):
        yield module
        return
    for child in module.children():
        yield from _parts(child, in_block=in_block or module in lists)


def _block_lists(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost lists in ``module``, or itself, of several blocks of one class. Single PyTorch layers are no
    blocks.
    """
    if isinstance(module, _LISTS):
        blocks = [inside for inside in map(unwrapped, module.children()) if _is_block(inside)]
        if max(collections.Counter(map(type, blocks)).values(), default=0) > 1:
            yield module
            return
    for child in module.children():
        yield from _block_lists(child)


def _is_holder(module: nn.Module) -> bool:
    """Tests for a container without a ``forward``."""
    return type(module).forward is nn.Module.forward


def _is_block(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) and not _is_single_layer(module)


def _is_single_layer(module: nn.Module) -> bool:
    """Tests for one PyTorch operation (a linear layer, a norm), in which nothing can be fused."""
    return type(module).__module__.startswith("torch.nn.") and not any(True for _ in module.children())


def _numel(module: nn.Module) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return sum(param.numel() for param in module.parameters())
