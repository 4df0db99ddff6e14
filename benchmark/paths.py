"""Steps of a vision-language model whose batches have images in every other step, beside those of one kind alone.

The shape is Qwen2.5-VL-7B's, with fewer text layers. Rows: seconds per step (median) with and without images, first
each kind for itself, then both in turn; and the accesses that followed a plan.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch

from benchmark.common import provenance, show
from benchmark.steps import timed_step

_IMAGE_TOKEN, _IMAGE_START = 151655, 151652
_GRID = 32
"""Patches of an image in each direction; a quarter of them are tokens."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=8, help="text layers")
    parser.add_argument("--device-memory", default="24GiB")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=12, help="of each kind and course; the first third does not count")


def build(num_layers: int) -> torch.nn.Module:
    import transformers

    from patrickstar.planning.known_vision_models import VISION_MODELS

    _, fields = VISION_MODELS["qwen2.5-vl-7b"]
    text = {**fields["text_config"], "num_hidden_layers": num_layers}
    config = transformers.Qwen2_5_VLConfig(**{**fields, "text_config": text})
    config._attn_implementation = "sdpa"
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def batch(args: argparse.Namespace, generator: torch.Generator, device: torch.device, *, has_images: bool) -> Any:
    """Tokens and labels; with images, one for each sample."""
    tokens = torch.randint(3, 150000, (args.batch_size, args.tokens), generator=generator)
    found: dict[str, torch.Tensor] = {}
    if has_images:
        tokens[:, 0] = _IMAGE_START
        tokens[:, 1 : 1 + _GRID * _GRID // 4] = _IMAGE_TOKEN
        patches = torch.randn(args.batch_size * _GRID * _GRID, 3 * 2 * 14 * 14, generator=generator)
        found = {
            "pixel_values": patches.to(torch.bfloat16),
            "image_grid_thw": torch.tensor([[1, _GRID, _GRID]] * args.batch_size),
        }
    is_image = tokens == _IMAGE_TOKEN
    found |= {"input_ids": tokens, "mm_token_type_ids": is_image.int()}
    found["labels"] = torch.where(is_image | (tokens == _IMAGE_START), -100, tokens)
    return {name: value.to(device) for name, value in found.items()}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Trains one course after another in one engine. The rows are courses and kinds of steps."""
    from benchmark.ranks import training_device
    from patrickstar.runtime import initialize_engine

    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "device_memory": args.device_memory,
    }
    device = training_device()
    engine, optimizer = initialize_engine(lambda: build(args.layers), device.index or 0, config)
    engine.train()
    engine.module.gradient_checkpointing_enable({"use_reentrant": False})
    generator = torch.Generator().manual_seed(1)
    rows = []
    for course, kinds in (("text", [False]), ("images", [True]), ("in turn", [False, True])):
        seconds: dict[bool, list[float]] = {kind: [] for kind in kinds}
        before = engine.report()
        for index in range(args.steps * len(kinds)):
            has_images = kinds[index % len(kinds)]
            tokens = batch(args, generator, device, has_images=has_images)
            seconds[has_images].append(timed_step(engine, optimizer, tokens)[0])
            if index == args.steps // 3 * len(kinds):
                before = engine.report()
        now = engine.report()
        replayed, accesses = (now[name] - before[name] for name in ("num_replayed_accesses", "num_accesses"))
        for has_images, times in seconds.items():
            rows.append({
                "course": course, "has_images": has_images, "seconds": statistics.median(times[args.steps // 3 :]),
                "first_seconds": times[: args.steps // 3], "replayed": replayed / accesses,
                "predicted_seconds": now["predicted_step_seconds"],
            })  # fmt: skip
            show(_line(rows[-1]))
    engine.discard()
    return {"case": "paths", "layers": args.layers, "config": config, "batch": args.batch_size, "tokens": args.tokens,
            "rows": rows, **provenance()}  # fmt: skip


def _line(row: dict[str, Any]) -> str:
    kind = "images" if row["has_images"] else "text"
    first = " ".join(f"{seconds:.2f}" for seconds in row["first_seconds"])
    return f"{row['course']:8} {kind:7} {row['seconds']:6.3f} s   first: {first}   replayed {row['replayed']:.0%}"


def format_table(result: dict[str, Any]) -> str:
    alone = {row["has_images"]: row["seconds"] for row in result["rows"][:2]}
    ratios = [f"{row['seconds'] / alone[row['has_images']]:.2f}" for row in result["rows"][2:]]
    title = f"{result['gpu']}, {result['config']['device_memory']}, {result['batch']} x {result['tokens']} tokens"
    return "\n".join([title, *map(_line, result["rows"]), f"in turn / alone, text and images: {', '.join(ratios)}"])
