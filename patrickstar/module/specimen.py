"""A small copy of a module for trial runs: on the CPU, in float32, without dropout, with a few of its layers.

    specimen = take_specimen(module)

The module is unchanged. Float32 parameters on the CPU share memory with the copy, which is not written. All other
tensors are copied, and meta tensors get random values.

Layers are the elements of a ``ModuleList`` whose length is a configuration's ``num_hidden_layers``. The copy keeps the
first layers until it has one of each kind (:func:`kind_of`), and at least two. So layers keep their index, and time and
memory do not grow with their number.

Matrices that are zero at first, such as LoRA's B, get random values. Otherwise they would hide what they multiply and
cut off gradients.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from patrickstar import _C
from patrickstar.module.materialize import DeferredInit, attach_values

_LEAST_LAYERS = 2
_LARGEST_TRAINED = 2**26
"""Elements of the largest parameter that gets a gradient; larger gradients would double the memory."""
_INDICES = ("idx", "index", "layer_id", "layer_number")
_RANDOM = ("drop", "jitter")
"""Substrings in names of attributes that control random numbers in a forward."""


def take_specimen(
    module: nn.Module, *, all_layers: bool = False, cut: Callable[[nn.Module], object] = lambda copied: None
) -> nn.Module:
    """Makes the small copy that the module's docstring describes.

    Args:
        module: unchanged.
        all_layers: keep every layer.
        cut: removes more from the copy before it gets memory.

    Raises:
        ValueError: a parameter or a buffer on the meta device gets no value.
    """
    left_out = {} if all_layers else _surplus_layers(module)
    with _C.HostAllocations(), torch.no_grad():
        specimen = _copy(module, {id(layer): None for layers in left_out.values() for layer in layers})
        for name in left_out:
            layers = specimen.get_submodule(name)
            layers._modules = {index: layer for index, layer in layers._modules.items() if layer is not None}
        cut(specimen)
        _give_values(specimen)
        _bring(specimen)
    _switch_off_random_numbers(specimen)
    for param in specimen.parameters():
        param.requires_grad_(param.requires_grad and param.numel() <= _LARGEST_TRAINED)
    return specimen.train()


def copy_specimen(specimen: nn.Module) -> nn.Module:
    """Copies a specimen; parameters share memory."""
    return _copy(specimen, {})


def _copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Deep copy whose parameters share memory; ``memo`` is ``copy.deepcopy``'s."""
    params = {id(param): _with_value(param, param.detach()) for param in module.parameters() if _is_plain(param)}
    copies = {**memo, **params}
    copied = copy.deepcopy(module, copies)
    rebind = _Rebinding(copies)
    for child in copied.modules():
        for name, value in list(vars(child).items()):
            if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
                vars(child)[name] = rebind(value)
    return copied


class _Rebinding:
    """Copies functions that close over a copied module, so that they call the copy.

    ``copy.deepcopy`` does not copy functions. A ``forward`` that was assigned to a module and calls the former one
    (TRL's trainers) would compute with the original module.

    Args:
        copies: the copies, by id of the original (``copy.deepcopy``'s memo).
    """

    def __init__(self, copies: dict[int, Any]):
        self._copies = copies
        self._functions: dict[int, types.FunctionType] = {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            return self._copies.get(id(value), value)
        if isinstance(value, types.MethodType):
            return types.MethodType(self(value.__func__), self(value.__self__))
        if isinstance(value, functools.partial):
            named = {name: self(argument) for name, argument in value.keywords.items()}
            return functools.partial(self(value.func), *map(self, value.args), **named)
        if isinstance(value, types.FunctionType) and value.__closure__:
            return self._function(value)
        return value

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        if id(function) not in self._functions:
            self._functions[id(function)] = function  # for a function that closes over itself
            contents = [_content(cell) for cell in function.__closure__ or ()]
            rebound = [self(content) for content in contents]
            if any(new is not old and new != old for new, old in zip(rebound, contents, strict=True)):
                cells = tuple(
                    types.CellType(content) if content is not _EMPTY else types.CellType() for content in rebound
                )
                made = types.FunctionType(
                    function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
                )
                made.__kwdefaults__ = function.__kwdefaults__
                made.__dict__.update(function.__dict__)
                self._functions[id(function)] = made
        return self._functions[id(function)]


_EMPTY = object()


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _with_value(param: nn.Parameter, value: torch.Tensor) -> nn.Parameter:
    made = nn.Parameter(value, requires_grad=param.requires_grad)
    made.__dict__.update(param.__dict__)
    return made


def _is_plain(param: nn.Parameter) -> bool:
    return type(param) is nn.Parameter


def _surplus_layers(module: nn.Module) -> dict[str, list[nn.Module]]:
    """Layers that the copy leaves out, by the name of their list."""
    numbers = {_num_layers(child) for child in module.modules()} - {None}
    lists = {name: list(child) for name, child in _outermost_lists(module) if len(child) in numbers}
    kept = max([_LEAST_LAYERS, *(_num_until_all_kinds(layers) for layers in lists.values())])
    return {name: layers[kept:] for name, layers in lists.items() if len(layers) > kept}


def _num_layers(module: nn.Module) -> int | None:
    return getattr(getattr(module, "config", None), "num_hidden_layers", None)


def _outermost_lists(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.ModuleList]]:
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            yield prefix + name, child
        else:
            yield from _outermost_lists(child, f"{prefix}{name}.")


