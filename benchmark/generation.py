"""Generation within an engine, with each of some budgets, beside the same model in plain PyTorch.

Rows: seconds for each new token (median of the runs), bytes uploaded for it, and peak of GPU memory. Tokens are greedy
and compared with plain PyTorch's.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from typing import Any

import torch

from benchmark.common import SHAPES, provenance, show, synchronize

_RUNS = 3
_COUNTED = ("uploaded_bytes", "num_evictions", "num_pressure_evictions")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=SHAPES, default="tiny-llama")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens")
    parser.add_argument("--device-memory", nargs="*", default=[], metavar="SIZE", help="budgets beside an ample one")
    parser.add_argument("--further", type=json.loads, default={}, metavar="JSON", help="keys of the configuration")
    parser.add_argument("--trained", action="store_true", help="after a training step")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Generates. The rows are plain PyTorch and budgets."""
    from benchmark.ranks import training_device
    from benchmark.systems.weights import build_meta_model, fill_parameters
    from patrickstar.runtime import initialize_engine

    shape, device = SHAPES[args.model], training_device()
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(3, shape.vocab, (args.batch_size, args.prompt), generator=generator).to(device)
    model = build_meta_model(shape).bfloat16().to_empty(device=device)
    fill_parameters(model)
    rows, expected = [], None
    for budget in (None, "", *args.device_memory):
        if budget is None:
            rows.append({"system": "plain", **_generate(args, model, prompt)})
            expected = rows[0]["output"]
            del model
            gc.collect()  # the model and its initialiser refer to each other
            if device.type == "cuda":
                torch.cuda.empty_cache()
        else:
            config: dict[str, Any] = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}} | args.further
            config |= {"device_memory": budget} if budget else {}
            engine, optimizer = initialize_engine(lambda: build_meta_model(shape), device.index or 0, config)
            if args.trained:
                engine.backward(engine(input_ids=prompt, labels=prompt, use_cache=False).loss * 0)
                optimizer.step()
            before = engine.report()
            rows.append({"system": budget or "ample", **_generate(args, engine.module, prompt)})
            now = engine.report()
            rows[-1] |= {name: (now[name] - before[name]) / (args.tokens * (_RUNS + 1)) for name in _COUNTED}
            engine.discard()
            del engine, optimizer
            gc.collect()
        output = rows[-1].pop("output")
        rows[-1]["same_tokens"] = (output == expected).float().mean().item()
        show(_line(rows[-1]))
    return {"case": "generation", "model": args.model, "batch": args.batch_size, "prompt": args.prompt,
            "tokens": args.tokens, "rows": rows, **provenance()}  # fmt: skip


@torch.no_grad()
def _generate(args: argparse.Namespace, model: Any, prompt: torch.Tensor) -> dict[str, Any]:
    model.eval()
    length = {"min_new_tokens": args.tokens, "max_new_tokens": args.tokens, "use_cache": True}
    if prompt.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(_RUNS + 1):
        synchronize()
        begin = time.perf_counter()
        output = model.generate(prompt, do_sample=False, pad_token_id=0, **length)
        synchronize()
        seconds.append((time.perf_counter() - begin) / args.tokens)
    model.train()
    peak = torch.cuda.max_memory_reserved() if prompt.is_cuda else 0
    return {"seconds": statistics.median(seconds[1:]), "first_seconds": seconds[0], "peak_bytes": peak,
            "output": output.cpu()}  # fmt: skip


def _line(row: dict[str, Any]) -> str:
    moved = f"{row['uploaded_bytes'] / 1e9:.2f} GB up, " if "uploaded_bytes" in row else ""
    return (
        f"{row['system']:8} {row['seconds'] * 1e3:8.2f} ms a token (first run {row['first_seconds'] * 1e3:.2f}), "
        f"{moved}peak {row['peak_bytes'] / 2**30:.1f} GiB, {row['same_tokens']:.0%} of plain PyTorch's tokens"
    )


def format_table(result: dict[str, Any]) -> str:
    rows = result["rows"]
    ratios = ", ".join(f"{row['system']} {row['seconds'] / rows[0]['seconds']:.2f}" for row in rows[1:])
    length = f"{result['prompt']} + {result['tokens']} tokens"
    title = f"{result['gpu']}, {result['model']}, {result['batch']} sequences, {length}"
    return "\n".join([title, *map(_line, rows), f"time of plain PyTorch's: {ratios}"])
