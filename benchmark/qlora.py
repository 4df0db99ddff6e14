"""Adapters on a frozen base in 4 bits: with a part of the base on the GPU, against all of it there.

A Llama whose linear layers are stored in NF4, PEFT's LoRA on all of them, checkpointed layers, the loss fused, AdamW,
clipping at 1.0, bfloat16. Each system trains in a fresh process, in the order of ``--systems``; a name may come again.
Figures of each system go to stderr as soon as it ends.

* base: each weight is a window of one buffer of normal values, read as weights of a folder of safetensors are, and
  quantised when it is read. No weight exists in 16 bits.
* budget: within ``--device-memory`` and ``--host-memory``. resident: without a limit.
* step: the median of the timed steps, each from the batch on the host to an idle GPU.
* TFLOPS: model TFLOPS over the step: 4 operations per parameter and token, 2 more for trained ones, and 6 per layer,
  hidden unit, position and token for attention (half of it is masked; recomputation is not counted).
* frozen up, frozen down: bytes of frozen chunks over the link in the last step; nothing may come down. GB/s: of
  uploads, while any is under way in that step.
* ratio: of the step to the resident step; the goal is at most 1.3.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import statistics
import time
import traceback
import zlib
from typing import Any

import torch
from torch import nn

from benchmark.common import LLAMAS, SHAPES, LlamaShape, gib, in_fresh_process, provenance, show, synchronize, table
from patrickstar import _C

GOAL = 1.3
_STD = 0.02
_REPORTED = (
    "num_parameters", "device_budget_bytes", "device_activation_bytes", "host_budget_bytes", "num_chunks",
    "chunk_numel", "num_device_state_chunks", "num_device_quantized_chunks", "num_evictions",
    "num_pressure_evictions", "num_prefetch_hits", "num_on_demand_fetches", "offloaded_bytes",
)  # fmt: skip
_BUDGET, _RESIDENT = "budget", "resident"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=LLAMAS, default="llama-70b")
    parser.add_argument("--layers", type=int, metavar="N", help="only so many of its layers")
    parser.add_argument("--length", type=int, default=2048, help="tokens per sequence")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per step")
    parser.add_argument("--micro-batch", type=int, default=4, metavar="N", help="sequences per forward and backward")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--warm-up", type=int, default=3, metavar="N", help="steps before the timed ones")
    parser.add_argument("--most-seconds", type=float, default=240.0, help="per system, after which no step begins")
    parser.add_argument("--systems", nargs="+", choices=(_BUDGET, _RESIDENT), default=[_BUDGET, _RESIDENT])
    parser.add_argument("--device-memory", metavar="SIZE", default="24GiB", help="device_memory within the budget")
    parser.add_argument("--host-memory", metavar="SIZE", default="64GiB", help="host_memory within the budget")
    parser.add_argument(
        "--chunk-numel", type=int, metavar="N", help="elements per chunk (default: the engine's choice)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Runs the systems in turn.

    Raises:
        ValueError: the batch is no whole number of micro-batches.
    """
    if args.micro_batch < 1 or args.batch_size % args.micro_batch:
        raise ValueError(
            f"--batch-size is {args.batch_size}, which is no multiple of --micro-batch, {args.micro_batch}; give one"
        )
    rows = [_figures(system, args) for system in args.systems]
    done = [row for row in rows if "error" not in row]
    resident = [row["step_seconds"] for row in done if row["system"] == _RESIDENT]
    for row in done:
        row["ratio"] = row["step_seconds"] / statistics.median(resident) if resident else None
    result = {
        "case": "qlora", "shape": args.shape, **dataclasses.asdict(_shape(args)), "rank": args.rank,
        "batch": args.batch_size, "micro_batch": args.micro_batch, "goal": GOAL, "rows": rows, **provenance(),
    }  # fmt: skip
    if not done:
        show(json.dumps(result))
        raise RuntimeError("no system trained: " + "; ".join(f"{row['system']}: {row['error']}" for row in rows))
    return result


def _shape(args: argparse.Namespace) -> LlamaShape:
    shape = SHAPES[args.shape]
    assert isinstance(shape, LlamaShape)
    return dataclasses.replace(shape, length=args.length, layers=args.layers or shape.layers)


def _figures(system: str, args: argparse.Namespace) -> dict[str, Any]:
    """A system's row; of a failed system, its error."""
    try:
        row = in_fresh_process(_train_or_error, system, args)
    except RuntimeError as error:
        row = {"system": system, "error": str(error)}
    show(json.dumps(row))
    return row


def _train_or_error(system: str, args: argparse.Namespace) -> dict[str, Any]:
    try:
        return _train(system, args)
    except BaseException as error:
        traceback.print_exc()
        return {"system": system, "error": f"{type(error).__name__}: {error}"}


