"""CPU Adam by pinned threads against as many free ones, alone and beside a thread that launches kernels.

Threads are those of an engine with a GPU, and take turns on the same arrays. The launching thread is one that never
waits, as in a step that the host bounds; how far it gets is measured too.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import threading
import time
from collections.abc import Callable

import torch

from benchmark.adam import MIN_SECONDS_PER_CALL, OurAdam, interleaved_seconds
from benchmark.common import provenance
from patrickstar import _C
from patrickstar.config import HostAffinity, HostThreadsConfig
from patrickstar.machine.engine_options import host_thread_options

BESIDE = "_beside_launching"  # ends the names of what was measured beside a busy thread


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--numel", type=int, default=64 * 2**20, help="parameters")
    parser.add_argument("--num-threads", type=int, default=0, help="default: as an engine with a GPU has them")
    parser.add_argument("--repeats", type=int, default=31, help="interleaved rounds")


class LaunchingThread:
    """Python that never waits, as a thread that launches kernels: it counts until it is stopped."""

    def __init__(self) -> None:
        self._count = 0
        self._measured: dict[str, tuple[int, float]] = {}  # counts and seconds
        self._stopping = False
        self._interval = sys.getswitchinterval()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def _work(self) -> None:
        while not self._stopping:
            self._count += 1

    def measure(self, name: str, function: Callable[[], None]) -> None:
        """Runs `function`, during which the thread counts for `name`."""
        count, begin = self._count, time.perf_counter()
        function()
        counts, seconds = self._measured.get(name, (0, 0.0))
        self._measured[name] = (counts + self._count - count, seconds + time.perf_counter() - begin)

    def speed(self, name: str) -> float:
        """Counts per second while what was measured as `name` ran."""
        counts, seconds = self._measured[name]
        return counts / seconds

    def __enter__(self) -> LaunchingThread:
        sys.setswitchinterval(1e-4)  # who comes back from an update waits so long for the interpreter
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopping = True
        self._thread.join()
        sys.setswitchinterval(self._interval)


def make_pools(num_threads: int) -> dict[str, _C.ThreadPool]:
    """As an engine with a GPU makes them, free and pinned.

    Raises:
        RuntimeError: nothing can be pinned here.
    """
    topology = _C.read_cpu_topology(_C.allowed_cpus())
    pools = {}
    for affinity in (HostAffinity.FREE, HostAffinity.PINNED):
        config = HostThreadsConfig(num_threads=num_threads, affinity=affinity)
        threads = _C.choose_host_threads(topology, host_thread_options(config, with_gpu=True))
        pools[affinity.value] = _C.ThreadPool(threads.num_threads, threads.worker_cpus)
    if not pools["pinned"].pinned_cpus:
        raise RuntimeError(
            f"none of {threads.num_threads} threads can be pinned on {len(topology.cpus)} CPUs with a quota of "
            f"{topology.quota_cpus:g}: a core is the launching thread's, and the caller is never pinned; take a larger "
            "machine, or --num-threads"
        )
    return pools


def run(args: argparse.Namespace) -> dict:
    """Measures with `numel`, `num_threads` and `repeats` of `args`. Speeds are ratios of each round's times, free to
    pinned: their median, and the quartiles around it.
    """
    numel, repeats = args.numel, args.repeats
    pools = make_pools(args.num_threads)
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(numel, generator=generator) * 0.02
    ours = OurAdam(master, torch.randn(numel, generator=generator).to(torch.bfloat16), 1)
    result: dict = {"case": "affinity"}

    def update(name: str) -> None:
        ours.update_threads = pools[name]
        ours.update()

    def compare(suffix: str, cases: dict[str, Callable[[], None]]) -> None:
        seconds = interleaved_seconds(cases, repeats)
        speedups = [free / pinned for free, pinned in zip(seconds["free"], seconds["pinned"], strict=True)]
        result["pinned_speedup" + suffix] = statistics.median(speedups)
        result["pinned_speedup_quartiles" + suffix] = statistics.quantiles(speedups, method="inclusive")[::2]
        for name, values in seconds.items():
            result[f"{name}_ns_per_param{suffix}"] = statistics.median(values) / numel * 1e9

    cases = {name: functools.partial(update, name) for name in pools}
    compare("", cases)
    with LaunchingThread() as launching:
        for _ in range(repeats):
            launching.measure("alone", lambda: time.sleep(MIN_SECONDS_PER_CALL))
        beside = {name: functools.partial(launching.measure, name, case) for name, case in cases.items()}
        compare(BESIDE, beside)
    for name in pools:
        result[f"launching_speed_beside_{name}"] = launching.speed(name) / launching.speed("alone")
    return result | {
        "pinned_cpus": _C.format_cpu_list(pools["pinned"].pinned_cpus),
        "num_cpus_allowed": len(_C.allowed_cpus()),
        "numel": numel,
        "num_threads": pools["pinned"].num_threads,
        "repeats": repeats,
        **provenance(),
    }


def format_table(result: dict) -> str:
    """The result of run() for people."""
    where = f"pinned to {result['pinned_cpus']} of {result['num_cpus_allowed']} CPUs"
    title = f"CPU AdamW, {result['numel']:,} parameters, {result['num_threads']} threads, {where}"
    lines = [f"{title}, {result['isa']}, {result['cpu']}"]
    for title, suffix in (("update", ""), ("  beside a launching thread", BESIDE)):
        free, pinned = (result[f"{name}_ns_per_param{suffix}"] for name in ("free", "pinned"))
        low, high = result["pinned_speedup_quartiles" + suffix]
        speedup = f"{result['pinned_speedup' + suffix]:.3f} x ({low:.3f} to {high:.3f})"
        lines.append(f"  {title:<30}free {free:.3f}, pinned {pinned:.3f} ns/param   {speedup}")
    free, pinned = (result[f"launching_speed_beside_{name}"] for name in ("free", "pinned"))
    title = "launching thread, of alone"
    lines.append(f"  {title:<30}free {free:.3f}, pinned {pinned:.3f}            {pinned / free:.3f} x")
    return "\n".join(lines)
