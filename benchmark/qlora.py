"""Adapters on a frozen base in 4 bits: a GPU that has room for a part of it, against one that has room for all.

A Llama whose linear layers are stored in NF4, PEFT's LoRA on all of them, checkpointed layers, the loss fused, AdamW,
clipping at 1.0, bfloat16. Each system trains in a fresh process, in the order in which ``--systems`` names them; a name
may come again. Figures of each go to stderr as soon as they are there, those of all at the end.

* base: each weight is a window of one buffer of normal values, read as weights of a folder of safetensors are, and
  quantised when it is read. Nothing of it exists in 16 bits.
* budget: within ``--device-memory`` and ``--host-memory``. resident: without a limit.
* step: the median of those that are counted, each from the batch on the host to an idle GPU.
* TFLOPS: of the model: 4 per parameter and token, 2 more where it is trained, and 6 per layer, hidden unit, position
  and token for attention (causal masks counted by half, recomputation not counted), over the step.
* frozen up, frozen down: bytes of frozen chunks over the link in the last step; nothing may come down. Link: bytes per
  second while something goes up, in that step.
* ratio: of the step to the resident one's; the goal is at most 1.3.
* plan: the step that ``patrickstar plan`` expects of the same chunks within the same budgets, on a GPU of that kind
  (``--machine``), not measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import statistics
import sys
import tempfile
import time
import traceback
import zlib
from typing import Any

import torch
from torch import nn

from benchmark.common import SHAPES, LlamaShape, provenance, synchronize
from benchmark.fresh_process import in_fresh_process
from patrickstar import _C
from patrickstar.planning.machines import MACHINES

GOAL = 1.3
_GIB = 2**30
_STD = 0.02
_LLAMAS = [name for name, shape in SHAPES.items() if isinstance(shape, LlamaShape)]
_BUDGET, _RESIDENT = "budget", "resident"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=_LLAMAS, default="llama-70b")
    parser.add_argument("--layers", type=int, metavar="N", help="only so many of its layers")
    parser.add_argument("--length", type=int, default=2048, help="tokens per sequence")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per step")
    parser.add_argument("--micro-batch", type=int, default=4, metavar="N", help="sequences per forward and backward")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--warm-up", type=int, default=3, metavar="N", help="steps before, which are not counted")
    parser.add_argument("--most-seconds", type=float, default=240.0, help="of a system, after which no step begins")
    parser.add_argument("--systems", nargs="+", choices=(_BUDGET, _RESIDENT), default=[_BUDGET, _RESIDENT])
    parser.add_argument("--device-memory", metavar="SIZE", default="24GiB", help="device_memory within the budget")
    parser.add_argument("--host-memory", metavar="SIZE", default="64GiB", help="host_memory within the budget")
    parser.add_argument(
        "--chunk-numel", type=int, metavar="N", help="elements per chunk (default: the engine's choice)"
    )
    parser.add_argument("--machine", choices=MACHINES, help="of the plan (default: by the GPU's name, or h200)")


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
        row["plan"] = _planned(row, args)
    result = {
        "case": "qlora",
        "shape": args.shape,
        **dataclasses.asdict(_shape(args)),
        "rank": args.rank,
        "batch": args.batch_size,
        "micro_batch": args.micro_batch,
        "goal": GOAL,
        "rows": rows,
        **provenance(),
    }
    if not done:
        print(json.dumps(result), file=sys.stderr)
        raise RuntimeError("no system trained: " + "; ".join(f"{row['system']}: {row['error']}" for row in rows))
    return result


def _shape(args: argparse.Namespace) -> LlamaShape:
    shape = SHAPES[args.shape]
    assert isinstance(shape, LlamaShape)
    return dataclasses.replace(shape, length=args.length, layers=args.layers or shape.layers)


def _figures(system: str, args: argparse.Namespace) -> dict[str, Any]:
    """Or why there are none: the next system runs in any case."""
    try:
        row = in_fresh_process(_train_or_say_why_not, system, args)
    except RuntimeError as error:
        row = {"system": system, "error": str(error)}
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def _train_or_say_why_not(system: str, args: argparse.Namespace) -> dict[str, Any]:
    try:
        return _train(system, args)
    except BaseException as error:
        traceback.print_exc()
        return {"system": system, "error": f"{type(error).__name__}: {error}"}


def _train(system: str, args: argparse.Namespace) -> dict[str, Any]:
    import peft  # noqa: F401  what follows is timed

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
    _say(system, f"initialised in {init_seconds:.1f} s, {len(chunks)} chunks")
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
        **{
            key: report[key]
            for key in (
                "num_parameters",
                "device_budget_bytes",
                "device_tide_bytes",
                "host_budget_bytes",
                "num_chunks",
                "chunk_numel",
                "num_device_state_chunks",
                "num_device_quantized_chunks",
                "num_evictions",
                "num_pressure_evictions",
                "num_prefetch_hits",
                "num_on_demand_fetches",
                "stashed_bytes",
            )
        },
        "num_quantized_chunks": sum(chunk["quantization"] != _C.QuantType.NONE for chunk in chunks),
    }


def _config(system: str, args: argparse.Namespace) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_accumulation_steps": args.batch_size // args.micro_batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-4, "weight_decay": 0.01}},
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "quantization": {"type": "nf4"},
        "activations": {"loss": "fused"},
        "steps_per_print": 1_000_000,
    }
    if args.chunk_numel is not None:
        config["default_chunk_size"] = args.chunk_numel
    if system == _BUDGET:
        config |= {"device_memory": args.device_memory, "host_memory": args.host_memory}
    return config


# The model


class _RandomWeights:
    """Values of linear layers: windows of one buffer of normal values, each at a place of its own."""

    _PLACES, _STRIDE = 2**14, 64

    def __init__(self) -> None:
        self._shapes: dict[str, torch.Size] = {}
        self._buffer = torch.empty(0)

    def of(self, model: nn.Module) -> _RandomWeights:
        """They are those of the projections in ``model``'s layers."""
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
        """The values of ``name``: memory that others share."""
        begin = zlib.crc32(name.encode()) % self._PLACES * self._STRIDE
        return self._buffer[begin : begin + self._shapes[name].numel()].view(self._shapes[name])

    def forget(self) -> None:
        """Frees the memory: nothing will be read any more."""
        self._buffer = torch.empty(0)


