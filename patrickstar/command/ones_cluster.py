"""``patrickstar ones {start,submit,status,cancel,end,stop}``: a scheduler on Ray (docs/guides/ones.md)."""

from __future__ import annotations

import argparse
import dataclasses
import getpass
import importlib
import os
import re
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patrickstar.command.flags import at_least_0, at_least_1, positive
from patrickstar.ones import POLICIES

if TYPE_CHECKING:
    from patrickstar.ones.cluster.rows import Row

_ELASTIC_NAMES = ("ElasticRun", "ElasticTrain", "ElasticSeq2SeqTrainer")
"""A script for elastic training contains one of these names."""
_RATE_RULES = ("none", "linear", "square_root")
"""Names of ``patrickstar.elastic.LearningRateRule``, which needs PyTorch."""
_FOLDER = Path("~/.patrickstar/ones")
_COLUMNS = (
    "job",
    "state",
    "GPUs",
    "batch",
    "noise scale",
    "steps",
    "s/step",
    "loss",
    "resizes",
    "last resize",
    "failures",
    "note",
)


def add_cluster_commands(commands: Any) -> None:
    """Adds the parsers of the cluster commands to ``patrickstar ones``."""
    starting = commands.add_parser("start", help="start a scheduler on a Ray cluster, or on simulated GPUs here")
    starting.add_argument("--simulated-gpus", type=at_least_1, metavar="N", help="start Ray here, with so many")
    starting.add_argument("--policy", choices=[*POLICIES], default="ones", help="that decides (default: ones)")
    starting.add_argument("--interval-s", type=positive, default=2.0, help="between two looks at all jobs")
    starting.add_argument(
        "--quota", action="append", default=[], type=_quota, metavar="USER=GPUS", help="most GPUs of a user's jobs"
    )
    starting.add_argument(
        "--folder", type=Path, default=_FOLDER, help=f"for the ledger and what jobs write (default: {_FOLDER})"
    )
    _finish(starting, _start)

    submitting = commands.add_parser("submit", help="submit a training script")
    submitting.add_argument("--name", required=True, help="of the job, unique in the cluster")
    submitting.add_argument("--gpus", type=_range, required=True, metavar="MIN-MAX", help="that it may have, as in 1-4")
    submitting.add_argument("--requested-gpus", type=at_least_1, metavar="N", help="at its start (default: MIN)")
    submitting.add_argument(
        "--global-batch", type=at_least_1, required=True, metavar="N", help="samples of an optimizer step, at the start"
    )
    submitting.add_argument(
        "--batch-range", type=_range, metavar="MIN-MAX", help="that the scheduler may change the global batch in"
    )
    submitting.add_argument(
        "--batch-rule", choices=_RATE_RULES, default="square_root",
        help="how the learning rate follows the batch (default: square_root, for Adam)",
    )  # fmt: skip
    submitting.add_argument(
        "--batch-warmup-steps", type=at_least_0, default=20, metavar="N",
        help="over which the learning rate rises after the batch has grown (default: 20)",
    )  # fmt: skip
    submitting.add_argument("--epoch-samples", type=at_least_1, required=True, help="samples of an epoch")
    submitting.add_argument(
        "--plan", type=shlex.split, metavar="OPTIONS",
        help="ask the planner on which numbers of GPUs it fits, with these options of `patrickstar plan`",
    )  # fmt: skip
    submitting.add_argument(
        "--micro-batch", type=at_least_1, metavar="N", help="with --plan: samples that a GPU computes at once, at most"
    )
    submitting.add_argument("--gpu-type", default="", metavar="TYPE", help="of its GPUs, as Ray names it: H100")
    submitting.add_argument("--inner-group", type=at_least_1, default=1, metavar="N", help="GPUs that belong together")
    submitting.add_argument("--priority", type=int, default=0, help="jobs with a higher one come first (default: 0)")
    submitting.add_argument("--user", default=getpass.getuser(), help="whose quota counts (default: you)")
    submitting.add_argument("--env", action="append", default=[], type=_variable, metavar="NAME=VALUE")
    submitting.add_argument("script", type=Path, help="of Python, at the same path on all nodes")
    submitting.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    _finish(submitting, _submit)

    showing = commands.add_parser("status", help="show all jobs, live")
    showing.add_argument("--once", action="store_true", help="print the table and end")
    _finish(showing, _status)

    cancelling = commands.add_parser("cancel", help="end a job at once")
    cancelling.add_argument("name", help="of the job")
    _finish(cancelling, _cancel)

    ending = commands.add_parser("end", help="end the scheduler; jobs that run go on")
    _finish(ending, _end)

    stopping = commands.add_parser("stop", help="end the cluster with simulated GPUs that start has started")
    stopping.set_defaults(run=_stop)


def _finish(parser: argparse.ArgumentParser, run: Any) -> None:
    parser.add_argument("--address", help="of Ray, host:port (default: the cluster of the last start)")
    parser.set_defaults(run=run)


def _client_module() -> Any:
    try:
        return importlib.import_module("patrickstar.ones.cluster.client")
    except ImportError as error:
        raise ImportError(f"{error}; the scheduler needs Ray: in a clone, pip install '.[ones]'") from error


