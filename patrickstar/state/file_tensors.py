"""The tensors that ``save_pretrained`` of transformers writes for a model: its conversions, reverted a parameter at a
time.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from patrickstar import _C
from patrickstar.checkpoint.export import file_dtype
from patrickstar.checkpoint.shards import TensorShard
from patrickstar.module.compiled.dynamo import unwrapped
from patrickstar.module.conversions import is_pretrained

logger = logging.getLogger("patrickstar")


class _Probe(torch.Tensor):
    """A tensor without values. Results that are computed from it name the model's tensors that they depend on."""

    sources: frozenset[str]

    @classmethod
    def of(cls, name: str, shape: Sequence[int]) -> _Probe:
        probe = torch.empty(shape, device="meta").as_subclass(cls)
        probe.sources = frozenset([name])
        return probe

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        used = [leaf.sources for leaf in tree_leaves((args, kwargs)) if hasattr(leaf, "sources")]
        for made in tree_leaves(result):
            if isinstance(made, _Probe) and not hasattr(made, "sources"):
                made.sources = frozenset().union(*used)
        return result


@dataclasses.dataclass(frozen=True)
class _Part:
    """Tensors of a model that are converted together."""

    sources: tuple[str, ...]
    """Names in the model."""
    files: Mapping[str, tuple[int, ...]]
    """Shapes by the names in files."""
    is_converted: bool
    """False if the only tensor just gets another name."""


class FileTensors:
    """How a model's tensors become those of files."""

    def __init__(self, module: nn.Module, shapes: Mapping[str, Sequence[int]]):
        """``shapes``: of the model's tensors by their names, a tied one once."""
        self._module = unwrapped(module)
        try:
            self._parts = self._find(shapes)
        except Exception as error:  # of transformers' operations, each of which has its own
            logger.warning(
                "%s is exported under its own names, since transformers' conversions of its files cannot be reverted "
                "one parameter at a time (%s)",
                type(self._module).__name__,
                error,
            )
            self._parts = [_Part((name,), {name: tuple(shape)}, False) for name, shape in shapes.items()]

    @property
    def converts(self) -> bool:
        """True if files have other tensors than the model, not only other names."""
        return any(part.is_converted for part in self._parts)

    @property
    def names(self) -> dict[str, str]:
        """Names in files of the tensors that are not converted."""
        return {part.sources[0]: next(iter(part.files)) for part in self._parts if not part.is_converted}

    def read_all(self, shards: Iterable[TensorShard]) -> None:
        """Reads whole tensors in the order in which :meth:`made_of` reads them; ranks read together."""
        by_name = {shard.name: shard for shard in shards}
        for part in self._parts:
            for name in part.sources:
                if name in by_name:
                    by_name[name].read()

    def made_of(self, shards: Iterable[TensorShard], dtype: torch.dtype | None) -> list[TensorShard]:
        """The files' tensors. Each conversion runs when the first of its results is read.

        Args:
            shards: whole tensors of the model.
            dtype: floating point parameters are converted in it; None: each in its own.
        """
        by_name = {shard.name: shard for shard in shards}
        made = []
        for part in self._parts:
            sources = [by_name[name] for name in part.sources]
            if part.is_converted:
                made += self._converted(part, sources, dtype)
            else:
                made += [dataclasses.replace(sources[0], name=name) for name in part.files]
        return made

    def _converted(self, part: _Part, sources: list[TensorShard], dtype: torch.dtype | None) -> list[TensorShard]:
        ready: dict[str, torch.Tensor] = {}
        kind, made_in = sources[0].kind, file_dtype(sources[0], dtype)

        def read(name: str) -> torch.Tensor:
            if name not in ready:
                ready.clear()
                with _C.HostAllocations(), torch.no_grad():
                    values = {source.name: _copied(source, made_in) for source in sources}
                    ready.update(self._reverted(values))
            with _C.HostAllocations():
                return ready.pop(name).reshape(-1)

        return [
            TensorShard(
                name=name,
                kind=kind,
                shape=shape,
                dtype=made_in,
                begin=0,
                end=torch.Size(shape).numel(),
                read=functools.partial(read, name),
            )
            for name, shape in part.files.items()
        ]

    def _find(self, shapes: Mapping[str, Sequence[int]]) -> list[_Part]:
        ignored = getattr(self._module, "_keys_to_ignore_on_save", None) or ()
        probes = {name: _Probe.of(name, shape) for name, shape in shapes.items() if name not in ignored}
        made: dict[frozenset[str], dict[str, torch.Tensor]] = {}
        for name, probe in self._reverted(probes).items():
            made.setdefault(probe.sources, {})[name] = probe
        parts = {}
        for sources, found in made.items():
            names = tuple(name for name in probes if name in sources)
            is_renamed = len(names) == len(found) == 1 and next(iter(found.values())) is probes[names[0]]
            parts[names[0]] = _Part(names, {name: tuple(probe.shape) for name, probe in found.items()}, not is_renamed)
        for part in parts.values():
            alone = self._reverted({name: probes[name] for name in part.sources}) if part.is_converted else {}
            if part.is_converted and {name: tuple(probe.shape) for name, probe in alone.items()} != part.files:
                raise ValueError(f"{part.sources[0]} is converted together with other parameters")
        covered = [name for part in parts.values() for name in part.sources]
        if sorted(covered) != sorted(probes):
            raise ValueError("parameters are converted more than once, or not at all")
        return [parts[name] for name in probes if name in parts]

    def _reverted(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if not is_pretrained(self._module):
            return dict(values)
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self._module, dict(values))


def _copied(shard: TensorShard, dtype: torch.dtype) -> torch.Tensor:
    """A shard's values, which the next read does not change."""
    values = shard.read()
    return values.to(dtype, copy=True).view(shard.shape)