def _adapted(shape: LlamaShape, rank: int, weights: _RandomWeights) -> nn.Module:
    """On the meta device, with values to be read for what will be quantised."""
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


# Steps


def _time_steps(system: str, engine: Any, shape: LlamaShape, args: argparse.Namespace) -> dict[str, Any]:
    """Trains; what the counted steps took and moved. The last one is traced."""
    engine.train()
    generator = torch.Generator().manual_seed(1)
    num_micro = args.batch_size // args.micro_batch
    began = time.perf_counter()
    seconds: list[float] = []
    losses: list[float] = []
    reports: list[dict[str, Any]] = []
    num_steps = args.warm_up + args.steps
    while len(seconds) < num_steps:
        is_late = time.perf_counter() - began > args.most_seconds
        is_last = is_late or len(seconds) == num_steps - 1
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
        _say(system, f"step {len(seconds)}: {seconds[-1]:.2f} s, loss {losses[-1]:.6f}")
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
        "seconds": seconds,
        "losses": losses,
        "num_warm_up": num_warm_up,
        "device_peak_bytes": last["device_peak_bytes"],
        "host_peak_bytes": last["host_peak_bytes"],
        "uploaded_bytes": of_each_step("uploaded_bytes"),
        "downloaded_bytes": of_each_step("downloaded_bytes"),
        "stashed_bytes_per_step": of_each_step("stashed_bytes"),
        "report": last,
        "trace": engine._session.runtime.take_trace(),
    }


