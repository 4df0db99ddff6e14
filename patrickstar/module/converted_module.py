"""The user's module in place: its calls, ``zero_grad`` and ``state_dict`` mean what they meant before.

Class, parameters and signature stay what they are, so that whoever holds the module (a Trainer, ``generate``, PEFT,
``save_pretrained``) goes on using it as if nothing had happened. `restore` takes everything off again.

[Note: calls in place] A door (compiled/door.py) opens a forward of the session around the whole call, hooks included.
Modules inside that hold all the parameters (the model in a PEFT wrapper, whose ``generate`` calls itself) are entered
in the same way; within a forward, and in a recomputation during backward, the call goes straight through.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from patrickstar.module.chunked_parameter import ChunkedParameter, ParamHandle
from patrickstar.module.compiled.door import Call, Door
from patrickstar.module.compiled.dynamo import Compiler, make_compiler

LoadExactly = Callable[[Iterable[ParamHandle]], contextlib.AbstractContextManager[None]]


class ConvertedModule:
    """What is changed on one module and the modules inside it.

    Args:
        module: the user's, with its parameters in chunks.
        call: runs one call of a module that holds all parameters: ``call(run, args, kwargs)``.
        note_caller: of a :class:`patrickstar.module.compiled.door.Door`.
        zero_grad: forgets all gradients.
        compile: compiles a module inside: ``compile(module, compiler)``.
        read_value: a parameter's value, as a new CPU tensor of the dtype that the user's module has.
        load_exactly: around a write of float32 values to these parameters.
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
        self._doors = [Door(entry, call, note_caller) for entry in _holding_everything(module)]
        for door in self._doors:
            door.module.__dict__["zero_grad"] = _ZeroGrad(door.module, zero_grad)
        self._compilable = [child for child in module.modules() if type(child).compile is nn.Module.compile]
        for child in self._compilable:
            child.__dict__["compile"] = _Compile(child, compile)
        hook = _StateDictHook(read_value, _tied(module))
        self._owners = [
            child
            for child in module.modules()
            if any(isinstance(param, ChunkedParameter) for param in child._parameters.values())
        ]
        self._handles: list[RemovableHandle] = [child.register_state_dict_post_hook(hook) for child in self._owners]
        for child in self._owners:
            if type(child)._save_to_state_dict is nn.Module._save_to_state_dict:
                child._save_to_state_dict = _SaveToStateDict(child)
            child.__dict__["_load_from_state_dict"] = _LoadFromStateDict(child, load_exactly)

    def restore(self) -> None:
        """The module as it was."""
        for door in self._doors:
            door.open()
            door.module.__dict__.pop("zero_grad", None)
        for child in self._compilable:
            child.__dict__.pop("compile", None)
        for child in self._owners:
            child.__dict__.pop("_save_to_state_dict", None)
            child.__dict__.pop("_load_from_state_dict", None)
        self._doors.clear()
        self._compilable.clear()
        self._owners.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _holding_everything(module: nn.Module) -> Iterable[nn.Module]:
    """The module and those inside it that hold all its parameters."""
    everything = set(module.parameters())
    for child in module.modules():
        if child is module or (everything and everything == set(child.parameters())):
            yield child


def _tied(module: nn.Module) -> set[nn.Parameter]:
    """The parameters that the module has under several names."""
    names: dict[nn.Parameter, int] = {}
    for _, param in module.named_parameters(remove_duplicate=False):
        names[param] = names.get(param, 0) + 1
    return {param for param, count in names.items() if count > 1}


class _ZeroGrad:
    """``module.zero_grad``; that of a copy of the module is the ordinary one."""

    def __init__(self, module: nn.Module, zero_grad: Callable[[], None]):
        self._module = module
        self._zero_grad = zero_grad

    def __call__(self, set_to_none: bool = True) -> None:
        self._zero_grad()

    def __reduce__(self) -> Any:
        return _ordinary_zero_grad, (self._module,)


def _ordinary_zero_grad(module: nn.Module) -> Any:
    return types.MethodType(type(module).zero_grad, module)


class _Compile:
    """``module.compile``, after which the engine still knows what the module uses; that of a copy of the module is the
    ordinary one.
    """

    def __init__(self, module: nn.Module, compile: Callable[[nn.Module, Compiler], None]):
        self._module = module
        self._compile = compile

    def __call__(self, **options: Any) -> None:
        compiler = make_compiler(options)
        if compiler is not None:
            self._compile(self._module, compiler)

    def __reduce__(self) -> Any:
        return _ordinary_compile, (self._module,)


def _ordinary_compile(module: nn.Module) -> Any:
    return types.MethodType(type(module).compile, module)


class _SaveToStateDict:
    """What a module's ``state_dict`` puts into it of its own, which `_StateDictHook` replaces: nothing is read, so no
    chunk need be on the device. That of a copy of the module is the ordinary one.
    """

    def __init__(self, module: nn.Module):
        self._module = module

    def __call__(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            nn.Module._save_to_state_dict(self._module, destination, prefix, keep_vars)

    def __reduce__(self) -> Any:
        return _ordinary_save_to_state_dict, (self._module,)


class _LoadFromStateDict:
    """Loads a module's own part of a state dict. Values of 32 bits or more are masters, and become the parameters'
    masters as they are, whatever was read before. The method of a copy of the module is the ordinary one.
    """

    def __init__(self, module: nn.Module, load_exactly: LoadExactly):
        self._module = module
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

    def __reduce__(self) -> Any:
        return _ordinary_load_from_state_dict, (self._module,)


def _is_wide(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.itemsize >= 4


def _ordinary_load_from_state_dict(module: nn.Module) -> Any:
    return types.MethodType(type(module)._load_from_state_dict, module)


def _ordinary_save_to_state_dict(module: nn.Module) -> Any:
    return types.MethodType(type(module)._save_to_state_dict, module)


class _StateDictHook:
    """Puts values of their own, of the dtype that the user's module has, in the place of views of chunks.

    Tied parameters share one tensor, as they do in any module. A copy of the module has ordinary parameters, and its
    hooks leave them alone.
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
                continue  # the last: state_dict(keep_vars=True)
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
