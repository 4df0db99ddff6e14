"""The scheduler's actor, and its client.

    client = start(StartOptions(ledger="…", logs="…"), address=None, simulated_gpus=4)
    client.submit(submission)
    client.rows()

The actor is detached, and Ray restarts it when it dies. It then reads the ledger, finds the actors of running jobs by
their names, and continues.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import time
import traceback
from typing import Any

import ray

import patrickstar
from patrickstar.ones.cluster.ledger import Ledger
from patrickstar.ones.cluster.local_cluster import (
    KnownCluster,
    end_local_cluster,
    known_cluster,
    note_cluster,
    start_local_cluster,
)
from patrickstar.ones.cluster.metrics import SchedulerMetrics
from patrickstar.ones.cluster.ray_fleet import NAMESPACE, RayFleet
from patrickstar.ones.cluster.ray_placement import pools_now
from patrickstar.ones.cluster.rows import Row
from patrickstar.ones.cluster.scheduler import Scheduler
from patrickstar.ones.cluster.submission import Submission
from patrickstar.ones.jobs import Cluster
from patrickstar.ones.policies import make_policy

_NAME = "scheduler"
_ANSWER_SECONDS = 120.0  # for a change, which waits for a tick
_MOST_CALLS = 16  # at a time


class ClusterError(RuntimeError):
    """There is no cluster, no scheduler, or a scheduler of another version."""


@dataclasses.dataclass(frozen=True)
class StartOptions:
    """Options of a scheduler."""

    ledger: str
    """The file of its jobs, on its node."""
    logs: str
    """The folder for jobs' output, on each node."""
    policy: str = "ones"
    """One of ``patrickstar.ones.POLICIES``."""
    seed: int = 0
    """Seed of the policy."""
    interval_s: float = 2.0
    """Seconds between ticks."""
    quotas: tuple[tuple[str, int], ...] = ()
    """Users, and most GPUs of their jobs together."""


@dataclasses.dataclass(frozen=True)
class About:
    """Description of a running scheduler."""

    version: str
    """The scheduler's version of patrickstar."""
    policy: str
    cluster: Cluster
    problem: str
    """Error of the last tick; empty if there was none."""


class SchedulerService:
    """The scheduler's actor. Questions wait while it starts again; changes fail, since they may have been made."""

    def __init__(self, options: StartOptions):
        self._options = options
        self._scheduler = Scheduler(
            Ledger(options.ledger),
            RayFleet(options.logs),
            make_policy(options.policy, options.seed),
            _pools(),
            quotas=dict(options.quotas),
        )
        self._metrics = SchedulerMetrics()
        self._lock = threading.Lock()
        self._rows = self._scheduler.rows()
        self._problem = ""
        threading.Thread(target=self._run, name="ones-scheduler", daemon=True).start()

    @ray.method(max_task_retries=-1)
    def about(self) -> About:
        """Describes the scheduler."""
        return About(patrickstar.__version__, self._options.policy, self._scheduler.cluster, self._problem)

    def submit(self, plain: dict[str, Any]) -> str:
        """Accepts a job; returns an error text, empty on success."""
        return self._answer(lambda: self._scheduler.submit(Submission.of(plain)))

    def cancel(self, name: str) -> str:
        """Ends a job; returns an error text, empty on success."""
        return self._answer(lambda: self._scheduler.cancel(name))

    @ray.method(max_task_retries=-1)
    def rows(self) -> list[Row]:
        """All jobs, as of the last tick."""
        return self._rows

    def _answer(self, call: Any) -> str:
        try:
            with self._lock:
                call()
                self._rows = self._scheduler.rows()
        except ValueError as error:
            return str(error)
        return ""

    def _run(self) -> None:
        while True:
            try:
                pools = pools_now()
                with self._lock:
                    if pools:
                        self._scheduler.see_cluster(pools)
                    self._scheduler.tick()
                    self._rows = self._scheduler.rows()
                self._metrics.show(self._rows, self._scheduler.cluster)
                self._problem = ""
            except Exception:  # the next tick may succeed, for example when a node is back
                self._problem = traceback.format_exc()
                print(self._problem, file=sys.stderr, flush=True)
            time.sleep(self._options.interval_s)


def _pools() -> dict[str, Cluster]:
    found = pools_now()
    if not found:
        raise ClusterError("the cluster has no GPUs; start nodes that have some, or simulated ones")
    return found


