"""``patrickstar.from_pretrained``: a Hugging Face model whose weights go from safetensors straight into chunks.

    engine, optimizer, *_ = patrickstar.initialize(model=lambda: patrickstar.from_pretrained(folder), config=config)

The model is built on the meta device. An engine reads its weights unit by unit (``patrickstar.module.materialize``), so
no rank ever holds a whole copy of them. Files in another form than the model's are converted as they are read
(``patrickstar.module.conversions``).
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from patrickstar.checkpoint.export import INDEX_NAME
from patrickstar.checkpoint.safetensors_format import DTYPES, NAMES
from patrickstar.module.conversions import ModelValues, UnknownConversionError, dequantized, model_values
from patrickstar.module.materialize import attach_values
from patrickstar.module.quantization import freeze_quantizable, quantization_of

logger = logging.getLogger("patrickstar")

SINGLE_NAME = "model.safetensors"
_SHOWN = 3
_FP8_BLOCK = (128, 128)  # DeepSeek-V3's
_AGAIN = "copy the folder again, or write it with save_pretrained of transformers"


class SafetensorsFolder:
    """The tensors in a folder of safetensors. FP8 weights are dequantised by their scales, whose names are left out.

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
        self._folder = Path(folder)
        self._open = {path: _open_file(path) for path in paths}  # memory-mapped: nothing is read yet
        self._files = {key: path for path, file in self._open.items() for key in file.keys()}  # noqa: SIM118
        self._scales = {key: scale for key in self._files if (scale := f"{key}_scale_inv") in self._files}

    @property
    def has_scales(self) -> bool:
        """True if some weights are in FP8."""
        return bool(self._scales)

    @property
    def keys(self) -> set[str]:
        """Tensor names in the files."""
        return set(self._files).difference(self._scales.values())

    def probe(self, key: str) -> torch.Tensor:
        """A tensor on the meta device, of the shape of tensor ``key``, whose values are not read.

        Raises:
            UnknownConversionError: FP8 codes without their scales.
        """
        if key in self._scales:
            return dequantized(self._header(key), self._header(self._scales[key]), self._block)
        probe = self._header(key)
        if probe.dtype.itemsize == 1 and probe.is_floating_point():
            raise UnknownConversionError(f"{key} is in {NAMES[probe.dtype]} and has no {key}_scale_inv")
        return probe

    def read(self, key: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Reads a tensor to the CPU; one that is dequantised gets ``dtype``."""
        values = self._get(key)
        return (
            dequantized(values, self._get(self._scales[key]), self._block).to(dtype or torch.float32)
            if key in self._scales
            else values
        )

    def _header(self, key: str) -> torch.Tensor:
        """A tensor on the meta device, of the shape and dtype that the file's header names."""
        held = self._open[self._files[key]].get_slice(key)
        return torch.empty(held.get_shape(), dtype=DTYPES[held.get_dtype()], device="meta")

    def _get(self, key: str) -> torch.Tensor:
        return self._open[self._files[key]].get_tensor(key)

    @functools.cached_property
    def _block(self) -> tuple[int, int]:
        """Rows and columns that have one scale, by ``config.json``."""
        config = self._folder / "config.json"
        said = json.loads(config.read_bytes()).get("quantization_config") if config.is_file() else None
        rows, columns = (said or {}).get("weight_block_size") or _FP8_BLOCK
        return rows, columns


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

    Parameters that the folder lacks are initialised by the model and named in a warning, as transformers does. Files
    that transformers converts (experts that the model has fused) are converted one parameter at a time. FP8 weights
    with scales for blocks are dequantised to ``dtype``. If a conversion cannot be done so, transformers loads the model
    in host memory, and the log says so.

    Raises:
        ImportError: transformers is missing.
        ValueError: the folder has no safetensors or no configuration, its index is damaged or leads out of it, a tensor
            has another shape than its parameter, the folder's weights are quantised already (other than in FP8), or the
            quantization is unknown.
    """
    wanted = quantization_of(quantization if quantization_config is None else quantization_config)
    try:
        import transformers
    except ImportError as error:
        raise ImportError("from_pretrained needs transformers: in a clone, pip install '.[transformers]'") from error
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(f"{os.fspath(folder)} has no config.json; give a folder that save_pretrained wrote")
    files = SafetensorsFolder(folder)
    config = _unquantized(config or transformers.AutoConfig.from_pretrained(folder, **config_options), folder)
    if model_class is None:
        model_class = _class_of(transformers, config, folder)
    dtype = _dtype_of(config) if dtype == "auto" else dtype
    build = getattr(model_class, "_from_config", None) or model_class.from_config
    with torch.device("meta"):
        model = build(config, dtype=dtype)
    _widen(model, dtype)
    model.tie_weights()
    try:
        values = model_values(model, model.state_dict(keep_vars=True), files)
    except UnknownConversionError as error:
        if files.has_scales:
            raise ValueError(f"{os.fspath(folder)} cannot be dequantised ({error}); give one in 16 bits") from error
        logger.info("%s: transformers loads its weights, in host memory (%s)", os.fspath(folder), error)
        loaded = type(model).from_pretrained(folder, config=config, dtype=dtype)
        if wanted is not None:
            freeze_quantizable(loaded, wanted)
        return loaded
    model._weight_conversions = values.used  # save_pretrained reverts them
    missing = _missing(model, values)
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


def _unquantized(config: Any, folder: str | os.PathLike[str]) -> Any:
    """A model configuration without the section of FP8 weights, which are dequantised.

    Raises:
        ValueError: the weights are quantised in another way.
    """
    said = getattr(config, "quantization_config", None)
    if said is None:
        return config
    method = said.get("quant_method") if isinstance(said, dict) else said.quant_method
    if method != "fp8":
        raise ValueError(
            f"{os.fspath(folder)} has weights that are quantised already (quantization_config in config.json: "
            f'{method}); give the folder that they were made of, with quantization="nf4" or "int8"'
        )
    config = copy.deepcopy(config)
    del config.quantization_config
    return config


def _widen(model: Any, dtype: torch.dtype) -> None:
    """Gives tensors that the model keeps in float32 that dtype, as ``from_pretrained`` of transformers does."""
    names = [pattern.replace("*", ".*") for pattern in model._get_dtype_plan(dtype)]
    for name, tensor in model.state_dict(keep_vars=True).items() if names else ():
        if tensor.is_floating_point() and any(re.search(pattern, name) for pattern in names):
            tensor.data = tensor.data.float()


def _dtype_of(config: Any) -> torch.dtype:
    dtype = getattr(config, "dtype", None) or torch.float32
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _missing(model: nn.Module, keys: ModelValues) -> list[str]:
    """Parameters without values under any of their names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    return [found[0] for found in names.values() if not any(name in keys for name in found)]


def _check_shapes(model: nn.Module, values: ModelValues) -> None:
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in values and values.shape(name) != tuple(tensor.shape):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} in the model and {values.shape(name)} in its file; give the "
                "configuration that the weights were saved with"
            )
