"""Runs one benchmark case: ``python -m benchmark.run CASE [--json] [options]``. ``--help`` lists the cases."""

from __future__ import annotations

import importlib
import json

from patrickstar.command.flags import CommandParser

CASES = (
    "adam", "schemes", "experts", "expert_peers", "overhead", "hooks", "budget", "overlap", "steps", "paths",
    "expert_parallel", "lend", "generation", "saves", "ablation", "advice", "sequence", "longest", "tensor2d",
    "optimus", "panels", "quality", "eight_bit", "fp8_steps", "disk", "qlora", "resize", "saved_run",
)  # fmt: skip
"""Modules with ``add_arguments``, ``run`` and ``format_table``; the first line of each docstring is its help."""


def main() -> None:
    parser = CommandParser("python -m benchmark.run", __doc__.splitlines()[0])
    subparsers = parser.add_subparsers(dest="case", required=True, metavar="CASE")
    modules = {}
    for case in CASES:
        module = modules[case] = importlib.import_module(f"benchmark.{case}")
        subparser = subparsers.add_parser(case, help=module.__doc__.splitlines()[0])
        subparser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
        module.add_arguments(subparser)
    args = parser.parse_args()
    result = modules[args.case].run(args)
    print(json.dumps(result) if args.json else modules[args.case].format_table(result))


if __name__ == "__main__":
    main()
