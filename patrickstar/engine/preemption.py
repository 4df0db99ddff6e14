"""Time that a scheduler leaves a run after its signal, and the state to which a step that does not fit is undone."""

from __future__ import annotations

import collections
import copy
import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from patrickstar.checkpoint.rng import kept_rng_states
from patrickstar.module.observed_buffers import persistent_buffers
from patrickstar.session.session import Session
from patrickstar.state.save_load import with_extra_state

_KNOWN_STEPS = 3
_TORCHRUN_WAIT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


class AbandonedStepError(BaseException):
    """Leaves a step that does not fit into the time that is left; raised by all ranks in the same call."""

    on_all_ranks = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeStep:
    """The state after a whole step, as far as a forward or a backward changes it."""

    num_steps: int
    client_state: dict[str, Any]
    restore_generators: Callable[[], None]
    buffers: dict[str, torch.Tensor]

    @classmethod
    def of(cls, session: Session, client_state: Mapping[str, Any]) -> WholeStep:
        """A copy of the present state."""
        return cls(
            num_steps=session.num_steps,
            client_state=copy.deepcopy(dict(client_state)),
            restore_generators=kept_rng_states(session.device),
            buffers={name: buffer.detach().clone() for name, buffer in persistent_buffers(session.module)},
        )

    def can_return(self, session: Session) -> bool:
        """True if the step that has begun can be undone: nothing of it is updated for good."""
        if session.num_steps != self.num_steps or session.unfinished is not None or session.gradients.are_committed:
            return False
        return not any(True for _ in with_extra_state(session.module))

    def put_back(self, session: Session) -> None:
        """Restores generators and buffers. The caller drops the gradients."""
        self.restore_generators()
        with torch.no_grad():
            for name, buffer in persistent_buffers(session.module):
                buffer.copy_(self.buffers[name])


def check_launcher(grace_seconds: float) -> str:
    """A warning if torchrun kills its ranks before ``grace_seconds`` are over, else an empty string."""
    seconds = float(os.environ.get(_TORCHRUN_WAIT) or 30)
    if not dist.is_torchelastic_launched() or grace_seconds <= seconds:
        return ""
    return (
        f"SavedRun: grace_seconds is {grace_seconds:g}, but torchrun kills its ranks {seconds:g} s after a signal; "
        f"start it with {_TORCHRUN_WAIT}={grace_seconds:g} in the environment (PyTorch 2.13 or newer), or give less"
    )


class Grace:
    """Seconds that are left on this rank, and those that the run needs, by its own steps and saves."""

    def __init__(self, seconds: float | None):
        """``seconds``: from the signal to the end of the process; None: unknown."""
        self.seconds = seconds
        self._told_at: float | None = None
        self._steps: collections.deque[float] = collections.deque(maxlen=_KNOWN_STEPS)
        self._began = time.monotonic()

    @property
    def was_told(self) -> bool:
        """True after a signal."""
        return self._told_at is not None

    @property
    def left(self) -> float | None:
        """Seconds that are left; None: no signal came, or the time is unknown."""
        if self._told_at is None or self.seconds is None:
            return None
        return self.seconds - (time.monotonic() - self._told_at)

    def needed(self, save_seconds: float) -> float:
        """Seconds that the rest of the step and a save take. An unknown part counts as none."""
        rest = max(self._steps, default=0.0) - (time.monotonic() - self._began)
        return max(rest, 0.0) + save_seconds

    def tell(self) -> None:
        """Notes a signal; the first counts."""
        if self._told_at is None:
            self._told_at = time.monotonic()

    def begin_step(self) -> None:
        """Notes the begin of the first step."""
        self._began = time.monotonic()

    def end_step(self) -> None:
        """Notes the end of a step."""
        self._steps.append(time.monotonic() - self._began)