def _train(system: str, args: argparse.Namespace) -> dict[str, Any]:
    import peft  # noqa: F401  imported before the timed part

    import patrickstar

    shape, weights = _shape(args), _RandomWeights()
    begin = time.perf_counter()
    synchronize()
    torch.manual_seed(0)
    engine, *_ = patrickstar.initialize(model=lambda: _adapted(shape, args.rank, weights), config=_config(system, args))
    synchronize()
    init_seconds = time.perf_counter() - begin
    weights.forget()
    layout = engine._session.layout
    chunks = [layout.chunk(chunk) for chunk in range(layout.num_chunks)]
    show(f"{system}: initialised in {init_seconds:.1f} s, {len(chunks)} chunks")
    peaks = {"init_seconds": init_seconds, "init_device_peak_bytes": _reserved_bytes()}
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    timed = _time_steps(system, engine, shape, args)
    report = timed["report"]
    flops = _model_flops(shape, timed["report"]["num_parameters"], _numel(chunks, trained=True), args.batch_size)
    return {
        "system": system,
        "step_seconds": statistics.median(timed["seconds"][timed["num_warm_up"] :]),
        "model_tflops": flops / statistics.median(timed["seconds"][timed["num_warm_up"] :]) / 1e12,
        "num_trained": _numel(chunks, trained=True),
        **peaks,
        **{key: value for key, value in timed.items() if key not in ("report", "trace")},
        **_of_frozen(timed["trace"], chunks),
        "reserved_peak_bytes": _reserved_bytes(),
        "process_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        **{key: report[key] for key in _REPORTED},
        "num_quantized_chunks": sum(chunk["quantization"] != _C.QuantType.NONE for chunk in chunks),
    }


def _config(system: str, args: argparse.Namespace) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_accumulation_steps": args.batch_size // args.micro_batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-4, "weight_decay": 0.01}}, "bf16": {"enabled": True},
        "gradient_clipping": 1.0, "quantization": {"type": "nf4"}, "activations": {"loss": "fused"},
        "steps_per_print": 1_000_000,
    }  # fmt: skip
    if args.chunk_numel is not None:
        config["default_chunk_size"] = args.chunk_numel
    if system == _BUDGET:
        config |= {"device_memory": args.device_memory, "host_memory": args.host_memory}
    return config


class _RandomWeights:
    """Values of linear layers: windows of one buffer of normal values, each at its own offset."""

    _PLACES, _STRIDE = 2**14, 64

    def __init__(self) -> None:
        self._shapes: dict[str, torch.Size] = {}
        self._buffer = torch.empty(0)

    def of(self, model: nn.Module) -> _RandomWeights:
        """Prepares values for the projections in ``model``'s layers."""
        params = model.named_parameters()
        self._shapes = {name: param.shape for name, param in params if name.endswith("_proj.weight")}
        numel = max(shape.numel() for shape in self._shapes.values()) + self._PLACES * self._STRIDE
        generator = torch.Generator("cpu").manual_seed(0)
        with _C.HostAllocations():
            self._buffer = torch.empty(numel, device="cpu").normal_(0.0, _STD, generator=generator)
        return self

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def read(self, name: str) -> torch.Tensor:
        """The values of ``name``, in memory shared with other names."""
        begin = zlib.crc32(name.encode()) % self._PLACES * self._STRIDE
        return self._buffer[begin : begin + self._shapes[name].numel()].view(self._shapes[name])

    def forget(self) -> None:
        """Frees the memory."""
        self._buffer = torch.empty(0)


