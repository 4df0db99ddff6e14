"""``patrickstar checkpoint``: inspects and converts checkpoints without a model or an engine."""

from __future__ import annotations

import argparse
import collections
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from patrickstar import _C
from patrickstar.checkpoint import Checkpoint, CheckpointError
from patrickstar.checkpoint.export import DEFAULT_MAX_FILE_BYTES
from patrickstar.checkpoint.folder import find_checkpoint, latest_tag, tags
from patrickstar.checkpoint.foreign import ForeignCheckpoint, ForeignFolder, find_foreign, open_checkpoint
from patrickstar.checkpoint.manifest import MANIFEST_NAME, StoredTensor
from patrickstar.checkpoint.runs import RunFormat, export_stored_run
from patrickstar.checkpoint.shards import STATE_KINDS, TensorShard
from patrickstar.checkpoint.stored_source import StoredSource, export_checkpoint, merge
from patrickstar.command.flags import CommandParser, at_least_1, memory_size, run_reporting
from patrickstar.sizes import show_size
from patrickstar.state.file_tensors import FileTensors

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "stored": None}
_WEIGHTS = "weights"
_STATES = {"exp_avg": "momentum", "exp_avg_sq": "variance", "momentum_buffer": "momentum"}


def main(arguments: Sequence[str] | None = None, prog: str = "python -m patrickstar.checkpoint") -> int:
    """Returns the exit status: 0; 1 for a damaged or incomplete checkpoint; 2 for a wrong argument."""
    options = _make_parser(prog).parse_args(arguments)
    return run_reporting(prog, functools.partial(options.run, options))


def _make_parser(prog: str) -> CommandParser:
    parser = CommandParser(prog, "Looks at checkpoints, and makes other files of them, without a model or a GPU.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{list,inspect,verify,export,merge}")

    listing = commands.add_parser("list", help="name the checkpoints of a folder: step, size, complete or not")
    listing.add_argument("directory", type=Path, help="what save_checkpoint was given, or the folder of one checkpoint")
    listing.set_defaults(run=_list)

    inspect = commands.add_parser("inspect", help="show what one holds: parameters, states, ranks, metadata")
    _add_checkpoint(inspect)
    inspect.set_defaults(run=_inspect)

    verify = commands.add_parser("verify", help="read every byte and compare its checksum")
    verify.add_argument("directory", type=Path, help="what save_checkpoint was given, or the folder of one checkpoint")
    verify.add_argument("--tag", help="only this one; without it all that are there")
    verify.add_argument("--threads", type=at_least_1, default=_C.num_available_cpus(), help="files read at a time")
    verify.set_defaults(run=_verify_all)

    export = commands.add_parser("export", help="write its weights, or the run, in another program's format")
    _add_checkpoint(export)
    export.add_argument("target", type=Path, help="a new folder")
    export.add_argument(
        "--format", choices=[_WEIGHTS, *(form.value for form in RunFormat)], default=_WEIGHTS,
        help="weights: a folder that Hugging Face reads (default); with optimizer states: torch.distributed.checkpoint "
        "(dcp), DeepSpeed's universal checkpoint",
    )  # fmt: skip
    export.add_argument("--dtype", choices=_DTYPES, help="of the weights' floating point parameters (default: fp32)")
    export.add_argument(
        "--max-file-size", type=memory_size, metavar="SIZE", help="of the weights in one file (default: 5GB)"
    )
    export.add_argument(
        "--config", type=Path, metavar="FILE", help="a config.json to put beside the weights, which names their form"
    )
    export.set_defaults(run=_export)

    merging = commands.add_parser("merge", help="write it as one rank would have saved it: whole tensors")
    _add_checkpoint(merging)
    merging.add_argument("target", type=Path, help="the folder of the new checkpoint")
    merging.set_defaults(run=_merge)
    for command in (listing, inspect):
        command.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="what save_checkpoint was given, or the folder of one checkpoint")
    parser.add_argument("--tag", help="which checkpoint of the folder; without it the latest")


# list


def _list(options: argparse.Namespace) -> int:
    directory = options.directory
    if not directory.is_dir():
        raise ValueError(f"there is no folder {directory}")
    is_one = (directory / MANIFEST_NAME).is_file()
    found = [_summary(directory)] if is_one else [_summary(directory / tag) for tag in tags(directory)]
    latest = None if is_one else _latest(directory)
    if options.json:
        print(json.dumps({"latest": latest, "checkpoints": found}, indent=1))
    elif not found:
        print(f"{directory} has no checkpoint")
    else:
        width = max(len("tag"), *(len(item["tag"]) for item in found))
        print(f"{'tag':<{width}}   {'step':>8}   {'size':>10}   ranks   state")
        for item in sorted(found, key=lambda item: (item["step"] is None, item["step"])):
            step = "?" if item["step"] is None else item["step"]
            ranks = "?" if item["ranks"] is None else item["ranks"]
            state = "complete" if item["complete"] else f"NOT COMPLETE: {item['problem']}"
            mark = "   <- latest" if item["tag"] == latest else ""
            print(f"{item['tag']:<{width}}   {step:>8}   {show_size(item['bytes']):>10}   {ranks:>5}   {state}{mark}")
    return 0 if all(item["complete"] for item in found) else 1


