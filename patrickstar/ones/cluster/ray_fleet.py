"""The fleet on Ray: one named actor per job."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from patrickstar.ones.cluster.fleet import JobPhase, Status
from patrickstar.ones.cluster.ray_ranks import JobProcesses
from patrickstar.ones.cluster.submission import Submission

NAMESPACE = "patrickstar-ones"
"""Ray's namespace of the actors' names."""
_STATUS_SECONDS = 2.0
"""Seconds that a tick waits for one job: its actor may be starting, or waiting for GPUs."""
_END_SECONDS = 60.0


class RayFleet:
    """Implements :class:`patrickstar.ones.cluster.fleet.Fleet`.

    Args:
        logs: a folder with one folder per job for its ranks' output, on the rank's node.
    """

    def __init__(self, logs: str):
        self._logs = logs

    def start(self, submission: Submission, num_ranks: int, global_batch: int) -> None:
        """Starts the job's actor, and with it the ranks; does not wait for them."""
        # beside the scheduler: another node that dies then takes ranks along, and not the job
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"name": f"job:{submission.name}", "namespace": NAMESPACE, "lifetime": "detached"}
        options["scheduling_strategy"] = here
        made = ray.remote(num_cpus=0)(JobProcesses).options(**options)
        made.remote(submission.as_plain(), self._logs, num_ranks, global_batch)

    def resize(self, name: str, num_ranks: int, global_batch: int) -> None:
        """Sends the order; does not wait."""
        actor = self._actor(name)
        if actor is not None:
            actor.resize.remote(num_ranks, global_batch)

    def stop(self, name: str) -> None:
        """Sends the order; does not wait."""
        actor = self._actor(name)
        if actor is not None:
            actor.stop.remote()

    def status(self, name: str) -> Status | None:
        """Waits for the actor's answer."""
        actor = self._actor(name)
        if actor is None:
            return None
        try:
            return ray.get(actor.status.remote(), timeout=_STATUS_SECONDS)
        except ray.exceptions.GetTimeoutError:
            return Status(JobPhase.CHANGING, 0, None, 0.0)  # the actor waits for GPUs
        except ray.exceptions.RayError as error:
            return Status(JobPhase.FAILED, 0, None, 0.0, reason=f"the job's actor is gone: {error}")

    def remove(self, name: str) -> None:
        """Ends the ranks, then the actor."""
        actor = self._actor(name)
        if actor is None:
            return
        with contextlib.suppress(ray.exceptions.RayError):  # the actor is gone, and its ranks end with it
            ray.get(actor.end.remote(), timeout=_END_SECONDS)
        ray.kill(actor)
        deadline = time.monotonic() + _END_SECONDS
        while self._actor(name) is not None and time.monotonic() < deadline:  # Ray frees the name with a delay
            time.sleep(0.02)

    def _actor(self, name: str) -> Any:
        try:
            return ray.get_actor(f"job:{name}", NAMESPACE)
        except ValueError:
            return None