def _adapted(shape: LlamaShape, rank: int, weights: _RandomWeights) -> nn.Module:
    """The model on the meta device, with values for the weights that will be quantised."""
    from peft import LoraConfig, get_peft_model

    from benchmark.systems.weights import build_meta_model
    from patrickstar.module.materialize import attach_values

    base = build_meta_model(shape)
    attach_values(base, weights.of(base))
    options = {"r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return get_peft_model(base, LoraConfig(**options)).train()


def _model_flops(shape: LlamaShape, num_params: int, num_trained: int, batch: int) -> float:
    tokens = batch * shape.length
    of_attention = 6.0 * shape.layers * shape.hidden * shape.length * tokens
    return (4.0 * num_params + 2.0 * num_trained) * tokens + of_attention


def _numel(chunks: list[dict[str, Any]], *, trained: bool) -> int:
    return sum(chunk["numel"] for chunk in chunks if chunk["trainable"] == trained)


def _time_steps(system: str, engine: Any, shape: LlamaShape, args: argparse.Namespace) -> dict[str, Any]:
    """Trains; times and bytes of the timed steps. The last step is traced."""
    engine.train()
    generator = torch.Generator().manual_seed(1)
    num_micro = args.batch_size // args.micro_batch
    began = time.perf_counter()
    seconds: list[float] = []
    losses: list[float] = []
    reports: list[dict[str, Any]] = []
    num_steps = args.warm_up + args.steps
    while len(seconds) < num_steps:
        is_deferred = time.perf_counter() - began > args.most_seconds
        is_last = is_deferred or len(seconds) == num_steps - 1
        if is_last:
            engine._session.runtime.start_trace()
        synchronize()
        begin = time.perf_counter()
        loss = torch.zeros((), device=engine.device)
        for _ in range(num_micro):
            tokens = torch.randint(shape.vocab, (args.micro_batch, args.length), generator=generator)
            tokens = tokens.to(engine.device)
            output = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
            engine.backward(output)
            engine.step()
            loss += output.detach() / num_micro
            del output
        losses.append(loss.item())
        synchronize()
        seconds.append(time.perf_counter() - begin)
        reports.append(engine.report())
        show(f"{system}: step {len(seconds)}: {seconds[-1]:.2f} s, loss {losses[-1]:.6f}")
        if is_last:
            break
    engine.eval()
    with torch.no_grad():  # a trace ends when the next forward begins
        engine(input_ids=tokens[:1, : min(args.length, 64)], use_cache=False)
    num_warm_up = min(args.warm_up, len(seconds) - 1)
    first, last = reports[num_warm_up - 1] if num_warm_up else None, reports[-1]
    num_counted = len(seconds) - num_warm_up

    def of_each_step(key: str) -> float:
        return (last[key] - (first[key] if first else 0)) / num_counted

    return {
        "seconds": seconds, "losses": losses, "num_warm_up": num_warm_up,
        "device_peak_bytes": last["device_peak_bytes"], "host_peak_bytes": last["host_peak_bytes"],
        "uploaded_bytes": of_each_step("uploaded_bytes"), "downloaded_bytes": of_each_step("downloaded_bytes"),
        "offloaded_bytes_per_step": of_each_step("offloaded_bytes"), "report": last,
        "trace": engine._session.runtime.take_trace(),
    }  # fmt: skip


def _of_frozen(trace: dict[str, Any] | None, chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Bytes of frozen chunks in the traced step, and the rate of uploads."""
    if trace is None:
        return {"frozen_uploaded_bytes": None, "frozen_downloaded_bytes": None, "uploaded_gbps": None}
    moved = {_C.Track.UPLOAD: 0, _C.Track.DOWNLOAD: 0}
    up_bytes, up_seconds, stalled = 0, 0.0, 0.0
    for span in trace["spans"]:
        if span["owner"] != _C.SpanOwner.THIS_STEP:
            continue
        if span["track"] in moved and 0 <= span["chunk"] < len(chunks) and not chunks[span["chunk"]]["trainable"]:
            moved[span["track"]] += span["num_bytes"]
        if span["track"] == _C.Track.UPLOAD:
            up_bytes, up_seconds = up_bytes + span["num_bytes"], up_seconds + span["seconds"]
        if span["track"] == _C.Track.STALL:
            stalled += span["seconds"]
    return {
        "frozen_uploaded_bytes": moved[_C.Track.UPLOAD],
        "frozen_downloaded_bytes": moved[_C.Track.DOWNLOAD],
        "uploaded_gbps": up_bytes / up_seconds / 1e9 if up_seconds else None,
        "traced_seconds": trace["seconds"],
        "stalled_seconds": stalled,
    }


def _reserved_bytes() -> int:
    return torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0


_COLUMNS = (
    ("", 9, ""), ("step", 8, ".2f"), ("TFLOPS", 8, ".1f"), ("ratio", 7, ".3f"), ("GPU", 7, ".1f"), ("host", 7, ".1f"),
    ("up", 8, ".1f"), ("frozen up", 11, ".1f"), ("frozen down", 13, ".1f"), ("GB/s", 7, ".1f"), ("on GPU", 9, ""),
    ("init", 7, ".1f"), ("  all steps", -11, ""),
)  # fmt: skip


def _cells(row: dict[str, Any]) -> list[Any]:
    sizes = ("device_peak", "host_peak", "uploaded", "frozen_uploaded", "frozen_downloaded")
    return [
        row["system"], row["step_seconds"], row["model_tflops"], row["ratio"],
        *(gib(row[f"{name}_bytes"]) for name in sizes), row["uploaded_gbps"],
        f"{row['num_device_quantized_chunks']}/{row['num_quantized_chunks']}", row["init_seconds"],
        "  " + " ".join(f"{seconds:.2f}" for seconds in row["seconds"]),
    ]  # fmt: skip


def format_table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['shape']}: hidden {result['hidden']}, {result['layers']} layers, LoRA of rank {result['rank']} on "
        f"NF4, {result['batch']} x {result['length']} tokens per step, {result['micro_batch']} sequences at a time; "
        f"GPU {result['gpu']}; sizes in GiB",
        *table(_COLUMNS, (_cells(row) for row in result["rows"] if "error" not in row)),
        *(f"{row['system']:>9}  {row['error']}" for row in result["rows"] if "error" in row),
    ]
    lines.append(f"goal: a ratio of at most {result['goal']}, and no frozen chunk that comes down")
    return "\n".join(lines)