class ClusterClient:
    """A client of a scheduler.

    Args:
        address: Ray's address. None: the cluster to which this process is connected, else that of the last
            :func:`start`, else the one that Ray finds (``RAY_ADDRESS``, this machine).

    Raises:
        ClusterError: no cluster is there, no scheduler runs, or it has another version.
    """

    def __init__(self, address: str | None = None):
        _connect(address)
        try:
            self._actor = ray.get_actor(_NAME, NAMESPACE)
        except ValueError as error:
            raise ClusterError("no scheduler runs on this cluster; start one with `patrickstar ones start`") from error
        self.about: About = self._ask("about")
        if self.about.version != patrickstar.__version__:
            raise ClusterError(
                f"the scheduler is of patrickstar {self.about.version} and this is {patrickstar.__version__}; install "
                "the same version here and on all nodes"
            )

    def submit(self, submission: Submission) -> None:
        """Submits a job.

        Raises:
            ValueError: the cluster can never run it, or its name is in use.
        """
        self._raise(self._ask("submit", submission.as_plain()))

    def cancel(self, name: str) -> None:
        """Ends a job at once.

        Raises:
            ValueError: there is no such waiting or running job.
        """
        self._raise(self._ask("cancel", name))

    def rows(self) -> list[Row]:
        """All jobs, in order of submission."""
        return self._ask("rows")

    def end(self) -> None:
        """Ends the scheduler; running jobs go on, and the next scheduler with the same ledger finds them."""
        ray.kill(self._actor)

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return ray.get(getattr(self._actor, method).remote(*arguments), timeout=_ANSWER_SECONDS)
        except ray.exceptions.RayActorError as error:
            raise ClusterError(
                f"the scheduler does not answer ({error}); see Ray's dashboard, or start another"
            ) from error
        except ray.exceptions.GetTimeoutError as error:
            raise ClusterError(
                f"the scheduler has not answered {method!r} for {_ANSWER_SECONDS:.0f} s: it makes a long decision, or "
                "its machine is overloaded; ask again, or see Ray's dashboard"
            ) from error

    @staticmethod
    def _raise(problem: str) -> None:
        if problem:
            raise ValueError(problem)


def start(options: StartOptions, address: str | None = None, simulated_gpus: int | None = None) -> ClusterClient:
    """Starts a scheduler. With ``simulated_gpus`` it first starts a cluster on this machine, independent of other
    clusters here. Later commands of this user find the scheduler without an address.

    Raises:
        ClusterError: no cluster is at the address, a scheduler runs there already, or there are no GPUs.
        ValueError: there is no such policy.
    """
    make_policy(options.policy, options.seed)
    cluster = None if simulated_gpus is None else _start_simulated(simulated_gpus, address)
    try:
        _connect(address if cluster is None else cluster.address)
        _start_service(options)
        note_cluster(cluster or KnownCluster(ray.get_runtime_context().gcs_address))
        return ClusterClient(address)
    except BaseException:
        if cluster is not None:
            ray.shutdown()
            end_local_cluster(cluster)
        raise


def _start_service(options: StartOptions) -> None:
    """Starts the scheduler's actor; none runs if this fails."""
    with contextlib.suppress(ValueError):
        ray.get_actor(_NAME, NAMESPACE)
        raise ClusterError("a scheduler runs on this cluster already; `patrickstar ones status` shows its jobs")
    # While one thread waits for a tick to submit a job, others answer.
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=_MOST_CALLS)(SchedulerService)
    service = actor.options(name=_NAME, namespace=NAMESPACE, lifetime="detached").remote(options)
    try:
        ray.get(service.about.remote(), timeout=_ANSWER_SECONDS)
    except BaseException as error:
        ray.kill(service)
        if isinstance(error, ray.exceptions.RayActorError):
            raise ClusterError(f"the scheduler ended as it began: {error}") from error
        raise


def stop() -> None:
    """Ends the simulated cluster that :func:`start` has started, and all jobs on it; no other cluster.

    Raises:
        ClusterError: it does not run.
    """
    cluster = known_cluster()
    if cluster is None or not cluster.is_own:
        raise ClusterError(
            "no cluster that `patrickstar ones start --simulated-gpus` has started runs here; others end as they were "
            "started, with `ray stop` on their nodes"
        )
    end_local_cluster(cluster)


def _start_simulated(num_gpus: int, address: str | None) -> KnownCluster:
    if address is not None:
        raise ClusterError(f"simulated GPUs are of a cluster of their own; leave --address {address} out")
    before = known_cluster()
    if before is not None and before.is_own:
        raise ClusterError(
            f"a cluster with simulated GPUs runs here already, at {before.address}; `patrickstar ones stop` ends it"
        )
    try:
        return start_local_cluster(num_gpus)
    except RuntimeError as error:
        raise ClusterError(str(error)) from error


def _connect(address: str | None) -> None:
    """Connects to the cluster at an address; None: that of the last ``start``, else the one that Ray finds."""
    if ray.is_initialized():
        return
    known = known_cluster() if address is None else None
    where = known.address if known is not None else address or "auto"
    try:
        ray.init(address=where, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except ConnectionError as error:
        raise ClusterError(
            f"no Ray cluster answers at {address or 'this machine'}; start one with `ray start --head`, or simulate "
            "GPUs with `patrickstar ones start --simulated-gpus 4`"
        ) from error
