"""Elastic cluster scheduling: schedulers for training jobs whose number of GPUs changes, and a simulator.

    trace = artifact_mix(num_jobs=50, seed=0)
    result = simulate(trace, make_policy("ones", history=history(seed=0)), Cluster(64))
    print(figures(result).mean_jct_s)

docs/guides/ones.md describes the scope. It needs only numpy, and matplotlib for pictures.
"""

from patrickstar.ones.jobs import BatchRule, Cluster, Job, JobState, Throughput, check_fits
from patrickstar.ones.policies import POLICIES, Grant, Policy, make_policy
from patrickstar.ones.report import Figures, draw_gantt, draw_jcts, figures, table
from patrickstar.ones.simulator import Result, Segment, SimulationError, simulate
from patrickstar.ones.traces import TraceJob, artifact_mix, history, philly_like, read_trace, write_trace

__all__ = [
    "POLICIES",
    "BatchRule",
    "Cluster",
    "Figures",
    "Grant",
    "Job",
    "JobState",
    "Policy",
    "Result",
    "Segment",
    "SimulationError",
    "Throughput",
    "TraceJob",
    "artifact_mix",
    "check_fits",
    "draw_gantt",
    "draw_jcts",
    "figures",
    "history",
    "make_policy",
    "philly_like",
    "read_trace",
    "simulate",
    "table",
    "write_trace",
]
