"""Changes the user's module in place, so that its calls, ``zero_grad`` and ``state_dict`` keep their meaning.

Class, parameters and signature are unchanged, so a Trainer, ``generate``, PEFT and ``save_pretrained`` go on using the
module. `ConvertedModule.restore` undoes the changes.

A `Door` (compiled/door.py) opens a forward of the session around each outermost call, hooks included. Modules inside
that hold all the parameters get a door too, such as the model in a PEFT wrapper, whose ``generate`` calls itself.
Within a forward, and in a recomputation during backward, the call goes straight through.
"""

from __future__ import annotations

import contextlib
import os
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from patrickstar import _C
from patrickstar.module.chunked_parameter import ChunkedParameter
from patrickstar.module.compiled.door import Call, Door
from patrickstar.module.compiled.dynamo import Compiler, make_compiler
from patrickstar.module.param_handle import ParamHandle

LoadExactly = Callable[[Iterable[ParamHandle]], contextlib.AbstractContextManager[None]]


class ConvertedModule:
    """Changes to one module and its submodules.

    Args:
        module: the user's module, with its parameters in chunks.
        call: runs one call of a module that holds all parameters: ``call(run, args, kwargs)``.
        note_caller: passed to each :class:`patrickstar.module.compiled.door.Door`.
        zero_grad: deletes all gradients.
        compile: compiles a submodule: ``compile(module, compiler)``.
        read_value: returns a parameter's value as a new CPU tensor of the user's dtype.
        load_exactly: context around a write of float32 values to the given parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        call: Call,
        note_caller: Callable[[Any], None],
        zero_grad: Callable[[], None],
        compile: Callable[[nn.Module, Compiler], None],
        read_value: Callable[[nn.Parameter], torch.Tensor],
        load_exactly: LoadExactly,
    ):
        entries = list(_holding_everything(module))
        self._doors = [Door(entry, call, note_caller) for entry in entries]
        owners = [
            child
            for child in module.modules()
            if any(isinstance(param, ChunkedParameter) for param in child._parameters.values())
        ]
        hook = _StateDictHook(read_value, _tied(module))
        self._handles: list[RemovableHandle] = [child.register_state_dict_post_hook(hook) for child in owners]
        self._methods: list[_InstanceMethod] = [
            *(_ZeroGrad(door.module, zero_grad) for door in self._doors),
            *(_ZeroGradOfPart(child) for child in module.modules() if child not in entries),
            *(_Compile(child, compile) for child in module.modules() if type(child).compile is nn.Module.compile),
            *(
                _SaveToStateDict(child)
                for child in owners
                if type(child)._save_to_state_dict is nn.Module._save_to_state_dict
            ),
            *(_LoadFromStateDict(child, load_exactly) for child in owners),
            *(_SavePretrained(child) for child in module.modules() if getattr(type(child), "config_class", None)),
            *(_Apply(child) for child in module.modules()),
            *(_Script(child) for child in module.modules()),
        ]
        for method in self._methods:
            method.put_on()

    def restore(self) -> None:
        """Undoes all changes."""
        for door in self._doors:
            door.open()
        for method in self._methods:
            method.take_off()
        for handle in self._handles:
            handle.remove()
        self._doors.clear()
        self._methods.clear()
        self._handles.clear()


def _holding_everything(module: nn.Module) -> Iterable[nn.Module]:
    """Yields the module and the submodules that hold all its parameters."""
    everything = set(module.parameters())
    for child in module.modules():
        if child is module or (everything and everything == set(child.parameters())):
            yield child


def _tied(module: nn.Module) -> set[nn.Parameter]:
    """Parameters that the module has under several names."""
    names: dict[nn.Parameter, int] = {}
    for _, param in module.named_parameters(remove_duplicate=False):
        names[param] = names.get(param, 0) + 1
    return {param for param, count in names.items() if count > 1}


class _InstanceMethod:
    """Replaces a method of one module instance. A copy of the module has the class's method."""

    name: ClassVar[str]

    def __init__(self, module: nn.Module):
        self._module = module

    def put_on(self) -> None:
        """Installs the replacement."""
        self._module.__dict__[self.name] = self

    def take_off(self) -> None:
        """Restores the class's method."""
        self._module.__dict__.pop(self.name, None)

    def __reduce__(self) -> Any:
        return _ordinary_method, (self._module, self.name)