def _num_until_all_kinds(layers: list[nn.Module]) -> int:
    kinds = [kind_of(layer) for layer in layers]
    return 1 + max(kinds.index(kind) for kind in kinds)


def kind_of(layer: nn.Module) -> tuple[Any, ...]:
    """A key that is equal for layers of one kind.

    Layers are of one kind if these are equal for their submodules: classes, ``forward``, parameter shapes, and numbers
    and strings among the attributes, except a layer index.
    """
    return tuple(
        (
            name,
            type(child),
            _own_forward(child),
            tuple((key, param.shape) for key, param in child._parameters.items() if param is not None),
            tuple(
                (key, value)
                for key, value in vars(child).items()
                if type(value) in (bool, int, float, str) and not any(part in key for part in _INDICES)
            ),
        )
        for name, child in layer.named_modules()
    )


def _own_forward(module: nn.Module) -> Any:
    """The code of a ``forward`` that was assigned to the instance."""
    forward = vars(module).get("forward")
    for part in ("func", "__func__"):
        forward = getattr(forward, part, forward)
    return getattr(forward, "__code__", type(forward))


class _RandomValues:
    """Random values for parameters on the meta device."""

    def __init__(self, module: nn.Module):
        self._shapes = {name: param.shape for name, param in module.named_parameters() if param.is_meta}
        self._generator = torch.Generator().manual_seed(0)

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def read(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            values = torch.randn(shape, generator=self._generator, device="cpu")
            return 0.1 * values + (1.0 if name.endswith("weight") else 0.0)
        return _random_matrix(shape, self._generator)


def _random_matrix(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device="cpu") * shape[-1] ** -0.5


def _give_values(specimen: nn.Module) -> None:
    attach_values(specimen, _RandomValues(specimen))
    deferred = DeferredInit.of(specimen)
    if deferred is not None:
        for _ in deferred.units(torch.device("cpu"), max_bytes=2**62):
            pass


def _bring(specimen: nn.Module) -> None:
    """Moves parameters and buffers to the CPU in float32; zero matrices get random values."""
    brought: dict[nn.Parameter, nn.Parameter] = {}
    generator = torch.Generator().manual_seed(0)
    for child in specimen.modules():
        for name, param in child._parameters.items():
            if param is not None and _is_plain(param):
                if param not in brought:
                    value = _brought(param.detach())
                    if _is_matrix_of_zeros(value):
                        value = _random_matrix(value.shape, generator)
                    brought[param] = _with_value(param, value)
                child._parameters[name] = brought[param]
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = _brought(buffer)


def _is_matrix_of_zeros(value: torch.Tensor) -> bool:
    """Tests for a matrix of zeros. The first row decides most cases; an embedding may have a row of zeros."""
    return value.dim() > 1 and value.is_floating_point() and value.numel() > 0 and not (value[0].any() or value.any())


def _brought(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype)


def _switch_off_random_numbers(specimen: nn.Module) -> None:
    configs = {id(config): config for config in map(_config_of, specimen.modules()) if config is not None}
    for owner in (*specimen.modules(), *configs.values()):
        for name, value in list(vars(owner).items()):
            if type(value) is float and any(part in name.lower() for part in _RANDOM):
                setattr(owner, name, 0.0)
        if isinstance(owner, nn.modules.dropout._DropoutNd):
            owner.p = 0.0


def _config_of(module: nn.Module) -> Any:
    return getattr(module, "config", None)
