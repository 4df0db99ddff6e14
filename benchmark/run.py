"""Runs one benchmark case: ``python -m benchmark.run CASE [--json] [options]``.

Cases: ``adam`` (the CPU optimizer against torch and against copy bandwidth), ``schemes`` (CPU updates by what their
states are stored in), ``affinity`` (Adam by pinned threads against free ones), ``overhead`` (a step with everything
resident against plain PyTorch), ``budget`` (step time and bytes moved against the device budget and Belady's bound),
``hooks`` (what they cost the host per module call), ``overlap`` (a quarter of the device memory behind a simulated
link against all of it), ``train`` (one GPT training run: time, throughput, peaks), ``steps`` (steps one by one: what
the engine did in each, and what bounds some), ``ablation`` (steps without one mechanism of the core beside steps with
all), ``advice`` (what ``patrickstar plan`` advises for twelve models, GPUs and hosts, followed), ``sequence``
(attention over a sequence that GPUs share, against one GPU's and PyTorch's context parallelism), ``long`` (steps of
one long sequence, with attention kept for backward and computed again), ``longest`` (the longest sequence that GPUs of
one host train together, beside FSDP2's and DeepSpeed's), ``tensor2d`` (blocks of a GPT whose matrices GPUs share: in
two dimensions, in one, and by PyTorch's DTensor), ``optimus`` (the same in one dimension and in two on 4 to 64 GPUs,
simulated), ``panels`` (a model whose matrices GPUs share, most of it in chunks on the host, against all of it on the
GPUs), ``quality`` (held-out losses of a GPT-2 by what its optimizer states are stored in), ``eight_bit`` (AdamW with
moments of 8 bits step by step beside bitsandbytes' and torchao's), ``disk`` (a step whose optimizer states are on a
disk, against sequential reads and writes there), ``qlora`` (adapters on a frozen base in 4 bits of which a part is on
the GPU, against one that is there), ``resize`` (another number of ranks for a run that goes on, by phase, beside
checkpoint and restart).
"""

from __future__ import annotations

import importlib
import json

from patrickstar.command.flags import CommandParser

CASES = (
    "adam",
    "schemes",
    "affinity",
    "overhead",
    "hooks",
    "budget",
    "overlap",
    "train",
    "steps",
    "ablation",
    "pages",
    "advice",
    "sequence",
    "long",
    "longest",
    "tensor2d",
    "optimus",
    "panels",
    "quality",
    "eight_bit",
    "disk",
    "qlora",
    "resize",
)


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