def _of_frozen(trace: dict[str, Any] | None, chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """What the traced step moved of frozen chunks, and how fast bytes went up."""
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


def _say(system: str, text: str) -> None:
    print(f"{system}: {text}", file=sys.stderr, flush=True)


# What is expected


def _planned(row: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """What a plan for the chunks and budgets that the engine had says of its step, or why there is none."""
    from benchmark.systems.weights import build_meta_model
    from patrickstar.config import LossComputation, QuantizationType
    from patrickstar.planning.planner import Planner
    from patrickstar.planning.question import Question, Workload
    from patrickstar.planning.setting import Setting

    machine = MACHINES[args.machine or _machine_name()]
    try:
        with tempfile.TemporaryDirectory() as folder:
            build_meta_model(_shape(args)).config.save_pretrained(folder)
            workload = Workload(
                model=folder,
                batch=args.micro_batch,
                length=args.length,
                checkpointing=True,
                lora_rank=args.rank,
                quantization=QuantizationType.NF4,
                loss=LossComputation.FUSED,
            )
            setting = Setting(
                device_bytes=min(row["device_budget_bytes"], machine.gpu_bytes),
                host_bytes=min(row["host_budget_bytes"], 2**43),
                accumulation=args.batch_size // args.micro_batch,
            )
            question = Question(
                workload=workload, machine=machine, setting=setting, chunk_numel=row["chunk_numel"], clipping=1.0
            )
            case = Planner().answer(question).chosen
    except Exception as error:
        return {"machine": machine.name, "error": f"{type(error).__name__}: {error}"}
    return {
        "machine": machine.name,
        "step_seconds": case.step.seconds,
        "compute_seconds": case.step.compute_seconds,
        "stall_seconds": case.step.stall_seconds,
        "uploaded_bytes": case.step.uploaded_bytes,
        "downloaded_bytes": case.step.downloaded_bytes,
        "stashed_bytes": case.stashed_bytes,
        "num_device_quantized_chunks": case.num_device_quantized_chunks,
        "host_peak_bytes": case.host_peak_bytes,
    }


def _machine_name() -> str:
    name = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""
    return next((known for known in MACHINES if known in name.replace(" ", "")), "h200")


def format_table(result: dict[str, Any]) -> str:
    """One row per run."""
    shape = f"{result['shape']}: hidden {result['hidden']}, {result['layers']} layers"
    lines = [
        f"{shape}, LoRA of rank {result['rank']} on NF4, {result['batch']} x {result['length']} tokens per step, "
        f"{result['micro_batch']} sequences at a time; GPU {result['gpu']}; sizes in GiB",
        "{:>9}{:>8}{:>8}{:>7}{:>7}{:>7}{:>8}{:>11}{:>13}{:>7}{:>9}{:>7}{:>8}  {}".format(
            "", "step", "TFLOPS", "ratio", "GPU", "host", "up", "frozen up", "frozen down", "GB/s", "on GPU", "init",
            "plan", "all steps",
        ),
    ]  # fmt: skip
    for row in result["rows"]:
        if "error" in row:
            lines.append(f"{row['system']:>9}  {row['error']}")
            continue
        planned = row["plan"].get("step_seconds")
        lines.append(
            f"{row['system']:>9}{row['step_seconds']:8.2f}{row['model_tflops']:8.1f}{_or_none(row['ratio'], 7, 3)}"
            f"{row['device_peak_bytes'] / _GIB:7.1f}{row['host_peak_bytes'] / _GIB:7.1f}"
            f"{row['uploaded_bytes'] / _GIB:8.1f}{_or_none(row['frozen_uploaded_bytes'], 11, 1, _GIB)}"
            f"{_or_none(row['frozen_downloaded_bytes'], 13, 1, _GIB)}{_or_none(row['uploaded_gbps'], 7, 1)}"
            + "{:>9}".format(f"{row['num_device_quantized_chunks']}/{row['num_quantized_chunks']}")
            + f"{row['init_seconds']:7.1f}{_or_none(planned, 8, 2)}  "
            + " ".join(f"{seconds:.2f}" for seconds in row["seconds"])
        )
    lines.append(f"goal: a ratio of at most {result['goal']}, and no frozen chunk that comes down")
    return "\n".join(lines)


def _or_none(value: float | None, width: int, digits: int, unit: float = 1.0) -> str:
    return f"{'-':>{width}}" if value is None else f"{value / unit:{width}.{digits}f}"
