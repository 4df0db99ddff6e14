"""Models on the meta device get memory and values unit by unit.

``with torch.device("meta"): model = ...`` builds a model without memory. Its modules' own initialisers fill the
parameters on the training device: ``reset_parameters`` (PyTorch's convention, used by FSDP) and, for Hugging Face
models, ``_init_weights``.

A *unit* is the part of the model that has its own memory at a time. Its values go into chunks before the next unit is
made, so the whole model never exists outside of chunks.

A model may come with values for its tensors (:func:`attach_values`). ``patrickstar.from_pretrained`` does this for a
folder of safetensors. They are read unit by unit instead of running initialisers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import nn

from patrickstar import _C
from patrickstar.module.adapters import (
    adapted_layers,
    adapter_configs,
    adapter_modules,
    copies_of_tensors,
    draw_values,
    is_adapted,
    post_order,
)
from patrickstar.module.compiled.dynamo import is_wrapper


class TensorValues(Protocol):
    """Values of a model's tensors, by ``state_dict`` name."""

    def __contains__(self, name: str) -> bool:
        """Tests whether there is a value for ``name``."""

    def read(self, name: str) -> torch.Tensor:
        """The value, of any dtype. It is on the CPU; if no parameter is quantised, it may be on the training device."""


@dataclasses.dataclass(frozen=True)
class _Attached:
    values: TensorValues
    keys: dict[torch.Tensor, str]
    """Name of each tensor at the time of attaching; adapters that are added later rename the modules inside."""


_attached: weakref.WeakKeyDictionary[nn.Module, _Attached] = weakref.WeakKeyDictionary()


def attach_values(module: nn.Module, values: TensorValues) -> None:
    """Gives tensors of ``module`` that are on the meta device ``values`` once they get memory.

    Tensors without a value are initialised. The values also apply when ``module`` is inside another module, such as one
    with adapters.
    """
    _attached[module] = _Attached(values, _keys_of(module, values))


def attached_values(module: nn.Module) -> TensorValues | None:
    """Attached values of ``module`` and its submodules, by current names.

    Returns:
        None if no value is attached.
    """
    sources = _sources_of(module)
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    named = {name: sources[tensor] for name, tensor in tensors if tensor in sources}
    return _NamedValues(named) if named else None


def _sources_of(module: nn.Module) -> dict[torch.Tensor, tuple[TensorValues, str]]:
    """Maps each tensor with an attached value to the collection that has it and its name there."""
    found = {}
    for child in module.modules():
        if child in _attached:
            attached = _attached[child]
            found |= {tensor: (attached.values, key) for tensor, key in attached.keys.items()}
    return found


class _NamedValues:
    """Values from several sources under new names."""

    def __init__(self, sources: Mapping[str, tuple[TensorValues, str]]):
        self._sources = sources

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def read(self, name: str) -> torch.Tensor:
        values, key = self._sources[name]
        return values.read(key)


