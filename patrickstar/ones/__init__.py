"""Elastic cluster scheduling: schedulers for training jobs whose number of GPUs changes, and a simulator.

    trace = make_trace("artifact", seed=0)
    result = simulate(trace, make_policy("ones", history=make_history("artifact", seed=0)), Cluster(64))
    print(figures(result).mean_jct_s)

docs/guides/ones.md describes the scope. It needs only numpy, and matplotlib for pictures.
"""

from patrickstar.ones.earlier_jobs import make_history
from patrickstar.ones.jobs import BatchRule, Cluster, Job, JobState, StepTime, Throughput, check_fits
from patrickstar.ones.mixes import MIXES, TYPED_POOLS, make_trace, on_types
from patrickstar.ones.policies import POLICIES, Grant, PastJob, Policy, Sizes, make_policy
from patrickstar.ones.public_traces import PublicFormat, read_public_trace
from patrickstar.ones.report import Figures, draw_gantt, draw_jcts, figures, table
from patrickstar.ones.simulated_job import Segment
from patrickstar.ones.simulator import Result, SimulationError, simulate
from patrickstar.ones.traces import TraceJob, read_trace, write_trace

__all__ = [
    "MIXES",
    "POLICIES",
    "TYPED_POOLS",
    "BatchRule",
    "Cluster",
    "Figures",
    "Grant",
    "Job",
    "JobState",
    "PastJob",
    "Policy",
    "PublicFormat",
    "Result",
    "Segment",
    "SimulationError",
    "Sizes",
    "StepTime",
    "Throughput",
    "TraceJob",
    "check_fits",
    "draw_gantt",
    "draw_jcts",
    "figures",
    "make_history",
    "make_policy",
    "make_trace",
    "on_types",
    "read_public_trace",
    "read_trace",
    "simulate",
    "table",
    "write_trace",
]
