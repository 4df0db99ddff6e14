"""One GPT training run: step time, model TFLOPS, tokens per second, device and host peak.

Model TFLOPS = (6 * parameters * tokens + 6 * layers * hidden * length * tokens) / time.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from benchmark.common import SHAPES, model_flops, provenance, token_batch
from patrickstar.command.flags import memory_size
from patrickstar.runtime import initialize_engine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--device-memory", type=memory_size, metavar="SIZE", help="device budget, such as 24GiB")
    parser.add_argument("--host-memory", type=memory_size, metavar="SIZE", help="host budget, such as 100GiB")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--chunk-numel", type=int, default=64 * 2**20, help="elements per chunk")
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--no-hybrid-adam", action="store_true", help="all optimizer states on the host")


def run(args: argparse.Namespace) -> dict:
    """Times steps after three warm-up steps."""
    shape = SHAPES[args.model]
    config = {
        "steps_per_print": 0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-4, "weight_decay": 0.01, "use_hybrid_adam": not args.no_hybrid_adam},
        },
        "bf16": {"enabled": True},
        "default_chunk_size": args.chunk_numel,
        "gradient_clipping": args.clip,
    }
    if args.device_memory:
        config["device_memory"] = args.device_memory
    if args.host_memory:
        config["host_memory"] = args.host_memory
    torch.manual_seed(0)
    begin = time.perf_counter()
    engine, optimizer = initialize_engine(lambda: shape.build(), 0, config)
    init_seconds = time.perf_counter() - begin
    generator = torch.Generator().manual_seed(1)
    device = engine._session.device
    seconds, losses = [], []
    with engine:
        engine.train()
        for index in range(3 + args.steps):
            if index == 3:
                engine.reset_report()
            begin = time.perf_counter()
            optimizer.zero_grad()
            data = {key: value.to(device) for key, value in token_batch(shape, args.batch_size, generator).items()}
            loss = engine(**data).loss
            engine.backward(loss)
            optimizer.step()
            losses.append(loss.item())
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        report = engine.report()
    step = statistics.median(seconds[3:])
    return {
        "case": "train",
        "model": args.model,
        "step_seconds": step,
        "model_tflops": model_flops(shape, args.batch_size) / step / 1e12,
        "tokens_per_second": args.batch_size * shape.length / step,
        "all_step_seconds": [round(value, 4) for value in seconds],
        "losses": losses,
        "init_seconds": init_seconds,
        "batch": args.batch_size,
        "length": shape.length,
        "clipping": args.clip,
        **{
            key: report[key]
            for key in (
                "num_parameters",
                "device_budget_bytes",
                "device_peak_bytes",
                "host_budget_bytes",
                "host_peak_bytes",
                "num_chunks",
                "num_device_state_chunks",
                "num_evictions",
                "num_prefetch_hits",
                "num_on_demand_fetches",
                "num_speculated_updates",
                "num_updates_host_ahead",
                "num_updates_host_two_passes_ahead",
            )
        },
        "uploaded_bytes_per_step": report["uploaded_bytes"] // args.steps,
        "downloaded_bytes_per_step": report["downloaded_bytes"] // args.steps,
        **provenance(),
    }


def format_table(result: dict) -> str:
    """The result of run() for people."""
    gib = 2**30
    return "\n".join(
        [
            f"{result['model']}: {result['num_parameters'] / 1e9:.2f} B parameters, batch {result['batch']} x "
            f"{result['length']}, bf16, GPU {result['gpu']}",
            f"step {result['step_seconds']:.3f} s, {result['model_tflops']:.1f} model TFLOPS, "
            f"{result['tokens_per_second']:.0f} tokens/s; all steps {result['all_step_seconds']}",
            f"device peak {result['device_peak_bytes'] / gib:.2f} GiB of {result['device_budget_bytes'] / gib:.2f}, "
            f"host peak {result['host_peak_bytes'] / gib:.2f} GiB; "
            f"initialised in {result['init_seconds']:.1f} s",
            f"per step: {result['uploaded_bytes_per_step'] / gib:.2f} GiB up, "
            f"{result['downloaded_bytes_per_step'] / gib:.2f} GiB down; "
            f"{result['num_device_state_chunks']} of {result['num_chunks']} chunks with states on the device",
        ]
    )
