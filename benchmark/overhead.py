"""One step with everything resident against plain PyTorch on the same model.

Both train the same Hugging Face GPT-2 in float32 on the same batches: plain PyTorch with
``torch.optim.AdamW(fused=True)``, and the engine without a device budget. Steps are interleaved; the ratio is of
medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from benchmark.common import GptShape, build_gpt, provenance, token_batch
from patrickstar.runtime import initialize_engine

ADAM = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
GOAL = 1.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--length", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each")
    parser.add_argument(
        "--precision",
        choices=("fp32", "bf16"),
        default="fp32",
        help="bf16: plain PyTorch keeps float32 masters and casts",
    )


def _plain(shape: GptShape, batch: int, precision: str) -> Callable[[], None]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_gpt(shape).to(device)
    masters = list(model.parameters())
    if precision == "bf16":
        masters = [torch.nn.Parameter(p.detach().clone()) for p in masters]
        model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(masters, fused=True, **ADAM)
    generator = torch.Generator().manual_seed(1)

    def step() -> None:
        optimizer.zero_grad()
        data = {key: value.to(device) for key, value in token_batch(shape, batch, generator).items()}
        model(**data).loss.backward()
        if precision == "bf16":
            for master, param in zip(masters, model.parameters(), strict=True):
                master.grad, param.grad = param.grad.float(), None
        optimizer.step()
        if precision == "bf16":
            with torch.no_grad():
                for master, param in zip(masters, model.parameters(), strict=True):
                    param.copy_(master)

    return step


def _ours(shape: GptShape, batch: int, precision: str):
    config = {"optimizer": {"type": "AdamW", "params": ADAM}, "bf16": {"enabled": precision == "bf16"}}
    engine, optimizer = initialize_engine(lambda: build_gpt(shape), 0, config)
    engine.train()
    generator = torch.Generator().manual_seed(1)

    def step() -> None:
        optimizer.zero_grad()
        engine.backward(engine(**token_batch(shape, batch, generator)).loss)
        optimizer.step()

    return engine, step


def run(args: argparse.Namespace) -> dict:
    """Median seconds of a step of both, interleaved; warm-up steps are not counted."""
    shape = GptShape(args.hidden, args.layers, args.hidden // 64, args.vocab, args.length, checkpointing=False)
    torch.manual_seed(0)
    plain = _plain(shape, args.batch, args.precision)
    torch.manual_seed(0)
    engine, ours = _ours(shape, args.batch, args.precision)
    seconds: dict[str, list[float]] = {"plain": [], "ours": []}
    with engine:
        for index in range(args.steps + 3):
            for name, step in (("plain", plain), ("ours", ours)):
                begin = time.perf_counter()
                step()
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                if index >= 3:
                    seconds[name].append(time.perf_counter() - begin)
        report = engine.report()
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = [ours / plain for ours, plain in zip(seconds["ours"], seconds["plain"], strict=True)]
    return {
        "case": "overhead",
        "step_ratio_vs_torch": statistics.median(ratios),
        "step_seconds": medians["ours"],
        "torch_step_seconds": medians["plain"],
        "num_parameters": report["num_parameters"],
        "precision": args.precision,
        "batch": args.batch,
        "length": args.length,
        "uploaded_bytes": report["uploaded_bytes"],
        **provenance(),
    }


def format_table(result: dict) -> str:
    """The result of run() for people."""
    return "\n".join(
        [
            f"GPT of {result['num_parameters'] / 1e6:.1f} M parameters, {result['precision']}, batch "
            f"{result['batch']} x {result['length']} tokens, {result['num_cpus']} cores, "
            f"GPU {result['gpu']}",
            f"plain PyTorch  {result['torch_step_seconds']:.4f} s per step",
            f"PatrickStar    {result['step_seconds']:.4f} s per step",
            f"ratio          {result['step_ratio_vs_torch']:.3f} (goal at most {GOAL})",
        ]
    )
