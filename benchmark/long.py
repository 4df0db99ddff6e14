"""Training steps of one long sequence: attention of checkpointed layers kept against computed again.

A model of Hugging Face with checkpointed layers, the loss fused, MLPs and norms in tiles, AdamW, clipping at 1.0. Each
variant of ``activations.keep_attention`` runs in a fresh process.

* seconds: of one step, with a synchronisation at its end. In the first one memory is touched and pinned, and nothing
  is kept yet.
* TFLOPS: those of the model by its steps after the first: 6 per parameter and token, and the causal half of attention.
* stashed: what left the device in the last step; tide: activations then, with what PyTorch holds for later ones.
* gap: the largest relative difference of losses to those of the first variant: 0 where kernels are deterministic, which
  cuDNN's attention is not in backward.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from typing import Any

import torch

from benchmark.common import SHAPES, model_flops, provenance, synchronize
from benchmark.fresh_process import in_fresh_process

_GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=SHAPES, default="llama-8b")
    parser.add_argument("--length", type=int, default=65536, help="tokens of the sequence")
    parser.add_argument("--steps", type=int, default=3, help="of which the first is not counted")
    parser.add_argument("--tile-tokens", type=int, default=8192)
    parser.add_argument("--device-memory", metavar="SIZE", help="device_memory (default: what is free)")
    parser.add_argument("--host-memory", metavar="SIZE", help="host_memory (default: what is free)")
    parser.add_argument("--keep-attention", nargs="+", choices=("never", "auto", "always"), default=["never", "auto"])
    parser.add_argument("--summary", action="store_true", help="print what bounds the last step")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Runs the variants in turn."""
    rows = []
    for kept in dict.fromkeys(args.keep_attention):
        rows.append(in_fresh_process(_run_variant, kept, args))
    shape = dataclasses.replace(SHAPES[args.model], length=args.length)
    for row in rows:
        row["median_seconds"] = statistics.median(row["seconds"][1:] or row["seconds"])
        row["model_tflops"] = model_flops(shape, 1) / row["median_seconds"] / 1e12
        row["gap"] = max(abs(own / first - 1) for own, first in zip(row["losses"], rows[0]["losses"], strict=True))
    return {"case": "long", "model": args.model, "length": args.length, "rows": rows, **provenance()}


def _run_variant(kept: str, args: argparse.Namespace) -> dict[str, Any]:
    import patrickstar
    from benchmark.systems.weights import build_meta_model
    from patrickstar.profiling.summary import summarize

    shape = dataclasses.replace(SHAPES[args.model], length=args.length)
    config: dict[str, Any] = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": 0.01}},
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "activations": {"loss": "fused", "tile_tokens": args.tile_tokens, "keep_attention": kept},
    }
    config |= {"device_memory": args.device_memory} if args.device_memory else {}
    config |= {"host_memory": args.host_memory} if args.host_memory else {}

    engine, optimizer = patrickstar.initialize_engine(lambda: build_meta_model(shape), 0, config)
    engine.train()
    generator = torch.Generator().manual_seed(0)
    seconds, losses, before = [], [], 0
    for step in range(args.steps):
        tokens = torch.randint(shape.vocab, (1, args.length), generator=generator).to(engine.device)
        if step == args.steps - 1:
            before = engine.report()["stashed_bytes"]
            if args.summary:
                engine._session.runtime.start_trace()
        synchronize()
        begin = time.perf_counter()
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        optimizer.step()
        losses.append(loss.item())
        synchronize()
        seconds.append(time.perf_counter() - begin)
        del loss
        print(f"{kept}, step {step}: {seconds[-1]:.2f} s, loss {losses[-1]:.6f}", file=sys.stderr, flush=True)
    report = engine.report()
    row = {
        "kept": kept,
        "seconds": seconds,
        "losses": losses,
        "stashed_bytes": report["stashed_bytes"] - before,
        "tide_bytes": report["device_tide_bytes"],
        "device_peak_bytes": report["device_peak_bytes"],
        "host_peak_bytes": report["host_peak_bytes"],
        "num_pressure_evictions": report["num_pressure_evictions"],
    }
    if args.summary:
        optimizer.zero_grad()
        engine.eval()
        with torch.no_grad():
            engine(input_ids=tokens[:, : min(args.length, 512)])  # a trace ends when the next forward begins
        trace = engine._session.runtime.take_trace()
        row["summary"] = summarize(trace).text(args.steps - 1) if trace else ""
        print(row["summary"], file=sys.stderr, flush=True)
    return row


def format_table(result: dict[str, Any]) -> str:
    """One row per variant."""
    head = ("kept", "s", "TFLOPS", "stashed", "tide", "GPU", "host", "gap", "all steps")
    lines = ["{:>10}{:>9}{:>8}{:>9}{:>7}{:>7}{:>7}{:>9}  {}".format(*head)]
    for row in result["rows"]:
        sizes = (row[f"{name}_bytes"] / _GIB for name in ("stashed", "tide", "device_peak", "host_peak"))
        lines.append(
            f"{row['kept']:>10}{row['median_seconds']:9.2f}{row['model_tflops']:8.1f}"
            + "{:9.1f}{:7.1f}{:7.1f}{:7.1f}".format(*sizes)
            + f"{row['gap']:9.1e}  "
            + " ".join(f"{seconds:.2f}" for seconds in row["seconds"])
        )
    return "\n".join([f"{result['model']}, {result['length']} tokens; sizes in GiB", *lines])
