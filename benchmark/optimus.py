"""Tensor parallelism in one dimension and in two on 4, 16 and 64 GPUs, simulated, beside Optimus's paper.

Nothing runs: steps are predictions of ``patrickstar plan --tensor-parallel`` for H200s, in which everything but the
links is as fast as one H200 was measured to be. Within a node links have the rates of all-gathers and reduce-scatters
that were measured on four H200s over NVLink; between nodes an adapter's data sheet rate, or NVLink's again.

Weak scaling as in the paper (arXiv 2104.05343): on q x q GPUs a GPT with hidden size q times 1024 and 512 tokens a
sequence. The batch grows with q (96 for q = 2, as in its published script) and is the same for both ways. The paper
compares with Megatron of 2021 on RTX 5000s, four a node, with the largest batch that each way allowed. So only the
trend of ratios may be compared.

* square: q x q, the paper's comparison. fewest: the mesh that receives least.
* waits: of a step, exchanges that products did not hide, and their latencies.
* link: busy seconds of the GPU's link.
* x 1D: one dimension's step over this step. One dimension is PatrickStar's, whose tokens travel rank by rank; over many
  ranks their latencies and its small products are expensive.
* x best 1D: the same over one dimension's computing or its link's time, whichever is longer: a lower bound for any
  implementation with these products.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from typing import Any

from benchmark.common import gib, provenance, table
from patrickstar.planning.cluster import LINKS, Cluster
from patrickstar.planning.machines import H200
from patrickstar.planning.models import whole_model
from patrickstar.planning.planner import Answer, Planner
from patrickstar.planning.question import Question, Workload
from patrickstar.planning.setting import Setting
from patrickstar.planning.sharded_matrices import MatrixMesh, cheapest_mesh
from patrickstar.tensor2d.cost import Mode

_PAPER = {4: 0.86, 16: 1.41 / 1.38, 36: 1.48, 64: 1.48}
"""Optimus's training sequences per second over Megatron's, by number of GPUs (from others' notes on the paper)."""
_HOST_BYTES, _DEVICE_BYTES = 120 * 2**30, 130 * 2**30
_CHUNK_NUMEL = 2**26
_SLOWDOWN = H200.several_gpus_slowdown  # of all traced operations


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", nargs="+", type=int, default=[4, 16, 64], help="squares of the mesh's sides")
    parser.add_argument("--gpus-per-node", type=int, default=4)
    parser.add_argument("--links", nargs="+", choices=LINKS, default=["nvlink", "ib400"], help="between nodes")
    parser.add_argument("--hidden-per-side", type=int, default=1024, help="the hidden size is that times q")
    parser.add_argument("--batch-per-side", type=int, default=48, help="the batch is that times q")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--layers", type=int, default=24)


def run(args: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for gpus in args.gpus:
        side = math.isqrt(gpus)
        if side * side != gpus:
            raise ValueError(f"--gpus {gpus} is no square; give 4, 16 or 64")
        name = f"gpt:{args.hidden_per_side * side}x{args.layers}"
        batch = args.batch_per_side * side
        fewest = cheapest_mesh(whole_model(name, args.seq_len), batch, args.seq_len, gpus, Mode.TWO)
        meshes = {
            "1D": MatrixMesh(mode=Mode.ONE, rows=1, columns=gpus),
            "square": MatrixMesh(mode=Mode.TWO, rows=side, columns=side),
            "fewest": fewest,
        }
        for link in args.links if gpus > args.gpus_per_node else args.links[:1]:
            per_node = min(gpus, args.gpus_per_node)
            cluster = Cluster(nodes=gpus // per_node, gpus_per_node=per_node, link=LINKS[link])
            answers = {
                key: Planner().answer(_question(Workload(
                    model=name, batch=batch, length=args.seq_len, checkpointing=True, mesh=mesh), cluster))
                for key, mesh in meshes.items()
            }  # fmt: skip
            rows.append(_row(gpus, link if gpus > args.gpus_per_node else "within a node", answers))
    return {
        "case": "optimus", "simulated": True, "rows": rows, "gpus_per_node": args.gpus_per_node, "layers": args.layers,
        "seq_len": args.seq_len, **provenance(),
    }  # fmt: skip


def _question(workload: Workload, cluster: Cluster) -> Question:
    return Question(
        workload=workload, machine=H200, setting=Setting(device_bytes=_DEVICE_BYTES, host_bytes=_HOST_BYTES),
        cluster=cluster, chunk_numel=_CHUNK_NUMEL,
    )  # fmt: skip


def _row(gpus: int, link: str, answers: dict[str, Answer]) -> dict[str, Any]:
    work = answers["1D"].question.workload
    ways = {}
    for key, answer in answers.items():
        mesh, exchanged = answer.question.workload.mesh, answer.exchanged
        assert mesh is not None and exchanged is not None
        ways[key] = {
            "rows": mesh.rows, "columns": mesh.columns, "step_seconds": answer.chosen.step.seconds,
            "computing_seconds": answer.chosen.step.seconds - exchanged.exposed_seconds * _SLOWDOWN,
            "activation_bytes": answer.chosen.plan.activation_peak_bytes, **dataclasses.asdict(exchanged),
        }  # fmt: skip
    base = ways["1D"]["step_seconds"]
    least = max(ways["1D"]["computing_seconds"], ways["1D"]["link_seconds"])
    for way in ways.values():
        way["speedup"], way["speedup_over_best"] = base / way["step_seconds"], least / way["step_seconds"]
    return {
        "gpus": gpus, "between_nodes": link, "model": work.model, "batch": work.batch, "ways": ways,
        "paper_speedup": _PAPER.get(gpus),
    }  # fmt: skip


_COLUMNS = (
    ("GPUs", 4, ""), (" nodes by", -15, ""), ("model", -12, ""), ("batch", 5, ""), ("  way", -9, ""),
    ("step s", 8, ".3f"), ("received GiB", 13, ".1f"), ("link s", 8, ".3f"), ("waits s", 8, ".3f"),
    ("activations GiB", 16, ".1f"), ("x 1D", 6, ".2f"), ("x best 1D", 10, ".2f"), ("paper", 6, ".2f"),
)  # fmt: skip


def format_table(result: dict[str, Any]) -> str:
    head = (
        f"SIMULATED, nothing ran: patrickstar plan for H200s, {result['gpus_per_node']} per node, sequences of "
        f"{result['seq_len']} tokens, {result['layers']} layers, recomputed activations, bfloat16"
    )
    cells = (
        [
            row["gpus"], f" {row['between_nodes']}", row["model"], row["batch"],
            "  1D" if key == "1D" else f"  {way['rows']} x {way['columns']}", way["step_seconds"],
            gib(way["received_bytes"]), way["link_seconds"], way["exposed_seconds"], gib(way["activation_bytes"]),
            way["speedup"], way["speedup_over_best"], row["paper_speedup"] if key == "square" else None,
        ]
        for row in result["rows"]
        for key, way in row["ways"].items()
    )  # fmt: skip
    return "\n".join([head, *table(_COLUMNS, cells)])