class DeferredInit:
    """The parameters and buffers of one module that are on the meta device.

    Parameters are replaced at once by ones of the same shape, dtype and attributes, still without memory. References
    taken from now on (parameter groups, layouts) thus refer to the parameters that are trained.
    """

    def __init__(self, module: nn.Module):
        self._module = module
        self.replaced: dict[nn.Parameter, nn.Parameter] = {}
        """Maps the module's former parameters to their replacements."""
        self._names = {param: name for name, param in _replace_meta_params(module, self.replaced).items()}
        self._deferred = set(self._names)
        self._buffers: dict[tuple[nn.Module, str], torch.Tensor] = {}
        """The meta buffers that have been given memory, by owner and name."""
        self._sources = self._find_sources()
        """Collection and name of each tensor that has an attached value."""
        self._adapted = adapted_layers(module)
        self._adapter_configs = adapter_configs(module) if self._adapted else {}

    @classmethod
    def of(cls, module: nn.Module) -> DeferredInit | None:
        """Returns None if nothing in ``module`` is on the meta device."""
        tensors = [*module.parameters(), *module.buffers()]
        return cls(module) if any(tensor.is_meta for tensor in tensors) else None

    def units(
        self, device: torch.device, max_bytes: int, read_on_host: Collection[nn.Parameter] = ()
    ) -> Iterator[list[nn.Parameter]]:
        """Fills unit after unit on ``device``, children before their parents, and yields each unit's parameters. The
        caller must move them into chunks before it draws the next unit.

        Args:
            device: where initialisers run.
            max_bytes: limit of a unit's parameters; a single module may exceed it.
            read_on_host: parameters whose attached values are left in host memory as they were read. The caller must
                not write them, and checks them for NaN.

        Raises:
            ValueError: an initialiser leaves a parameter or a buffer without a value.
        """
        initialised: set[nn.Module] = set()
        hugging_face = dict(_pretrained_ancestors(self._module))
        for unit in _split(self._module, max_bytes):
            modules = [module for module in unit if module not in initialised]
            initialised.update(modules)
            with _C.HostAllocations(), torch.no_grad(), device:
                without_values = [module for module in modules if self._needs_values(module)]
                fresh = {param: self._names.pop(param) for param in _own_params(modules) if param in self._names}
                read = self._as_they_are(set(read_on_host).intersection(fresh, self._sources), without_values)
                for param in fresh.keys() - read:
                    param.data = _without_values(param, device)
                for param in read:
                    values, key = self._sources[param]
                    param.data = values.read(key).to(param.dtype).reshape(param.shape)
                buffers = _materialize_buffers(modules, device)
                self._buffers |= buffers
                for module in without_values:
                    if module not in self._adapted:
                        _initialize(module, hugging_face.get(module))
                for layer in dict.fromkeys(
                    self._adapted[module] for module in without_values if module in self._adapted
                ):
                    draw_values(self._module, layer, self._adapter_configs)
                self._read_values(fresh.keys() - read, buffers)
                _check_values({name: param for param, name in fresh.items() if param not in read})
                _check_values(_named_buffers((owner, name) for owner, name in buffers if owner not in hugging_face))
            yield list(fresh)
        with _C.HostAllocations(), torch.no_grad(), device:
            self._fill_from_above(hugging_face)

    def _fill_from_above(self, hugging_face: Mapping[nn.Module, nn.Module]) -> None:
        """Lets an enclosing Hugging Face module initialise buffers that their owner's initialiser left unset.
        Falcon-H1's body sets its layers' ``mup_vector`` so. Tensors that have values are hidden from it.
        """
        for owner, name in self._buffers:
            if owner not in hugging_face or not _lacks_values(owner._buffers[name]):
                continue
            for module in reversed([module for module in hugging_face if owner in module.modules()]):
                if module is not owner and _lacks_values(owner._buffers[name]):
                    with _only_unset_buffers(module):
                        hugging_face[module]._init_weights(module)
        _check_values(_named_buffers(self._buffers))

    def undo(self) -> None:
        """Restores the parameters and buffers on the meta device, so that adoption can be tried again."""
        before = {param: was for was, param in self.replaced.items()}
        for child in self._module.modules():
            for name, param in child._parameters.items():
                if param in before:
                    child._parameters[name] = before[param]
        for (owner, name), buffer in self._buffers.items():
            owner._buffers[name] = buffer

    def _as_they_are(self, params: set[nn.Parameter], initialised: list[nn.Module]) -> set[nn.Parameter]:
        """Parameters of ``params`` that no initialiser can write; it would overwrite the source they were read from."""
        modules = (inner for module in initialised if module not in self._adapted for inner in module.modules())
        return params.difference(_own_params([*modules]))

    def _read_values(
        self, params: Iterable[nn.Parameter], buffers: Mapping[tuple[nn.Module, str], torch.Tensor]
    ) -> None:
        targets = {param: param for param in params}
        targets |= {was: owner._buffers[name] for (owner, name), was in buffers.items()}
        for tensor, target in targets.items():
            if tensor in self._sources:
                values, key = self._sources[tensor]
                target.data.copy_(values.read(key))

    def _find_sources(self) -> dict[torch.Tensor, tuple[TensorValues, str]]:
        attached = _sources_of(self._module)
        sources = {self.replaced.get(tensor, tensor): source for tensor, source in attached.items()}
        copies = {copy: sources[tensor] for copy, tensor in copies_of_tensors(self._module) if tensor in sources}
        return {**copies, **sources}

    def _needs_values(self, module: nn.Module) -> bool:
        """Tells whether ``module``'s initialiser must run.

        Not if its children had values from the start: the initialiser might overwrite them. Not for a ``torch.compile``
        wrapper, whose initialiser is that of the wrapped module.
        """
        if is_wrapper(module):
            return False
        own = [*module._parameters.values(), *module._buffers.values()]
        missing = [tensor for tensor in own if tensor is not None and (tensor.is_meta or tensor in self._deferred)]
        if missing:
            return any(tensor not in self._sources for tensor in missing)
        below = list(module.parameters())
        return bool(below) and all(param in self._deferred and param not in self._sources for param in below)


