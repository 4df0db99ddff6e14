"""``python -m patrickstar.checkpoint verify DIRECTORY``: whether every byte of the checkpoints there is right."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from patrickstar import _C
from patrickstar.checkpoint.errors import CheckpointError
from patrickstar.checkpoint.folder import find_checkpoint, latest_tag, tags
from patrickstar.checkpoint.manifest import MANIFEST_NAME
from patrickstar.checkpoint.reader import Checkpoint


def main(arguments: list[str] | None = None) -> int:
    """Prints a line per checkpoint; returns 1 when one is damaged or there is none."""
    parser = argparse.ArgumentParser(prog="python -m patrickstar.checkpoint", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    verify = commands.add_parser("verify", help="read every byte and compare its checksum")
    verify.add_argument("directory", type=Path, help="what save_checkpoint was given, or the folder of one checkpoint")
    verify.add_argument("--tag", help="only this one (default: all that are there)")
    verify.add_argument("--threads", type=int, default=_C.num_available_cpus(), help="files read at a time")
    options = parser.parse_args(arguments)
    try:
        paths = _paths(options.directory, options.tag)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1
    damaged = [path for path in paths if not _verify(path, max(1, options.threads))]
    return 1 if damaged or not paths else 0


def _paths(directory: Path, tag: str | None) -> list[Path]:
    if tag is not None or (directory / MANIFEST_NAME).is_file():
        return [find_checkpoint(directory, tag)]
    find_checkpoint(directory, None)  # what `latest` names is there
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
    print(f"{path}: every byte is right ({len(files)} files, {num_bytes} bytes, {num_bytes / seconds / 1e9:.1f} GB/s)")
    return True


if __name__ == "__main__":
    sys.exit(main())