def _latest(directory: Path) -> str | None:
    try:
        return latest_tag(directory)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return None


def _summary(path: Path) -> dict[str, Any]:
    """Step, size and completeness of a checkpoint; reads only sizes and headers of its files."""
    found: dict[str, Any] = {"tag": path.name, "step": None, "ranks": None, "complete": False, "problem": None}
    found["bytes"] = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    try:
        with Checkpoint(path) as checkpoint:
            found |= {"step": _step(checkpoint), "ranks": checkpoint.manifest.num_ranks}
            checkpoint.check_files()
    except CheckpointError as error:
        return found | {"problem": str(error)}
    return found | {"complete": True}


def _step(checkpoint: Checkpoint | ForeignCheckpoint) -> int | None:
    step = checkpoint.manifest.state.get("num_steps")
    return step if isinstance(step, int) else None


# inspect


def _inspect(options: argparse.Namespace) -> int:
    with open_checkpoint(options.directory, options.tag) as checkpoint:
        found = _description(checkpoint)
    print(json.dumps(found, indent=1) if options.json else _as_text(found))
    return 0


def _description(checkpoint: Checkpoint | ForeignCheckpoint) -> dict[str, Any]:
    manifest, state = checkpoint.manifest, checkpoint.manifest.state
    held: dict[str, list[str]] = collections.defaultdict(list)
    for stored in manifest.tensors.values():
        if stored.kind in STATE_KINDS:
            held[stored.name].append(_STATES[stored.kind])
    values = [stored for stored in manifest.tensors.values() if stored.kind not in (*STATE_KINDS, "rng")]
    counts = state.get("step_counts") or {}
    return {
        "path": str(checkpoint.path),
        "origin": checkpoint.origin,
        "step": _step(checkpoint),
        "ranks": manifest.num_ranks,
        "bytes": sum(file.num_bytes for file in manifest.files.values()),
        "files": {name: file.num_bytes for name, file in manifest.files.items()},
        "num_parameters": sum(stored.numel for stored in values if stored.kind != "buffer"),
        "parameters": [_tensor(stored, held, counts) for stored in values if stored.kind != "buffer"],
        "buffers": [_tensor(stored, held, counts) for stored in values if stored.kind == "buffer"],
        "generators": [stored.name for stored in manifest.tensors.values() if stored.kind == "rng"],
        "groups": [{"params": len(group["params"]), "options": group["options"]} for group in state.get("groups", ())],
        "loss_scaler": state.get("loss_scaler"),
        "lr_scheduler": state.get("lr_scheduler"),
        "client_state": state.get("client_state"),
    }


def _tensor(stored: StoredTensor, held: dict[str, list[str]], counts: dict[str, int]) -> dict[str, Any]:
    return {
        "name": stored.name,
        "kind": stored.kind,
        "dtype": str(stored.dtype).removeprefix("torch."),
        "shape": list(stored.shape),
        "states": held.get(stored.name, []),
        "updates": counts.get(stored.name, 0),
        "shards": len(stored.shards),
    }


def _as_text(found: dict[str, Any]) -> str:
    step = "?" if found["step"] is None else found["step"]
    stored = f"{show_size(found['bytes'])} in {len(found['files'])} files of {found['ranks']} ranks"
    lines = [
        f"{found['path']}: step {step}, {found['num_parameters']:,} parameters, "
        f"{stored if found['files'] else found['origin']}",
    ]
    for what in ("parameters", "buffers"):
        tensors = found[what]
        if not tensors:
            continue
        width = max(len(tensor["name"]) for tensor in tensors)
        lines.append(f"{what}: {len(tensors)}")
        for tensor in tensors:
            shape = "x".join(map(str, tensor["shape"])) or "scalar"
            parts = [f"  {tensor['name']:<{width}}", f"{tensor['kind']:<7}", f"{tensor['dtype']:<8}", f"{shape:<14}"]
            if tensor["states"]:
                parts.append(f"{', '.join(tensor['states'])}, {tensor['updates']} updates")
            lines.append("  ".join(parts).rstrip())
    for index, group in enumerate(found["groups"]):
        lines.append(f"group {index}: {group['params']} parameters, {json.dumps(group['options'])}")
    for key in ("loss_scaler", "lr_scheduler", "client_state"):
        if found[key]:
            lines.append(f"{key}: {json.dumps(found[key])}")
    lines.append(f"random number generators: {', '.join(found['generators']) or 'none'}")
    return "\n".join(lines)