def _keys_of(module: nn.Module, values: TensorValues) -> dict[torch.Tensor, str]:
    """The name under which each parameter and buffer has a value; for a tied tensor any of its names."""
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {tensor: name for name, tensor in reversed(tensors) if name in values}


def _replace_meta_params(module: nn.Module, replaced: dict[nn.Parameter, nn.Parameter]) -> dict[str, nn.Parameter]:
    names: dict[str, nn.Parameter] = {}
    for prefix, child in module.named_modules():
        for name, param in child._parameters.items():
            if param is None or not param.is_meta:
                continue
            if param not in replaced:
                nothing = torch.empty((), dtype=param.dtype, device="cpu").expand(param.shape)
                replaced[param] = nn.Parameter(nothing, requires_grad=param.requires_grad)
                replaced[param].__dict__.update(param.__dict__)
                names[f"{prefix}.{name}".lstrip(".")] = replaced[param]
            child._parameters[name] = replaced[param]
    return names


def _split(module: nn.Module, max_bytes: int) -> Iterator[list[nn.Module]]:
    """Splits the modules into units, in initialisation order."""
    num_bytes = sum(param.numel() * param.element_size() for param in module.parameters())
    children = list(module.children())
    if num_bytes <= max_bytes or not children:
        yield post_order(module)
        return
    if is_adapted(module):  # adapters of one layer are initialised together
        yield from _split(module.base_layer, max_bytes)
        yield adapter_modules(module)
        return
    for child in children:
        yield from _split(child, max_bytes)
    yield [module]


def _pretrained_ancestors(
    module: nn.Module, ancestor: nn.Module | None = None
) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Every module below a Hugging Face model, with its innermost such model."""
    if callable(getattr(module, "_init_weights", None)):
        ancestor = module
    if ancestor is not None:
        yield module, ancestor
    for child in module.children():
        yield from _pretrained_ancestors(child, ancestor)


def _own_params(modules: list[nn.Module]) -> list[nn.Parameter]:
    return [param for module in modules for param in module._parameters.values() if param is not None]


def _without_values(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Allocates memory for ``tensor``, filled with NaN (zeros in other dtypes) so that unset values are found."""
    memory = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return memory.fill_(float("nan")) if memory.is_floating_point() else memory.zero_()


def _materialize_buffers(modules: list[nn.Module], device: torch.device) -> dict[tuple[nn.Module, str], torch.Tensor]:
    """Allocates the buffers on the meta device; returns the former tensors."""
    made = {}
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                made[module, name] = buffer
                module._buffers[name] = _without_values(buffer, device)
    return made


def _initialize(module: nn.Module, pretrained: nn.Module | None) -> None:
    for name in ("reset_parameters", "_reset_parameters"):
        initializer = getattr(module, name, None)
        if callable(initializer):
            initializer()
            break
    if pretrained is not None:
        pretrained._init_weights(module)


@contextlib.contextmanager
def _only_unset_buffers(root: nn.Module) -> Iterator[None]:
    """Context in which tensors of ``root`` that have values are replaced by meta tensors, which protects them from an
    initialiser.
    """
    was = [(child, dict(child._parameters), dict(child._buffers)) for child in root.modules()]
    for child, params, buffers in was:
        for name, param in params.items():
            if param is not None:
                child._parameters[name] = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=False)
        for name, buffer in buffers.items():
            if buffer is not None and not _lacks_values(buffer):
                child._buffers[name] = torch.empty_like(buffer, device="meta")
    try:
        yield
    finally:
        for child, params, buffers in was:
            child._parameters.update(params)
            unset = {name for name, buffer in buffers.items() if buffer is not None and _lacks_values(buffer)}
            child._buffers.update({name: buffer for name, buffer in buffers.items() if name not in unset})


def _named_buffers(places: Iterable[tuple[nn.Module, str]]) -> dict[str, torch.Tensor]:
    return {f"{name} of {type(owner).__name__}": owner._buffers[name] for owner, name in places}


def _lacks_values(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.isnan().any())


def _check_values(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if _lacks_values(tensor):
            raise ValueError(
                f"{name} is on the meta device, and neither reset_parameters nor _init_weights of its module gives it "
                "values; add reset_parameters to the module, or build the module on the CPU"
            )
