"""The plan of a step: printed, saved as versioned JSON, and replayed by a new engine."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from patrickstar import _C
from patrickstar.planning.predicted_step import Prediction, StepTimes
from patrickstar.sizes import show_size

VERSION = 9
_FORMAT = "patrickstar.plan"


# Bytes of an element with its share of the scales (csrc/quant/kernels.h).
_CODE_BYTES = {"NF4": 1 / 2 + 1 / 64 + 4 / (64 * 256), "INT8": 1 + 4 / 256}
_VALUE_BYTES = {"FLOAT32": 4, "FLOAT16": 2, "BFLOAT16": 2}


@dataclasses.dataclass(frozen=True)
class PlannedChunk:
    """A plan's record of a chunk, enough to recognise its layout."""

    numel: int
    """Elements of the chunk over all ranks."""
    shard_numel: int
    """Elements of one rank's shard."""
    dtype: str
    """Compute dtype, a name of ``_C.DType``."""
    trainable: bool
    """True if it has optimizer states."""
    states_on_device: bool
    """True if the states (of quantised chunks: codes and scales) rest on the device."""
    quantization: str = "NONE"
    """Storage of its values, a name of ``_C.QuantType``."""
    disk_bytes: int = 0
    """Disk bytes of its optimizer states; 0: not on the disk."""

    @property
    def tier(self) -> _C.Tier:
        """Resting tier of its optimizer states."""
        if self.states_on_device:
            return _C.Tier.DEVICE
        return _C.Tier.DISK if self.disk_bytes else _C.Tier.HOST

    @property
    def dequantized_bytes(self) -> int:
        """Device bytes read and written to dequantise the chunk; 0 if it is not quantised."""
        if self.quantization not in _CODE_BYTES:
            return 0
        return int(self.numel * (_CODE_BYTES[self.quantization] + _VALUE_BYTES[self.dtype]))


