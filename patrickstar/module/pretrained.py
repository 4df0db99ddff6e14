"""``patrickstar.from_pretrained``: a Hugging Face model whose weights go from safetensors straight into chunks.

    engine, optimizer, *_ = patrickstar.initialize(model=lambda: patrickstar.from_pretrained(folder), config=config)

The model is built on the meta device. An engine reads its weights unit by unit (``patrickstar.module.materialize``), so
no rank ever holds a whole copy of them.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from patrickstar.checkpoint.export import INDEX_NAME
from patrickstar.module.materialize import attach_values
from patrickstar.module.quantization import freeze_quantizable, quantization_of

logger = logging.getLogger("patrickstar")

SINGLE_NAME = "model.safetensors"
_SHOWN = 3
_AGAIN = "copy the folder again, or write it with save_pretrained of transformers"


class SafetensorsFolder:
    """The tensors in a folder of safetensors, by ``state_dict`` names of one model.

    Args:
        folder: has ``model.safetensors``, or several files and their index.

    Raises:
        ValueError: there are no such files, or they cannot be read.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        paths = weight_files(folder)
        if not paths:
            raise ValueError(
                f"{os.fspath(folder)} has neither {SINGLE_NAME} nor {INDEX_NAME}; convert its weights with "
                "save_pretrained of transformers"
            )
        self._open = {path: _open_file(path) for path in paths}  # memory-mapped: nothing is read yet
        self._files = {key: path for path, file in self._open.items() for key in file.keys()}  # noqa: SIM118
        self._keys = {key: key for key in self._files}

    @property
    def keys(self) -> set[str]:
        """Tensor names in the files."""
        return set(self._files)

    def rename(self, keys: dict[str, str]) -> None:
        """Renames tensors: ``keys`` maps new names to names in the files."""
        self._keys = dict(keys)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of tensor ``name``; its values are not read."""
        key = self._keys[name]
        return tuple(self._open[self._files[key]].get_slice(key).get_shape())

    def __contains__(self, name: str) -> bool:
        return name in self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def read(self, name: str) -> torch.Tensor:
        """Reads a tensor to the CPU."""
        key = self._keys[name]
        return self._open[self._files[key]].get_tensor(key)


def from_pretrained(
    folder: str | os.PathLike[str],
    model_class: Any = None,
    *,
    config: Any = None,
    dtype: torch.dtype | str = "auto",
    quantization: Any = None,
    quantization_config: Any = None,
    **config_options: Any,
) -> nn.Module:
    """Builds a model on the meta device, in evaluation mode; it gets the folder's weights when an engine takes it.

    Args:
        folder: has ``config.json`` and safetensors, as ``save_pretrained`` or ``engine.export_weights`` write them.
        model_class: a class of transformers, also an ``AutoModel…``; None: the class named in ``config.json``.
        config: replaces the folder's model configuration.
        dtype: dtype of the model's parameters and ``state_dict``; ``"auto"``: that of ``config.json``. Masters are
            always float32.
        quantization: ``"nf4"``, ``"int8"``, or the configuration's section ``quantization`` as a dict. Weights of
            linear layers are frozen and stored quantised (docs/guides/qlora.md). Each is quantised as it is read: the
            16-bit weights never exist as a whole.
        quantization_config: the same in transformers' form: a ``BitsAndBytesConfig`` for NF4 with double quantisation;
            others are refused.
        **config_options: put into the model configuration, for example ``attn_implementation="sdpa"``.

    Parameters that the folder lacks are initialised by the model and named in a warning, as transformers does. If the
    files need more than renaming (merged experts), transformers loads the model in host memory, and the log says so.

    Raises:
        ImportError: transformers is missing.
        ValueError: the folder has no safetensors or no configuration, its index is damaged or leads out of it, a tensor
            has another shape than its parameter, the folder's weights are quantised already, or the quantization is
            unknown.
    """
    wanted = quantization_of(quantization if quantization_config is None else quantization_config)
    try:
        import transformers
    except ImportError as error:
        raise ImportError("from_pretrained needs transformers: in a clone, pip install '.[transformers]'") from error
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(f"{os.fspath(folder)} has no config.json; give a folder that save_pretrained wrote")
    values = SafetensorsFolder(folder)
    config = config or transformers.AutoConfig.from_pretrained(folder, **config_options)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"{os.fspath(folder)} has weights that are quantised already (quantization_config in config.json); give "
            'the folder that they were made of, with quantization="nf4" or "int8"'
        )
    if model_class is None:
        model_class = _class_of(transformers, config, folder)
    dtype = _dtype_of(config) if dtype == "auto" else dtype
    build = getattr(model_class, "_from_config", None) or model_class.from_config
    with torch.device("meta"):
        model = build(config, dtype=dtype)
    model.tie_weights()
    keys = _match(model, values.keys)
    missing = _missing(model, keys)
    left = values.keys - set(keys.values())
    if missing and left and _has_conversions(model):
        logger.info("%s: transformers converts its weights, so it loads them, in host memory", os.fspath(folder))
        loaded = type(model).from_pretrained(folder, config=config, dtype=dtype)
        if wanted is not None:
            freeze_quantizable(loaded, wanted)
        return loaded
    values.rename(keys)
    _check_shapes(model, values)
    if missing:
        shown = ", ".join(missing[:_SHOWN]) + (", ..." if len(missing) > _SHOWN else "")
        logger.warning(
            "%s has no values for %d parameters of %s, which are initialised: %s; train them before use",
            os.fspath(folder),
            len(missing),
            type(model).__name__,
            shown,
        )
    attach_values(model, values)
    if wanted is not None:
        freeze_quantizable(model, wanted)
    model.config._name_or_path = os.fspath(folder)
    if model.can_generate() and (Path(folder) / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model.eval()


def weight_files(folder: str | os.PathLike[str]) -> list[Path]:
    """The safetensors files of a model in ``folder``; empty if there are none.

    Only files of the folder itself are accepted, or links in it, as in Hugging Face's cache. An untrusted index cannot
    lead elsewhere.

    Raises:
        ValueError: the index is damaged, or names something that is no file of the folder.
    """
    folder = Path(folder)
    index = folder / INDEX_NAME
    if not index.is_file():
        return [folder / SINGLE_NAME] if (folder / SINGLE_NAME).is_file() else []
    names = sorted(set(_weight_map(index).values()))
    for name in names:
        if name != Path(name).name or "\\" in name or "\0" in name:
            raise ValueError(
                f"{index} names the file {name[:200]!r}; names are those of files in its folder, without a path: "
                f"{_AGAIN}"
            )
        if not (folder / name).is_file():
            raise ValueError(f"{index} names the file {name!r}, which is not in its folder; {_AGAIN}")
    return [folder / name for name in names]


def _weight_map(index: Path) -> dict[str, str]:
    """Maps tensor names to file names, from the index file ``index``."""
    try:
        said = json.loads(index.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{index} cannot be read as JSON ({error}); {_AGAIN}") from error
    found = said.get("weight_map") if isinstance(said, dict) else said
    if not isinstance(found, dict):
        raise ValueError(f"{index} has no weight_map from tensors to files; {_AGAIN}")
    if not found:
        raise ValueError(f"{index} has an empty weight_map; {_AGAIN}")
    for tensor, name in found.items():
        if not isinstance(name, str):
            raise ValueError(f"{index}: the file of {tensor[:200]!r} is {name!r:.200}, not a name; {_AGAIN}")
    return found


def _open_file(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read as safetensors ({error}); {_AGAIN}") from error


def _class_of(transformers: Any, config: Any, folder: str | os.PathLike[str]) -> Any:
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    raise ValueError(
        f"{os.fspath(folder)}: config.json names no class of transformers (architectures: {config.architectures}); "
        "pass model_class"
    )


def _dtype_of(config: Any) -> torch.dtype:
    dtype = getattr(config, "dtype", None) or torch.float32
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _match(model: nn.Module, keys: set[str]) -> dict[str, str]:
    """Maps the model's names to names in the files: the same name, or with or without the prefix of the model's body.
    Checkpoints of the body alone lack the prefix.
    """
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    result = {}
    for name in model.state_dict(keep_vars=True):
        for key in (name, prefix + name, name.removeprefix(prefix)):
            if key in keys:
                result[name] = key
                break
    return result


def _missing(model: nn.Module, keys: dict[str, str]) -> list[str]:
    """Parameters without values under any of their names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    return [found[0] for found in names.values() if not any(name in keys for name in found)]


def _has_conversions(model: Any) -> bool:
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return False
    return bool(get_model_conversion_mapping(model))


def _check_shapes(model: nn.Module, values: SafetensorsFolder) -> None:
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in values and values.shape(name) != tuple(tensor.shape):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} in the model and {values.shape(name)} in its file; give the "
                "configuration that the weights were saved with"
            )
