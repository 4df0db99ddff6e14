"""Weights between an open engine and folders in Hugging Face's formats, a parameter at a time.

With several ranks all must call these functions, in the same order.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from patrickstar import _C
from patrickstar.checkpoint.export import DEFAULT_MAX_FILE_BYTES, INDEX_NAME
from patrickstar.checkpoint.shards import TensorShard
from patrickstar.engine.engine import Engine
from patrickstar.module.chunked_parameter import ChunkedParameter, whole_shape
from patrickstar.module.compiled.dynamo import unwrapped, without_wrappers
from patrickstar.module.conversions import UnknownConversionError, model_values
from patrickstar.module.pretrained import SINGLE_NAME, SafetensorsFolder
from patrickstar.state.whole_values import names_of, whole_shards

_EXPORT_FOLDER = ".weights"


class LoadedKeys(NamedTuple):
    """Names in the module that the folder lacks, and names in the folder that the module lacks."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def export_into(
    engine: Engine,
    folder: str | os.PathLike[str],
    dtype: torch.dtype,
    *,
    is_first_rank: bool,
    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES,
) -> None:
    """Writes the weights of the engine's module into ``folder``, replacing its weights; other files stay. On the first
    rank it returns when the files are complete.

    Raises:
        CheckpointError: they cannot be written.
    """
    folder = Path(folder)
    exported = folder / _EXPORT_FOLDER
    if is_first_rank and exported.exists():  # left by an interrupted save
        shutil.rmtree(exported)
    engine.export_weights(exported, dtype=dtype, max_file_bytes=max_file_bytes)
    if not is_first_rank:
        return
    for old in [*folder.glob("model-*-of-*.safetensors"), folder / SINGLE_NAME, folder / INDEX_NAME]:
        old.unlink(missing_ok=True)
    for new in exported.iterdir():
        if new.name != "config.json":
            new.replace(folder / new.name)
    shutil.rmtree(exported)


@torch.no_grad()
def load_into(module: nn.Module, folder: str | os.PathLike[str]) -> LoadedKeys:
    """Reads a folder of safetensors into the parameters and buffers of ``module``, converted or not, one at a time.
    Names and forms are those of ``from_pretrained``. Tied weights need only one of their names.

    Raises:
        ValueError: there are none, they cannot be read or converted, or a tensor has another shape than its parameter;
            nothing was loaded then.
    """
    targets = {
        without_wrappers(name): held
        for name, held in module.state_dict(keep_vars=True).items()
        if isinstance(held, torch.Tensor)
    }
    try:
        values = model_values(unwrapped(module), targets, SafetensorsFolder(folder))
    except UnknownConversionError as error:
        raise ValueError(
            f"{os.fspath(folder)} is not read one tensor at a time ({error}); load it with from_pretrained of "
            "transformers, and its state_dict into the engine"
        ) from error
    for name in values:
        shape = tuple(whole_shape(targets[name]))
        if values.shape(name) != shape:
            raise ValueError(
                f"{os.fspath(folder)}: {name} has shape {values.shape(name)}, in the model {shape}; load weights of "
                "the same model"
            )
    for name in values:
        with _C.HostAllocations():
            whole = values.read(name)
            target = targets[name]
            target.copy_(target._patrickstar.own(whole) if isinstance(target, ChunkedParameter) else whole)
    filled = {id(targets[name]) for name in values}
    missing = [name for name, tensor in targets.items() if id(tensor) not in filled]
    return LoadedKeys(missing, values.left)


def has_sharded_matrices(engine: Engine) -> bool:
    """True if the engine's module is tensor-parallel."""
    return engine._session.matrices.names is not None


def adapter_state(engine: Engine) -> dict[str, Any]:
    """A state dict of the engine's PEFT model for ``save_pretrained(state_dict=...)``. Tensors that PEFT selects for
    its adapters are whole and on the CPU; the base model is on the meta device.
    """
    from peft import get_peft_model_state_dict

    model = engine.module
    held = _held_tensors(engine)
    probes = {name: tensor.probe for name, tensor in held.items()}
    names = {id(probe): name for name, probe in probes.items()}
    picked: set[str] = set()
    for adapter in model.peft_config:
        for tensor in get_peft_model_state_dict(model, state_dict=probes, adapter_name=adapter).values():
            if tensor.device.type == "meta":
                picked |= {names[id(tensor)]} if id(tensor) in names else set(probes)  # or derived from some of them
    return {name: tensor.read() if name in picked else tensor.probe for name, tensor in held.items()}


def load_adapter(engine: Engine, folder: str | os.PathLike[str]) -> None:
    """Loads the adapter that PEFT saved in ``folder`` into the first adapter of a tensor-parallel engine.

    Raises:
        ValueError: the folder's tensors are not that adapter's; nothing was loaded then.
    """
    from peft import get_peft_model_state_dict, load_peft_weights

    model = engine.module
    adapter = next(iter(model.peft_config))
    probes = {name: tensor.probe for name, tensor in _held_tensors(engine).items()}
    names = {id(probe): name for name, probe in probes.items()}
    places = get_peft_model_state_dict(model, state_dict=probes, adapter_name=adapter)
    values = load_peft_weights(os.fspath(folder), device="cpu")
    if values.keys() != places.keys():
        odd = sorted(values.keys() ^ places.keys())
        raise ValueError(f"{os.fspath(folder)}: {odd[0]} is in the folder or in adapter {adapter!r}, not in both")
    engine.load_state_dict({names[id(places[name])]: value for name, value in values.items()}, strict=False)


class _HeldTensor(NamedTuple):
    """A tensor of an engine's module in its unsharded form."""

    probe: torch.Tensor
    """Its shape and dtype, on the meta device."""
    read: Callable[[], torch.Tensor]
    """Reads its values to the CPU; all ranks must call it together."""


def _held_tensors(engine: Engine) -> dict[str, _HeldTensor]:
    if has_sharded_matrices(engine):
        held = {}
        for shard in whole_shards(engine._session):
            probe = torch.empty(shard.shape, dtype=shard.dtype, device="meta")
            held[shard.name] = _HeldTensor(probe, functools.partial(_read_whole, shard))
        return {**held, **{name: held[known] for name, known in names_of(engine._session).tied.items()}}
    return {
        name: _HeldTensor(_probe(tensor), functools.partial(_value, engine, tensor))
        for name, tensor in engine.module.state_dict(keep_vars=True).items()
    }


def _probe(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _read_whole(shard: TensorShard) -> torch.Tensor:
    return shard.read().view(shard.shape)


def _value(engine: Engine, tensor: torch.Tensor) -> torch.Tensor:
    return engine.full_value(tensor) if isinstance(tensor, nn.Parameter) else tensor.detach().cpu()


def only_dtype(module: nn.Module) -> torch.dtype | None:
    """The common dtype of all floating point parameters of ``module``, before conversion; None if they differ."""
    dtypes = {param.dtype for param in module.parameters() if param.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 else None


def exports_like_save_pretrained(module: nn.Module) -> bool:
    """True if ``engine.export_weights`` writes what ``save_pretrained`` does: no adapters of the model's own, and no
    quantiser.
    """
    return not getattr(module, "_hf_peft_config_loaded", False) and getattr(module, "hf_quantizer", None) is None
