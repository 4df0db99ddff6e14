"""The cost of copies on other ranks, and of a lost rank (docs/guides/elastic.md): simulated devices, gloo, one host.

    python -m benchmark.lost_rank --ranks 4 --layers 8 --width 1024

Trains with and without copies. Then one rank is killed in a backward, and the others repeat the step.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NUM_STEPS, DIES_IN = 12, 8
BATCH = 24


def _work(options: argparse.Namespace) -> None:
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    from patrickstar import initialize_engine
    from patrickstar.elastic import ElasticLoader, ElasticRun, ElasticSampler, Next

    torch.set_num_threads(1)
    torch.manual_seed(0)
    width, number = options.width, int(os.environ["RANK"])
    layers = [nn.Linear(width, width) for _ in range(options.layers)]
    config = {"optimizer": {"type": "AdamW"}, "rank_timeout_seconds": 120, "steps_per_print": 0}
    engine, optimizer = initialize_engine(lambda: nn.Sequential(*layers), int(os.environ["LOCAL_RANK"]), config)
    data = TensorDataset(torch.randn(BATCH * 2 * NUM_STEPS, width))
    sampler = ElasticSampler(len(data), BATCH, BATCH)
    run = ElasticRun(engine, {"sampler": sampler}, redundancy=options.redundancy)

    def note(**values: float) -> None:
        with Path(options.folder, f"{number}").open("a") as file:
            file.write(json.dumps(values) + "\n")

    for micro_batches in ElasticLoader(data, sampler):
        began = time.time()
        with run.step():
            optimizer.zero_grad()
            for (inputs,) in micro_batches:
                loss = engine(inputs).square().mean()
                if number == options.victim and run.num_steps == DIES_IN:
                    note(died=time.time())
                    os.kill(os.getpid(), signal.SIGKILL)
                engine.backward(loss / len(micro_batches))
            optimizer.step()
            run.step_done()
        note(step=run.num_steps, began=began, ended=time.time())
        if run.next is not Next.TRAIN or run.num_steps == NUM_STEPS:
            break
    run.end()
    engine.discard()


def _run(options: argparse.Namespace, redundancy: int, victim: int) -> list[list[dict[str, float]]]:
    """Lines of each process."""
    from patrickstar.elastic import serve_rendezvous

    store = serve_rendezvous()
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        own: list[str] = ["--folder", folder, "--redundancy", str(redundancy), "--victim", str(victim)]
        own += ["--layers", str(options.layers), "--width", str(options.width)]
        common: dict[str, Any] = {"WORLD_SIZE": options.ranks, "LOCAL_WORLD_SIZE": options.ranks}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "CUDA_VISIBLE_DEVICES": ""}
        workers = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmark.lost_rank", "--work", *own],
                env={
                    **os.environ,
                    **store.environment,
                    **{name: str(value) for name, value in (common | {"RANK": rank, "LOCAL_RANK": rank}).items()},
                },
            )
            for rank in range(options.ranks)
        ]
        for rank, worker in enumerate(workers):
            status = worker.wait()
            if status != (-signal.SIGKILL if rank == victim else 0):
                raise RuntimeError(f"rank {rank} ended with {status}")
        return [
            [json.loads(line) for line in Path(folder, str(rank)).read_text().splitlines()]
            for rank in range(options.ranks)
        ]


def _median(lines: list[dict[str, float]]) -> float:
    return statistics.median(line["ended"] - line["began"] for line in lines[3:])


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="of the run")
    parser.add_argument("--layers", type=int, default=8, help="square linear layers")
    parser.add_argument("--width", type=int, default=1024, help="of a layer")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--redundancy", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--victim", type=int, default=-1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        _work(options)
        return
    num_parameters = options.layers * (options.width + 1) * options.width
    shard = 12 * num_parameters / options.ranks
    print(f"{num_parameters / 1e6:.1f} M parameters on {options.ranks} ranks, {os.cpu_count()} cores")
    print(f"a rank holds {4 * shard / 2**20:.0f} MiB of copies, and sends {shard / 2**20:.0f} MiB per step")
    without, copying = (_median(_run(options, redundancy, -1)[0]) for redundancy in (0, 1))
    print(f"a step takes {without:.3f} s without copies, {copying:.3f} s with them")
    lines = _run(options, 1, 1)
    died = lines[1][-1]["died"]
    again = next(line for line in lines[0] if line["step"] == DIES_IN + 1)
    print(f"from the death of rank 1 to the end of the repeated step: {again['ended'] - died:.1f} s")


if __name__ == "__main__":
    main()
