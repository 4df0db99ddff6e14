"""Runs on record as the planner poses them, with chunks' states placed by its heuristics or as they are told."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch

from benchmark.common import SHAPES, GptShape
from patrickstar import _C
from patrickstar.config import Master, Speculation, States
from patrickstar.machine.state_scheme import choose_layout
from patrickstar.module.preprocess import choose_chunk_size, make_layout, plan_params
from patrickstar.planning.cluster import Cluster
from patrickstar.planning.machines import H200, Machine
from patrickstar.planning.models import build_model
from patrickstar.planning.prediction import Case, Predictor
from patrickstar.planning.setting import DoesNotFitError, Setting
from patrickstar.planning.uses import trace_uses

if TYPE_CHECKING:
    from collections.abc import Sequence

GIB = 2**30
_COMMIT: dict[str, Any] = {"speculation": Speculation.COMMIT}
_EIGHT_BIT = _COMMIT | {"states": States.EIGHT_BIT}
_NO_MASTER = _EIGHT_BIT | {"master": Master.STOCHASTIC}


@dataclasses.dataclass(frozen=True)
class Job:
    """A run on record: its model of ``SHAPES`` or for ``build_model``, and one rank's batch and budgets."""

    model: str
    batch: int
    device_gib: float
    host_gib: float
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of ``Setting``."""
    ranks: int = 1
    chunk_numel: int = 64 * 2**20
    acting: bool = False
    """Clipping acts in every step."""


# Budgets are those of the records of benchmark/results.
JOBS = {
    "4.31B/24": Job("4.3b", 16, 24, 118),
    "4.31B/24 acting": Job("4.3b", 16, 24, 118, acting=True),
    "6.3B/24": Job("6.3b", 16, 24, 120.7),
    "8B/40": Job("llama-8b", 4, 40, 118),
    "8B/40 acting": Job("llama-8b", 4, 40, 118, acting=True),
    "8B/100": Job("llama-8b", 4, 100, 120.7),
    "10.5B/134": Job("10.5b", 16, 134, 112),
    "14.8B/136": Job("qwen-14b", 4, 136.5, 120.7),
    "14.8B/136 acting": Job("qwen-14b", 4, 136.5, 120.7, acting=True),
    "16.1B/136 commit": Job("16.1b", 8, 136, 114, _COMMIT),
    "18.5B/136": Job("18.5b", 8, 136.5, 120.7),
    "18.5B/139 commit": Job("18.5b", 8, 138.3, 121, _COMMIT),
    "31B bf16 commit": Job("31b", 4, 138.3, 121, _COMMIT | {"states": States.BF16}),
    "41.9B 8bit commit": Job("42b", 4, 138.3, 121, _EIGHT_BIT),
    "60B no master commit": Job("60b", 4, 138.3, 121, _NO_MASTER, chunk_numel=324 * 2**20),
    "2 x 8B/40": Job("llama-8b", 4, 40, 120.6, ranks=2),
    "2 x 68B 8bit commit": Job("68b", 4, 135.3, 120.6, _EIGHT_BIT, ranks=2, chunk_numel=324 * 2**20),
    "2 x 110B no master commit": Job("110b", 4, 135.3, 120.6, _NO_MASTER, ranks=2, chunk_numel=324 * 2**20),
}


class Placed(Predictor):
    """Predicts steps with given chunks' states on the device. Where the host cannot hold all others', as many of them
    as it takes, in the order in which they are given, are there from the beginning.
    """

    chosen: Sequence[int] | None = None
    """Chunks; None: as the heuristics place them."""

    @functools.cached_property
    def _spare_bytes(self) -> int:
        on_host = [_C.Tier.HOST] * len(self.chunks)
        return _C.initial_placement(self.layout, _C.UNLIMITED, 0)[1] - _C.bytes_on_host(self.layout, on_host)

    def _initial_placement(self, setting: Setting) -> tuple[list[_C.Tier], int, int]:
        if self.chosen is None:
            return super()._initial_placement(setting)
        homes, excess = [_C.Tier.HOST] * len(self.chunks), 0
        for chunk in [None, *self.chosen]:
            if chunk is not None:
                homes[chunk] = _C.Tier.DEVICE
            excess = self._spare_bytes + _C.bytes_on_host(self.layout, homes, setting.backwards) - setting.host_bytes
            if excess <= 0:
                break
        return homes, setting.host_bytes + excess, 0

    def _place(self, setting: Setting, budget: _C.DeviceBudget) -> tuple[list[_C.Tier], list[bool]]:
        if self.chosen is None:
            return super()._place(setting, budget)
        homes, host_bytes, _ = self._initial_placement(setting)
        if host_bytes > setting.host_bytes:
            raise DoesNotFitError("host_memory")
        chosen = set(self.chosen)
        return homes, [chunk in chosen for chunk in range(len(homes))]

    def on(self, machine: Machine) -> Placed:
        """The same on another machine whose GPU is the same."""
        other = copy.copy(self)
        other._machine = machine
        return other

    def place(self, setting: Setting, chosen: Sequence[int] | None) -> Case | None:
        """The case with these chunks' states on the device, or None: the budgets do not hold it."""
        self.chosen = chosen
        try:
            return self.predict(setting)
        except DoesNotFitError:
            return None
        finally:
            self.chosen = None


@functools.cache
def _traced(model: str, batch: int) -> Any:
    shape = SHAPES[model]
    gpt = f"gpt:{shape.hidden}x{shape.layers}"
    planned = build_model(gpt if isinstance(shape, GptShape) else model, batch, shape.length, checkpointing=True)
    params = plan_params(planned.module, torch.bfloat16, use_cpu_embedding=False)
    # Sizes before the trace, which changes the module.
    numels = {job.chunk_numel for job in JOBS.values()}
    sizes = {numel: choose_chunk_size(params, planned.module, numel, 0) for numel in numels}
    return params, sizes, trace_uses(planned.module, params, torch.bfloat16, planned.inputs, H200.gpu)


def predictor_of(job: Job, known: dict[Any, Placed]) -> tuple[Setting, Placed]:
    """Budgets, and a predictor on H200s of the job as an engine lays it out with them; of ``known`` where it is there
    from other budgets.
    """
    setting = Setting(device_bytes=int(job.device_gib * GIB), host_bytes=int(job.host_gib * GIB), **job.options)
    params, sizes, uses = _traced(job.model, job.batch)
    size = sizes[job.chunk_numel]
    numel = job.chunk_numel if setting.device_bytes >= size.ample_bytes else size.numel
    layout = choose_layout(
        lambda scheme: make_layout(params, numel, job.ranks, scheme=scheme),
        setting.optimizer_config(),
        updates_begin_early=setting.updates_take_memory,
        device_bytes=setting.device_bytes,
        host_bytes=setting.host_bytes,
    )
    key = (numel, _C.puts_values_in_place(layout))
    if key not in known:
        known[key] = Placed(uses, layout, H200, Cluster(gpus_per_node=job.ranks))
    return setting, known[key]
