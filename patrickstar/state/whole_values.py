"""Full values of an engine's module: its own, or those of the model before tensor parallelism.

The latter are all-gathered over the mesh one parameter at a time. Ranks that share chunks assemble a block, and all
ranks assemble the full parameter from the blocks.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from patrickstar import _C
from patrickstar.checkpoint.shards import Kind, TensorShard
from patrickstar.module.chunked_parameter import ChunkedParameter
from patrickstar.module.observed_buffers import persistent_buffers
from patrickstar.parallel.sharded_values import ShardedNames, ShardedPart
from patrickstar.session.session import Session
from patrickstar.state.engine_shards import kind_of


@torch.no_grad()
def own_state(session: Session, prefix: str, keep_vars: bool) -> OrderedDict[str, torch.Tensor]:
    """The module's ``state_dict``; parameters in chunks are float32 on the CPU."""
    params = dict(session.module.named_parameters(remove_duplicate=False))
    values: dict[nn.Parameter, torch.Tensor] = {}
    result = session.module.state_dict(prefix=prefix, keep_vars=True)
    for key, value in result.items():
        param = params.get(key.removeprefix(prefix))
        if isinstance(param, ChunkedParameter):
            if param not in values:
                values[param] = session.states.value(param)
            result[key] = values[param]
        elif isinstance(value, torch.Tensor):
            result[key] = value.detach() if not keep_vars else value
    return result


def names_of(session: Session) -> ShardedNames:
    """Names before sharding.

    Raises:
        StateError: the matrices are not sharded.
    """
    if session.matrices.names is None:
        raise _C.StateError("this engine's matrices are not divided")
    return session.matrices.names


def whole_state(session: Session, prefix: str = "") -> OrderedDict[str, torch.Tensor]:
    """``state_dict`` of the unsharded module: parameters in float32 on the CPU, then buffers."""
    names = names_of(session)
    wholes = {
        name: whole
        for part in names.parts
        for name, whole in names.wholes_of(part, session.states.value, session.device).items()
    }
    params = ((prefix + name, whole) for name, whole in names.named(wholes))
    buffers = ((prefix + name, buffer.detach()) for name, buffer in persistent_buffers(session.module))
    return OrderedDict((*params, *buffers))


def whole_shards(session: Session) -> list[TensorShard]:
    """Full parameters, and buffers. All ranks read the parameters together, in this order."""
    names = names_of(session)
    wholes: dict[str, torch.Tensor] = {}

    def read(part: ShardedPart, name: str) -> torch.Tensor:
        if name not in wholes:
            wholes.clear()
            wholes.update(names.wholes_of(part, session.states.value, session.device))
        return wholes[name].view(-1)

    shards = [
        _shard(name, kind_of(part.param), shape, torch.float32, functools.partial(read, part, name))
        for part in names.parts
        for name, shape in part.shapes.items()
    ]
    for name, buffer in persistent_buffers(session.module):
        flat = buffer.detach().cpu().contiguous().view(-1)
        shards.append(_shard(name, "buffer", tuple(buffer.shape), buffer.dtype, functools.partial(torch.clone, flat)))
    return shards


def _shard(
    name: str, kind: Kind, shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[], torch.Tensor]
) -> TensorShard:
    size = torch.Size(shape).numel()
    return TensorShard(name=name, kind=kind, shape=shape, dtype=dtype, begin=0, end=size, read=read)


def load_whole_state(session: Session, values: Mapping[str, Any], strict: bool) -> Any:
    """Loads this rank's blocks from a dict like :func:`whole_state`. No communication.

    Raises:
        RuntimeError: keys or shapes do not match, as in ``nn.Module.load_state_dict``; nothing was loaded.
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
