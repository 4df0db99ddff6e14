"""``patrickstar run script.py args…``: runs an unchanged script, with the models of all its ``Trainer`` and
``Accelerator`` objects in engines.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from patrickstar.command.flags import WRONG_USAGE, CommandParser, at_least_1, memory_size
from patrickstar.command.script import run_script

_JOB = "job"


def _batch(text: str) -> int | str:
    return text if text == _JOB else at_least_1(text)


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Returns the parser of the command's options, the script and its arguments."""
    description = (
        "Runs a script as it is, with the models of every Trainer (of transformers, TRL) and every Accelerator in an "
        "engine. DeepSpeed's configuration that they get is taken as PatrickStar's."
    )
    parser = CommandParser(prog, description)
    parser.add_argument("--config", type=Path, metavar="FILE", help="PatrickStar's configuration, a JSON file")
    parser.add_argument("--device-memory", type=memory_size, metavar="SIZE", help="instead of the configuration's")
    parser.add_argument("--host-memory", type=memory_size, metavar="SIZE", help="instead of the configuration's")
    parser.add_argument(
        "--global-batch",
        type=_batch,
        metavar="SAMPLES",
        help="trainers follow orders to change their number of ranks, with so many samples in a step of all ranks; "
        "'job': with those of the job's submission, which may change too",
    )
    parser.add_argument("script", type=Path, help="a Python script that trains with a Trainer or an Accelerator")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def main(arguments: Sequence[str] | None = None, prog: str = "python -m patrickstar.command.run") -> int:
    """Runs the script; returns its exit status. 2 is for a wrong argument of this command, and for a script that trains
    outside an engine, or makes none.
    """
    parser = make_parser(prog)
    options = parser.parse_args(arguments)
    if not options.script.is_file():
        parser.error(f"there is no script {options.script}")
    try:
        from patrickstar.elastic import job_batch
        from patrickstar.integrations.elastic_trainer import ElasticTraining
        from patrickstar.integrations.every_trainer import every_trainer_in_engine

        config = _config(options)
        batch = job_batch() if options.global_batch == _JOB else options.global_batch
    except ImportError as error:
        parser.error(f"{error}; in a clone, pip install '.[transformers]' brings what it needs")
    except ValueError as error:
        parser.error(str(error))
    elastic = None if batch is None else ElasticTraining(global_batch=batch)
    with every_trainer_in_engine(config, elastic):
        return _run(options.script, options.args, prog)


def _run(script: Path, arguments: Sequence[str], prog: str) -> int:
    from patrickstar.command.outside_steps import OF_A_LOOP, OF_DEEPSPEED, OutsideEngineError, refusing_outside_steps
    from patrickstar.session.registry import num_opened_sessions

    before = num_opened_sessions()
    try:
        with refusing_outside_steps():
            status = run_script(script, arguments)
    except OutsideEngineError as error:
        problem = str(error)
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise
        problem = f"it imports deepspeed, which is not installed, and would train outside an engine: {OF_DEEPSPEED}"
    else:
        if status != 0 or num_opened_sessions() > before or {"-h", "--help"} & set(arguments):
            return status
        problem = f"it has ended without an engine: {OF_A_LOOP}"
    print(f"{prog}: {script}: {problem}", file=sys.stderr)
    return WRONG_USAGE


def _config(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the configuration of file and flags.

    Raises:
        ValueError: it is invalid. Checked here, because a script may prepare its data first.
    """
    from patrickstar.config import Dialect, parse_config
    from patrickstar.config.reading import read_config
    from patrickstar.integrations.decided_config import of_engine

    budgets = {"device_memory": options.device_memory, "host_memory": options.host_memory}
    config = {**read_config(options.config), **{key: size for key, size in budgets.items() if size is not None}}
    parse_config(of_engine(config), Dialect.HOST)
    return config


if __name__ == "__main__":
    sys.exit(main())