# verify, export, merge


def _verify_all(options: argparse.Namespace) -> int:
    foreign = find_foreign(options.directory, options.tag)
    if foreign is not None:
        return 0 if _reads(foreign) else 1
    paths = _paths(options.directory, options.tag)
    damaged = [path for path in paths if not _verify(path, options.threads)]
    return 1 if damaged or not paths else 0


def _reads(foreign: ForeignFolder) -> bool:
    """True if every tensor of another program's checkpoint can be read. Its files have no checksums to compare."""
    try:
        with foreign.open() as checkpoint:
            for shard in StoredSource(checkpoint).shards():
                shard.read()
            print(f"{checkpoint.path}: {checkpoint.origin}; every tensor can be read, there are no checksums")
    except CheckpointError as error:
        print(f"{foreign.path}: NOT READABLE\n{error}")
        return False
    return True


def _paths(directory: Path, tag: str | None) -> list[Path]:
    if tag is not None or (directory / MANIFEST_NAME).is_file():
        return [find_checkpoint(directory, tag)]
    find_checkpoint(directory, None)  # checks that the target of `latest` exists
    print(f"latest is {latest_tag(directory)}")
    return [directory / found for found in tags(directory)]


def _verify(path: Path, num_threads: int) -> bool:
    try:
        with Checkpoint(path) as checkpoint:
            seconds = checkpoint.verify(num_threads)
            files = checkpoint.manifest.files
    except CheckpointError as error:
        print(f"{path}: DAMAGED\n{error}")
        return False
    num_bytes = sum(file.num_bytes for file in files.values())
    rate = num_bytes / seconds / 1e9
    print(f"{path}: every byte is right ({len(files)} files, {show_size(num_bytes)}, {rate:.1f} GB/s)")
    return True


def _export(options: argparse.Namespace) -> int:
    if options.format != _WEIGHTS:
        return _export_run(options)
    texts = {"config.json": options.config.read_text(encoding="utf-8")} if options.config else {}
    dtype = _DTYPES[options.dtype or "fp32"]
    max_file_bytes = options.max_file_size or DEFAULT_MAX_FILE_BYTES
    with open_checkpoint(options.directory, options.tag) as checkpoint:
        form = functools.partial(_as_files, _model_of(options.config) if options.config else None, dtype)
        path = export_checkpoint(checkpoint, options.target, dtype, max_file_bytes, texts, form)
    files = sorted(file for file in path.iterdir() if file.suffix == ".safetensors")
    print(f"{path}: {show_size(sum(file.stat().st_size for file in files))} in {len(files)} files")
    return 0


def _export_run(options: argparse.Namespace) -> int:
    for flag in ("dtype", "max_file_size", "config"):
        if getattr(options, flag) is not None:
            raise ValueError(
                f"--{flag.replace('_', '-')} is of --format {_WEIGHTS}, and {options.format} has float32 tensors, each "
                "as it is; leave it out"
            )
    with open_checkpoint(options.directory, options.tag) as checkpoint:
        path = export_stored_run(checkpoint, options.target, RunFormat(options.format))
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    print(f"{path}: {show_size(size)}, {options.format}")
    _print_left_out(checkpoint)
    return 0


def _model_of(config: Path) -> nn.Module | None:
    """The model of transformers that ``config`` names, on the meta device; None if it names none."""
    try:
        import transformers

        known = transformers.AutoConfig.from_pretrained(config)
    except (ImportError, OSError, ValueError):
        return None
    kind = getattr(transformers, (known.architectures or [""])[0], None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        return None
    with torch.device("meta"):
        return kind(known)


def _as_files(model: nn.Module | None, dtype: torch.dtype | None, shards: list[TensorShard]) -> list[TensorShard]:
    """The tensors as ``save_pretrained`` writes those of ``model``; as they are if they are another's."""
    held = {} if model is None else {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if any(held.get(shard.name) != tuple(shard.shape) for shard in shards):
        return shards
    return FileTensors(model, {shard.name: shard.shape for shard in shards}).made_of(shards, dtype)


def _merge(options: argparse.Namespace) -> int:
    with open_checkpoint(options.directory, options.tag) as checkpoint:
        path = merge(checkpoint, options.target)
    print(f"{path}: {checkpoint.origin}, as one rank saves it")
    _print_left_out(checkpoint)
    return 0


def _print_left_out(checkpoint: Checkpoint | ForeignCheckpoint) -> None:
    if isinstance(checkpoint, ForeignCheckpoint):
        print(checkpoint.left_out(1))


if __name__ == "__main__":
    sys.exit(main())