@dataclasses.dataclass(frozen=True)
class SavedCalls:
    """Saved activations of a forward's checkpointed calls, and the bytes of each choice, by number of the call."""

    saved: tuple[str, ...]
    """Values of ``Saved``."""
    product_bytes: tuple[int, ...]
    """Bytes of products; 0: they cannot be saved alone."""
    all_bytes: tuple[int, ...]
    base_bytes: int
    """Highest activation memory if nothing is saved."""
    size: int
    """Size of the largest forward's inputs: elements, times their length if attention saves its square. 0: not known,
    the next forward is as large.
    """
    is_quadratic: bool
    """True if attention saves tensors of [..., tokens, tokens]."""

    @classmethod
    def largest_of(cls, by_rank: Iterable[SavedCalls]) -> SavedCalls:
        """The largest figures of ranks that made the same choice."""
        ranks = list(by_rank)
        return cls(
            ranks[0].saved,
            tuple(map(max, zip(*(rank.product_bytes for rank in ranks), strict=True))),
            tuple(map(max, zip(*(rank.all_bytes for rank in ranks), strict=True))),
            max(rank.base_bytes for rank in ranks),
            max(rank.size for rank in ranks),
            any(rank.is_quadratic for rank in ranks),
        )

    @classmethod
    def from_plain(cls, fields: Mapping[str, Any]) -> SavedCalls:
        """Reads JSON's types. Raises KeyError, TypeError or IndexError if they are damaged."""
        lists = {key: tuple(fields[key]) for key in ("saved", "product_bytes", "all_bytes")}
        if len({len(values) for values in lists.values()}) != 1:
            raise IndexError("saved calls of several lengths")
        return cls(
            **lists,
            base_bytes=int(fields["base_bytes"]),
            size=int(fields["size"]),
            is_quadratic=bool(fields["is_quadratic"]),
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """The accesses of a step and the transfers at each."""

    chunks: tuple[PlannedChunk, ...]
    """The chunks of the layout, by chunk id."""
    timeline: list[dict[str, Any]]
    """The accesses that it was made for, as ``_C.make_plan`` takes them."""
    steps: list[dict[str, Any]]
    """Evictions, fetches and prefetches by access, as ``_C.make_plan`` returns them."""
    problem: dict[str, Any]
    """The other arguments of ``_C.make_plan``: costs and limits in bytes."""
    uploaded_bytes: int
    """Host to device per step, in the steady state."""
    downloaded_bytes: int
    """Device to host per step, in the steady state."""
    least_limit_bytes: int
    """Smallest limit under which every access fits."""
    times: StepTimes | None = None
    """Times that the choice used; None: no step was measured."""
    prediction: Prediction | None = None
    """Prediction of the step with these times."""
    saved_calls: SavedCalls | None = None
    """None: checkpointed calls save nothing."""

    @property
    def activation_peak_bytes(self) -> int:
        """Highest activation memory of the step."""
        return max((access["activation_peak_bytes"] for access in self.timeline), default=0)

    @property
    def num_ranks(self) -> int:
        """Number of ranks that share each chunk."""
        return max((chunk.numel // chunk.shard_numel for chunk in self.chunks), default=1)

    def as_core(self) -> dict[str, Any]:
        """Returns the plan as ``_C.simulate`` takes it."""
        return {
            "accesses": self.steps,
            "uploaded_bytes": self.uploaded_bytes,
            "downloaded_bytes": self.downloaded_bytes,
            "least_limit_bytes": self.least_limit_bytes,
        }

    def check_layout(self, layout: _C.Layout, source: str) -> None:
        """Raises ValueError unless the plan was made for ``layout``. ``source`` names the plan in messages."""
        if layout.num_ranks != self.num_ranks:
            raise ValueError(
                f"{source} is a plan for {self.num_ranks} ranks, this run has {layout.num_ranks}; start as many as it "
                "was made with, or leave 'plan' out"
            )
        if layout.num_chunks != len(self.chunks):
            raise ValueError(
                f"{source} is a plan for {len(self.chunks)} chunks, this engine has {layout.num_chunks}; give the "
                "model, default_chunk_size and device_memory that it was made with, or leave 'plan' out"
            )
        for index, planned in enumerate(self.chunks):
            chunk = layout.chunk(index)
            kind = (chunk["dtype"].name, chunk["trainable"], chunk["quantization"].name)
            actual = (chunk["numel"], chunk["shard_numel"], *kind)
            made_for = (planned.numel, planned.shard_numel, planned.dtype, planned.trainable, planned.quantization)
            if actual != made_for:
                raise ValueError(
                    f"{source} is a plan for another layout: its chunk {index} has {_described(*made_for)}, this "
                    f"engine's has {_described(*actual)}; give the model, default_chunk_size and device_memory that it "
                    "was made with, or leave 'plan' out"
                )

    @property
    def digest(self) -> str:
        """A hash by which ranks compare plans."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def save(self, path: str | Path) -> None:
        """Writes JSON of version ``VERSION``."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    def to_json(self) -> str:
        """Returns one line of JSON of version ``VERSION``, which :meth:`from_json` reads."""
        fields = {
            "format": _FORMAT,
            "version": VERSION,
            **dataclasses.asdict(self),
            "timeline": [_plain_access(access) for access in self.timeline],
            "steps": [{key: _plain_arrays(arrays) for key, arrays in step.items()} for step in self.steps],
            "problem": {**self.problem, "costs": [[*_plain(id), *cost] for id, cost in self.problem["costs"].items()]},
        }
        return json.dumps(fields)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a file of :meth:`save`.

        Raises:
            ValueError: the file is not a plan, has another version, or is damaged.
            OSError: it cannot be read.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except ValueError as error:
            raise ValueError(f"{path} is not a plan: {error}") from error
        return cls.from_json(text, str(path))

    @classmethod
    def from_json(cls, text: str, source: str) -> Plan:
        """Reads the text of :meth:`to_json`; ``source`` names its origin in messages.

        Raises:
            ValueError: the text is not a plan, has another version, or is damaged.
        """
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{source} is not a plan: {error}") from error
        if not isinstance(fields, dict) or fields.pop("format", None) != _FORMAT:
            raise ValueError(f"{source} is not a plan; write one with engine.plan().save(path)")
        version = fields.pop("version", None)
        if version != VERSION:
            raise ValueError(
                f"{source} is a plan of version {version}, this PatrickStar reads {VERSION}; write it again"
            )
        try:
            times, prediction, saved = (fields.pop(key) for key in ("times", "prediction", "saved_calls"))
            plan = cls(
                chunks=tuple(PlannedChunk(**chunk) for chunk in fields.pop("chunks")),
                timeline=[_core_access(access) for access in fields.pop("timeline")],
                steps=[{key: _core_arrays(arrays) for key, arrays in step.items()} for step in fields.pop("steps")],
                problem=_core_problem(fields.pop("problem")),
                times=None if times is None else StepTimes(**times),
                prediction=None if prediction is None else Prediction(**prediction),
                saved_calls=None if saved is None else SavedCalls.from_plain(saved),
                **fields,
            )
            plan._check_chunks()
            plan._check_times()
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"{source} is a damaged plan: {type(error).__name__} {error}; write it again") from error
        return plan

    def _check_chunks(self) -> None:
        for access in self.timeline:
            for chunk, _kind, _mode in access["uses"]:
                if not 0 <= chunk < len(self.chunks):
                    raise IndexError(f"an access uses chunk {chunk} of {len(self.chunks)}")

    def _check_times(self) -> None:
        if self.times is None:
            return
        self.times.as_core()
        given = (len(self.times.compute_seconds), len(self.times.updates))
        if given != (len(self.timeline), len(self.chunks)):
            raise IndexError(f"times of {given[0]} accesses and {given[1]} chunks")
        if len(self.times.activations) not in (0, len(self.timeline)):
            raise IndexError(f"activations of {len(self.times.activations)} accesses")

    def __str__(self) -> str:
        """A table: one line per run of accesses without transfers, one per access with transfers."""
        resident = sum(chunk.states_on_device for chunk in self.chunks)
        lines = [
            f"plan of {len(self.timeline)} accesses over {len(self.chunks)} chunks "
            f"({resident} with optimizer states on the device)",
            f"per step {show_size(self.uploaded_bytes)} up, {show_size(self.downloaded_bytes)} down; "
            f"activation memory up to {show_size(self.activation_peak_bytes)}; "
            f"fits from {show_size(self.least_limit_bytes)} on",
            *([self.prediction.roofline_line()] if self.prediction is not None else []),
            f"{'access':>8}  {'phase':8}  {'activations MiB':>15}  uses | evicts | fetches | prefetches",
        ]
        for index, (access, step) in enumerate(zip(self.timeline, self.steps, strict=True)):
            uses = [(c, k) for c, k, mode in access["uses"] if mode != _C.ArrayUseMode.FINALISE]
            moved = [
                _names([*step["evict"], *step["evict_ahead"]]),
                _names(step["fetch"]),
                _names(step["prefetch"]),
            ]
            activation_memory = access["activation_peak_bytes"] / 2**20
            lines.append(
                f"{index:8}  {access['phase'].name.lower():8}  {activation_memory:15.1f}  "
                + " | ".join([_names(uses), *moved])
            )
        return "\n".join(lines)


def _described(numel: int, shard_numel: int, dtype: str, trainable: bool, quantization: str) -> str:
    part = f", {shard_numel} on each rank" if shard_numel < numel else ""
    return f"{numel} elements of {dtype} (trainable: {trainable}, quantised: {quantization}{part})"


def plan_of(
    layout: _C.Layout,
    timeline: list[dict[str, Any]],
    states_on_device: Sequence[bool],
    problem: dict[str, Any],
    plan: Mapping[str, Any],
    times: StepTimes | None = None,
    prediction: Prediction | None = None,
    states_on_disk: Sequence[bool] | None = None,
) -> Plan:
    """Converts a plan of the core."""
    return Plan(
        chunks=planned_chunks(layout, states_on_device, states_on_disk),
        timeline=timeline,
        steps=plan["accesses"],
        problem=problem,
        uploaded_bytes=plan["uploaded_bytes"],
        downloaded_bytes=plan["downloaded_bytes"],
        least_limit_bytes=plan["least_limit_bytes"],
        times=times,
        prediction=prediction,
    )


def planned_chunks(
    layout: _C.Layout, states_on_device: Sequence[bool], states_on_disk: Sequence[bool] | None = None
) -> tuple[PlannedChunk, ...]:
    """Returns a plan's records of the chunks of ``layout``. ``states_on_disk`` None: none."""
    chunks = [layout.chunk(index) for index in range(layout.num_chunks)]
    on_disk = [False] * len(chunks) if states_on_disk is None else states_on_disk
    return tuple(
        PlannedChunk(
            chunk["numel"],
            chunk["shard_numel"],
            chunk["dtype"].name,
            chunk["trainable"],
            bool(on_device),
            chunk["quantization"].name,
            chunk["disk_bytes"] if is_on_disk else 0,
        )
        for chunk, on_device, is_on_disk in zip(chunks, states_on_device, on_disk, strict=True)
    )


def timeline_to_json(timeline: list[dict[str, Any]]) -> str:
    """Returns the accesses of a step as text for :func:`timeline_from_json`."""
    return json.dumps([_plain_access(access) for access in timeline])


def timeline_from_json(text: str, num_chunks: int) -> list[dict[str, Any]]:
    """Reads the text of :func:`timeline_to_json` for a layout of ``num_chunks`` chunks.

    Raises:
        ValueError: the text is for another layout or damaged.
    """
    try:
        timeline = [_core_access(access) for access in json.loads(text)]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"the accesses of a step are damaged: {type(error).__name__} {error}") from error
    used = {chunk for access in timeline for chunk, _, _ in access["uses"]}
    if not used <= set(range(num_chunks)):
        raise ValueError(f"the accesses of a step use chunks of 0 to {max(used)}, there are {num_chunks}")
    return timeline


def _names(arrays: Sequence[tuple[int, _C.ArrayKind]]) -> str:
    return " ".join(f"{kind.name.lower()}{chunk}" for chunk, kind in arrays) or "-"


def _plain(array: tuple[int, _C.ArrayKind]) -> list[Any]:
    return [array[0], array[1].name]


def _plain_arrays(arrays: Sequence[tuple[int, _C.ArrayKind]]) -> list[list[Any]]:
    return [_plain(array) for array in arrays]


def _plain_access(access: Mapping[str, Any]) -> dict[str, Any]:
    uses = [[chunk, kind.name, mode.name] for chunk, kind, mode in access["uses"]]
    plain = {"phase": access["phase"].name, "uses": uses, "activation_peak_bytes": access["activation_peak_bytes"]}
    return plain | _phase_ends(access)


def _core(array: Sequence[Any]) -> tuple[int, _C.ArrayKind]:
    return int(array[0]), _C.ArrayKind.__members__[array[1]]


def _core_arrays(arrays: Sequence[Sequence[Any]]) -> list[tuple[int, _C.ArrayKind]]:
    return [_core(array) for array in arrays]


def _core_problem(problem: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **problem,
        "costs": {_core(cost): tuple(cost[2:]) for cost in problem["costs"]},
        "round_trip_costs": [tuple(cost) for cost in problem["round_trip_costs"]],
    }


def _core_access(access: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "phase": _C.Phase.__members__[access["phase"]],
        "uses": [(*_core(use), _C.ArrayUseMode.__members__[use[2]]) for use in access["uses"]],
        "activation_peak_bytes": int(access["activation_peak_bytes"]),
    } | _phase_ends(access)


def _phase_ends(access: Mapping[str, Any]) -> dict[str, int]:
    """The number of phases finished after the access, if any."""
    return {"ends_phases": int(access["ends_phases"])} if "ends_phases" in access else {}