def _start(options: argparse.Namespace) -> int:
    client = _client_module()
    folder = options.folder.expanduser().absolute()
    chosen = client.StartOptions(
        ledger=str(folder / "ledger.jsonl"),
        logs=str(folder / "logs"),
        policy=options.policy,
        interval_s=options.interval_s,
        quotas=tuple(options.quota),
    )
    about = client.start(chosen, options.address, options.simulated_gpus).about
    print(f"{about.policy} schedules {about.cluster.num_gpus} GPUs; ledger and logs are in {folder}")
    return 0


def _submit(options: argparse.Namespace) -> int:
    module = _client_module()
    submission = importlib.import_module("patrickstar.ones.cluster.submission")
    client = module.ClusterClient(options.address)
    least, most = options.gpus
    job = submission.Submission(
        name=options.name,
        script=str(options.script.absolute()),
        arguments=tuple(options.arguments),
        folder=str(Path.cwd()),
        environment=tuple(options.env),
        min_gpus=least,
        max_gpus=most,
        requested_gpus=least if options.requested_gpus is None else options.requested_gpus,
        global_batch=options.global_batch,
        epoch_samples=options.epoch_samples,
        batch_range=_batch_range(options),
        gpu_type=options.gpu_type,
        inner_group=options.inner_group,
        priority=options.priority,
        user=options.user,
    )
    if options.plan is not None:
        job = _planned(options, job, client.about.cluster.gpus_per_node)
    client.submit(job)
    sizes = ", ".join(map(str, job.sizes))
    print(f"{job.name} waits for GPUs; it can run on {sizes} of them")
    text = options.script.read_text(errors="replace")
    if not any(name in text for name in _ELASTIC_NAMES):
        print(
            f"{options.script} has no ElasticRun or elastic Trainer: where nothing it imports has one, its number of "
            "GPUs stays what it is at the start (docs/guides/elastic.md)"
        )
    return 0


def _batch_range(options: argparse.Namespace) -> Any:
    if options.batch_range is None:
        return None
    batches = importlib.import_module("patrickstar.elastic.batches")
    least, most = options.batch_range
    return batches.BatchRange(
        min=least,
        base=options.global_batch,
        max=most,
        rule=batches.LearningRateRule[options.batch_rule.upper()],
        warmup_steps=options.batch_warmup_steps,
    )


def _planned(options: argparse.Namespace, job: Any, gpus_per_node: int) -> Any:
    if options.micro_batch is None:
        raise ValueError("--plan needs --micro-batch: how many samples a GPU computes at once decides what fits")
    feasibility = importlib.import_module("patrickstar.ones.cluster.feasibility")
    found = feasibility.planned(job.sizes, options.plan, job.batches, options.micro_batch, gpus_per_node)
    for size, why in found.refusals.items():
        print(f"{job.name} does not fit on {size}: {why}")
    if not found.step_seconds:
        raise ValueError(f"job {job.name} fits on none of {', '.join(map(str, job.sizes))} GPUs")
    for size, seconds in found.step_seconds.items():
        print(f"{job.name} fits on {size}, predicted: {seconds:.3g} s a step")
    return dataclasses.replace(job, planned=tuple(found.step_seconds.items()))


def _status(options: argparse.Namespace) -> int:
    client = _client_module().ClusterClient(options.address)
    console, live = importlib.import_module("rich.console"), importlib.import_module("rich.live")
    if options.once:
        console.Console(width=None if os.isatty(1) else 160).print(_table(client.rows()))
        return 0
    try:
        with live.Live(_table(client.rows()), auto_refresh=False) as shown:
            while True:
                time.sleep(1)
                shown.update(_table(client.rows()), refresh=True)
    except KeyboardInterrupt:
        return 0


def _cancel(options: argparse.Namespace) -> int:
    _client_module().ClusterClient(options.address).cancel(options.name)
    print(f"{options.name} is cancelled")
    return 0


def _end(options: argparse.Namespace) -> int:
    _client_module().ClusterClient(options.address).end()
    print("the scheduler has ended; jobs that run go on until they are done")
    return 0


def _stop(options: argparse.Namespace) -> int:
    _client_module().stop()
    print("the cluster with simulated GPUs has ended, and all jobs on it; other clusters run on")
    return 0


def _table(rows: list[Row]) -> Any:
    made = importlib.import_module("rich.table").Table(*_COLUMNS)
    for row in rows:
        made.add_row(
            row.name,
            row.state,
            f"{row.num_gpus} {row.gpu_type}".strip(),
            str(row.global_batch or ""),
            f"{row.noise_scale:.3g}" if row.noise_scale else "",
            str(row.num_steps),
            f"{row.seconds_per_step:.3g}" if row.seconds_per_step else "",
            "" if row.loss is None else f"{row.loss:.4g}",
            str(row.num_resizes),
            f"{row.resize_s:.2f} s" if row.resize_s else "",
            str(row.num_failures),
            row.note,
        )
    return made


def _range(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if not found:
        raise argparse.ArgumentTypeError(f"it is {text!r}; give a number of GPUs, or two as in 1-4")
    return int(found[1]), int(found[2] or found[1])


def _quota(text: str) -> tuple[str, int]:
    user, _, count = text.rpartition("=")
    if not user or not count.isdecimal():
        raise argparse.ArgumentTypeError(f"it is {text!r}; give a user and a number of GPUs as in ada=4")
    return user, int(count)


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"it is {text!r}; give NAME=VALUE")
    return name, value
