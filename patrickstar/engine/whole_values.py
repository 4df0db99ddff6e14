"""Whole values of an engine whose matrices ranks share, by the names of the model before it was divided.

Values go through the mesh a parameter at a time: ranks that share chunks give their shards of a block, all ranks get
the blocks of all, and make of them what the model had.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from patrickstar import _C
from patrickstar.engine.divided_values import DividedNames
from patrickstar.engine.engine_shards import persistent_buffers
from patrickstar.engine.session import Session


def names_of(session: Session) -> DividedNames:
    """Those of the model before it was divided.

    Raises:
        StateError: it was not.
    """
    if session.matrices.names is None:
        raise _C.StateError("this engine's matrices are not divided")
    return session.matrices.names


def whole_params(session: Session, read: Callable[[nn.Parameter], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors on the CPU, each parameter under one of its names, of what ``read`` gives of each block. All ranks
    iterate together.
    """
    yield from names_of(session).wholes(read, session.device)


def whole_state(session: Session, prefix: str = "") -> OrderedDict[str, torch.Tensor]:
    """What ``state_dict`` of the undivided module would give: parameters in float32 on the CPU, then buffers."""
    wholes = dict(whole_params(session, session.states.value))
    params = ((prefix + name, whole) for name, whole in names_of(session).named(wholes))
    buffers = ((prefix + name, buffer.detach()) for name, buffer in persistent_buffers(session.module))
    return OrderedDict((*params, *buffers))


def load_whole_state(session: Session, values: Mapping[str, Any], strict: bool) -> Any:
    """Takes this rank's blocks of what :func:`whole_state` gives. Speaks to no other rank.

    Raises:
        RuntimeError: keys or shapes do not match, as ``nn.Module.load_state_dict`` raises it; nothing was loaded then.
    """
    names, buffers = names_of(session), dict(persistent_buffers(session.module))
    shapes = {name: shape for part in names.parts for name, shape in part.shapes.items()}
    further = {known: name for name, known in names.tied.items() if name in values}
    key_of = {name: name if name in values else further.get(name, "") for name in shapes}
    missing = [name for name in (*shapes, *buffers) if not key_of.get(name, name if name in values else "")]
    unexpected = [name for name in values if name not in shapes and name not in names.tied and name not in buffers]
    wrong = [
        f"size mismatch for {name}: {list(values[key].shape)} in the state_dict, {list(shapes[name])} in the model"
        for name, key in key_of.items()
        if key and tuple(values[key].shape) != shapes[name]
    ]
    said = [f"missing keys: {', '.join(missing)}"] if missing and strict else []
    said += [f"unexpected keys: {', '.join(unexpected)}"] if unexpected and strict else []
    if said or wrong:
        raise RuntimeError(f"the state_dict does not fit {type(session.module).__name__}: {'; '.join(said + wrong)}")
    with torch.no_grad(), _C.HostAllocations():
        for part in names.parts:
            if all(key_of[name] for name in part.sources):
                block = part.block(lambda name: values[key_of[name]].detach().to("cpu", torch.float32))
                session.states.set_value(part.param, block)
        for name, buffer in buffers.items():
            if name in values:
                buffer.copy_(values[name])
    return nn.modules.module._IncompatibleKeys(missing, unexpected)