def _ordinary_method(module: nn.Module, name: str) -> Any:
    return types.MethodType(getattr(type(module), name), module)


class _ZeroGrad(_InstanceMethod):
    name = "zero_grad"

    def __init__(self, module: nn.Module, zero_grad: Callable[[], None]):
        super().__init__(module)
        self._zero_grad = zero_grad

    def __call__(self, set_to_none: bool = True) -> None:
        self._zero_grad()


class _ZeroGradOfPart(_InstanceMethod):
    """``zero_grad`` of a submodule. Reads no gradient, since gradients cannot be read at all times."""

    name = "zero_grad"

    def __call__(self, set_to_none: bool = True) -> None:
        for param in self._module.parameters():
            param.grad = None


class _Compile(_InstanceMethod):
    """``module.compile``; afterwards the engine still observes the module's uses."""

    name = "compile"

    def __init__(self, module: nn.Module, compile: Callable[[nn.Module, Compiler], None]):
        super().__init__(module)
        self._compile = compile

    def __call__(self, **options: Any) -> None:
        compiler = make_compiler(options)
        if compiler is not None:
            self._compile(self._module, compiler)


class _SaveToStateDict(_InstanceMethod):
    """Saves a module's own tensors without reading them, so no chunk need be on the device. `_StateDictHook` then puts
    in the values.
    """

    name = "_save_to_state_dict"

    def __call__(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            nn.Module._save_to_state_dict(self._module, destination, prefix, keep_vars)


class _SavePretrained(_InstanceMethod):
    """``save_pretrained`` of a transformers model. Its ``config.json`` names the user's dtype, which the saved values
    have and ``from_pretrained`` loads, not that of the parameters.
    """

    name = "save_pretrained"

    def __call__(self, save_directory: str | os.PathLike[str], is_main_process: bool = True, **options: Any) -> Any:
        module = self._module
        result = type(module).save_pretrained(module, save_directory, is_main_process, **options)
        dtypes = (
            (param._patrickstar.original_dtype if isinstance(param, ChunkedParameter) else param.dtype, param.dtype)
            for param in module.parameters()
        )
        users, computed = next((pair for pair in dtypes if pair[1].is_floating_point), (None, None))
        if users != computed:
            module.config.dtype = str(users).removeprefix("torch.")
            if is_main_process and not getattr(module, "_hf_peft_config_loaded", False):  # adapters have no config.json
                module.config.save_pretrained(save_directory)
        return result


class _LoadFromStateDict(_InstanceMethod):
    """Loads a module's own part of a state dict. Values of 32 bits or more become the parameters' masters exactly,
    whatever was read before.
    """

    name = "_load_from_state_dict"

    def __init__(self, module: nn.Module, load_exactly: LoadExactly):
        super().__init__(module)
        self._load_exactly = load_exactly

    def __call__(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        module = self._module
        wide = [
            param._patrickstar
            for name, param in module._parameters.items()
            if isinstance(param, ChunkedParameter) and _is_wide(state_dict.get(prefix + name))
        ]
        with self._load_exactly(wide):
            type(module)._load_from_state_dict(module, state_dict, prefix, *args)


def _is_wide(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.itemsize >= 4


class _Apply(_InstanceMethod):
    """``module.to``, ``half``, ``cuda`` and others that apply a function to each tensor. Parameters in chunks stay
    unchanged. A function that would change their dtype, device or memory is refused before it changes anything.
    """

    name = "_apply"
    _is_running = False

    def __call__(self, function: Callable[[torch.Tensor], torch.Tensor], *args: Any, **options: Any) -> nn.Module:
        module = self._module
        if self._is_running:  # the module holds its engine, which holds the module
            return module
        _check_application(module, function)
        params, module._parameters = module._parameters, _OrdinaryParameters(module._parameters)
        self._is_running = True
        try:
            return type(module)._apply(module, function, *args, **options)  # torchmetrics' has parameters of its own
        finally:
            self._is_running = False
            params.update(module._parameters)
            module._parameters = params


class _Script(_InstanceMethod):
    """``torch.jit.script`` asks each module for this method. Copies of the module keep it, as they keep its hooks."""

    name = "__prepare_scriptable__"

    def put_on(self) -> None:
        """Installs a function that raises."""
        self._module.__dict__[self.name] = _refuse_script


def _refuse_script() -> None:
    raise _C.StateError(
        "torch.jit.script cannot compile the hooks of a module in an open engine, or of a copy made there. Script the "
        "module after engine.close(), or a new one with load_state_dict(engine.state_dict())"
    )


class _OrdinaryParameters(dict[str, "nn.Parameter | None"]):
    """A module's parameters; iteration skips those in chunks."""

    def items(self) -> Any:
        return [(name, param) for name, param in super().items() if not isinstance(param, ChunkedParameter)]


def _check_application(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Raises StateError if ``function`` would change a parameter in a chunk. A tensor of the same dtype and device is
    tried.
    """
    seen: set[tuple[Any, ...]] = set()
    for param in module.parameters():
        if not isinstance(param, ChunkedParameter):
            continue
        kind = (param.dtype, param.device, param.dim())
        if kind in seen:
            continue
        seen.add(kind)
        with _C.HostAllocations(), torch.no_grad():
            tensor = torch.empty((1,) * param.dim(), dtype=param.dtype, device=param.device)
            changed = function(tensor)
        if changed is not tensor or (tensor.device.type == "cpu" and tensor.is_shared()):
            raise _C.StateError(_refusal(param._patrickstar.name, tensor, changed))


def _refusal(name: str, tensor: torch.Tensor, changed: torch.Tensor) -> str:
    if changed.dtype != tensor.dtype:
        return (
            f"{name} would become {changed.dtype}, but an open engine computes with it in {tensor.dtype} and keeps its "
            "float32 value. Choose the dtype in the configuration (bf16, fp16), or convert the module before the "
            "engine is built or after engine.close()"
        )
    if changed.device != tensor.device:
        return (
            f"{name} would move to {changed.device}, but an open engine moves parameters itself, between host memory "
            f"and {tensor.device}. Leave .to(device), .cuda() and .cpu() out; engine.close() gives the module back in "
            "the memory that it had"
        )
    return (
        f"{name} would get other memory, but an open engine keeps it in a chunk. Do that before the engine is built or "
        "after engine.close()"
    )


class _StateDictHook:
    """Replaces views of chunks in a state dict by separate tensors of the user's dtype.

    Tied parameters share one tensor, as in any module. In a copy of the module, which has ordinary parameters, the
    hooks do nothing.
    """

    def __init__(self, read_value: Callable[[nn.Parameter], torch.Tensor] | None, tied: Iterable[nn.Parameter]):
        self._read_value = read_value
        self._tied = frozenset(param._patrickstar.id for param in tied if isinstance(param, ChunkedParameter))
        self._given: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
        if self._read_value is None:
            return
        for name, param in module._parameters.items():
            value = state_dict.get(prefix + name)
            if not isinstance(param, ChunkedParameter) or value is None or isinstance(value, nn.Parameter):
                continue  # an nn.Parameter comes from state_dict(keep_vars=True)
            state_dict[prefix + name] = self._value_of(param, state_dict)

    def _value_of(self, param: ChunkedParameter, state_dict: dict[str, Any]) -> torch.Tensor:
        handle = param._patrickstar
        given = self._given.get(handle.id)
        if given is not None and any(value is given for value in state_dict.values()):
            return given
        value = self._read_value(param)
        if handle.id in self._tied:
            self._given[handle.id] = value
        return value

    def __reduce__(self) -> Any:
        return _StateDictHook, (None, ())
