"""Transformers' conversions between the tensors of files and a model's own, such as fused experts, as values to read.

A converted tensor's sources are read when it is read, and freed with it. No other tensor is in memory then, except
others that the same sources make.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn


class UnknownConversionError(Exception):
    """A model's files need a conversion that cannot be done one tensor at a time."""


class Files(Protocol):
    """Tensors by their names in files."""

    @property
    def keys(self) -> set[str]:
        """The names."""

    def probe(self, key: str) -> torch.Tensor:
        """A tensor on the meta device, of the value's shape."""

    def read(self, key: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The value on the CPU; one that has to be computed is of ``dtype``."""


@dataclasses.dataclass
class _Group:
    """One conversion, and the tensors in files that it takes."""

    first: str
    """Name of its first result."""
    converter: Any
    """A ``WeightConverter`` of transformers; None: the result is the source under another name."""
    sources: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    """The converter's pattern, and the name in the files, of each source in order."""

    def convert(self, read: Callable[[str], torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
        """The results by name in the model."""
        if self.converter is None:
            return {self.first: read(self.sources[0][1])}
        converter = copy.deepcopy(self.converter)
        for pattern, key in self.sources:
            converter.add_tensor(self.first, key, pattern, functools.partial(read, key))
        found = converter.convert(self.first, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}


class ModelValues:
    """The tensors in files by the ``state_dict`` names of one model, in the model's shapes."""

    def __init__(self, files: Files, held: Mapping[str, torch.Tensor], groups: Mapping[str, _Group], config: Any):
        """Finds the results of ``groups``, keyed by their first one, for the model's tensors ``held``.

        Raises:
            UnknownConversionError: a conversion fails.
        """
        probes = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in held.items()}
        self._files = files
        self._model = types.SimpleNamespace(config=config, get_parameter=probes.__getitem__)
        self._dtypes = {name: probe.dtype for name, probe in probes.items()}
        self._of_name: dict[str, _Group] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._ready: dict[str, torch.Tensor] = {}
        self.used: list[Any] = []
        """Transformers' transforms that the files' names needed, as saving reverts them."""
        for group in groups.values():
            try:
                found = group.convert(files.probe, self._model)
            except Exception as error:  # of transformers' operations, each of which has its own
                raise UnknownConversionError(f"{group.first}: {error}") from error
            for name, probe in found.items():
                if name in probes:
                    self._of_name.setdefault(name, group)
                    self._shapes.setdefault(name, tuple(probe.shape))

    @property
    def left(self) -> list[str]:
        """Names in the files that the model has no use for."""
        taken = {key for group in self._of_name.values() for _, key in group.sources}
        return sorted(self._files.keys - taken)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of tensor ``name``; its values are not read."""
        return self._shapes[name]

    def __contains__(self, name: str) -> bool:
        return name in self._of_name

    def __iter__(self) -> Iterator[str]:
        return iter(self._of_name)

    def read(self, name: str) -> torch.Tensor:
        """Reads a tensor to the CPU, and converts it."""
        if name not in self._ready:
            self._ready = {}  # frees what the group before it left
            dtype = self._dtypes[name]
            self._ready = self._of_name[name].convert(lambda key: self._files.read(key, dtype), self._model)
        return self._ready.pop(name)


def model_values(model: nn.Module, held: Mapping[str, torch.Tensor], files: Files) -> ModelValues:
    """The values of the model's tensors ``held`` in ``files``: by their names, or for a model of transformers as its
    ``from_pretrained`` finds them.

    Raises:
        UnknownConversionError: transformers converts them in another way.
    """
    if not is_pretrained(model):
        return ModelValues(files, held, {key: _direct(key) for key in files.keys if key in held}, None)
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )
    except ImportError as error:
        raise UnknownConversionError("transformers older than 5.17") from error
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    if len(renamings) + len(converters) != len(transforms):
        raise UnknownConversionError(f"{type(model).__name__} has conversions of a new kind")
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    groups: dict[str, _Group] = {}
    for key in sorted(files.keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, held)
        if name not in held and key in held:
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, held)
        if name in held:
            group = groups.setdefault(name, _Group(name, of_pattern.get(pattern)))
            group.sources.append((pattern or key, key))
    values = ModelValues(files, held, groups, model.config)
    values.used = [transform for transform in transforms if transform.was_used()]
    return values


def is_pretrained(module: nn.Module) -> bool:
    """True for a model of transformers, which is not imported for it."""
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return base is not None and isinstance(module, base)


def _direct(key: str) -> _Group:
    return _Group(key, None, [(key, key)])


def dequantized(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The float32 or bfloat16 values of FP8 ``codes``, by transformers' own operation.

    Args:
        codes: [..., rows, columns].
        scales: one for each block of rows and columns; blocks at the edges may be cut off.
        block: rows and columns of a block; others, if whole, follow from the number of scales.

    Raises:
        ValueError: there are not as many scales as blocks.
    """
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    rows, columns = codes.shape[-2:]
    grid = scales.shape[-2:]
    if [-(-size // part) for size, part in zip((rows, columns), block, strict=True)] == list(grid):
        padding = (0, grid[1] * block[1] - columns, 0, grid[0] * block[0] - rows)  # the operation takes whole blocks
        codes = nn.functional.pad(codes.view(torch.uint8), padding).view(codes.dtype)
    elif len(grid) == 2 and (rows % grid[0] or columns % grid[1]):
        raise ValueError(f"{list(grid)} scales do not fit {rows} x {columns} values in blocks of {tuple(block)}")
    if scales.dtype in (torch.float16, torch.bfloat16):
        scales = scales.float()
    found = Fp8Dequantize(None).convert({"x.weight": [codes], "x.weight_scale_inv": [scales]})["x.weight"]
    return (found[0] if isinstance(found, list) else found)[..., :rows, :columns]
