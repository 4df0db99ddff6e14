"""``patrickstar bench``: measures, in seconds, the rates of this machine that limit a step.

The repository's benchmarks (``python -m benchmark.run``) train models; this command needs only the installed package.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch

from patrickstar import _C
from patrickstar.command.flags import CommandParser, run_reporting
from patrickstar.machine import host_memory
from patrickstar.planning.measuring import (
    engine_threads,
    measure_host_adam_gparams,
    measure_host_copy_gbps,
    measure_link_gbps,
)
from patrickstar.planning.update_costs import ADAM
from patrickstar.sizes import show_size

_NEEDED_BYTES = 2**30


def main(arguments: Sequence[str] | None = None, prog: str = "patrickstar bench") -> int:
    """Returns the exit status: 0; 2 for a wrong argument or too little memory."""
    parser = CommandParser(
        prog,
        "Measures what of this machine decides how long a step is: the bandwidth of host memory, updates on the host, "
        "and with a GPU the link to it. Takes some seconds and 1 GiB of host memory.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    return run_reporting(prog, functools.partial(_run, options))


def _run(options: argparse.Namespace) -> int:
    available = host_memory.available_bytes()
    if available < _NEEDED_BYTES:
        raise ValueError(
            f"measuring takes {show_size(_NEEDED_BYTES)} of host memory and {show_size(available)} are available; end "
            "other processes, or raise the container's limit"
        )
    found = _measure()
    print(json.dumps(found) if options.json else _as_text(found))
    return 0


def _measure() -> dict[str, Any]:
    found: dict[str, Any] = {
        "host_threads": engine_threads().num_threads,
        "isa": _C.optim.isa(),
        "host_copy_gbps": measure_host_copy_gbps(),
        "host_adam_gparams": measure_host_adam_gparams(),
        "gpu": None,
        "upload_gbps": None,
        "download_gbps": None,
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["upload_gbps"], found["download_gbps"] = measure_link_gbps()
    return found


def _as_text(found: dict[str, Any]) -> str:
    adam = found["host_adam_gparams"]
    lines = [
        f"host copy     {found['host_copy_gbps']:7.1f} GB/s, reads and writes of one large copy",
        f"host Adam     {adam:7.2f} Gparam/s with {found['host_threads']} threads ({found['isa']}), "
        f"{adam * ADAM.traffic_bytes:.0f} GB/s of host memory",
    ]
    if found["gpu"] is None:
        lines.append("link          not measured: PyTorch sees no GPU here")
    else:
        lines += [
            f"host to GPU   {found['upload_gbps']:7.1f} GB/s, both directions busy ({found['gpu']})",
            f"GPU to host   {found['download_gbps']:7.1f} GB/s",
        ]
    lines.append("patrickstar plan --measure plans with these instead of the rates that it knows.")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
