"""A folder of earlier plans: a similar run plans from its first step on.

An entry is a file of two lines: the SHA-256 of the second line, and the plan as JSON. Its name is a digest of
everything that makes two runs alike (:func:`key_of`). Unreadable or damaged entries count as missing, and a plan that
cannot be written is not kept. Neither is an error: a run without an entry plans after its first step.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from patrickstar.planning.step_plan import Plan
from patrickstar.sizes import show_size

VARIABLE = "PATRICKSTAR_PLAN_CACHE"
"""Environment variable used if the configuration is silent: ``0``, ``1`` or a folder."""

logger = logging.getLogger("patrickstar")

_ENTRY = re.compile(r"[0-9a-f]{64}\.json")
_UNFINISHED = ".unfinished"
_SECONDS_TO_FINISH = 3600


def key_of(facts: Mapping[str, Any]) -> str:
    """Returns the entry's name for ``facts``: JSON values, in any order of keys."""
    text = json.dumps(facts, sort_keys=True, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def cache_folder(setting: bool | str | None) -> Path | None:
    """Returns the folder for the configuration's ``plan_cache``; None: no plans are kept."""
    if setting is None:
        said = os.environ.get(VARIABLE) or "1"
        setting = {"0": False, "1": True}.get(said, said)
    if isinstance(setting, str):
        return Path(setting)
    return _default_folder() if setting else None


def _default_folder() -> Path | None:
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if base.is_absolute():  # the XDG specification says to ignore relative paths
        return base / "patrickstar"
    try:
        return Path.home() / ".cache" / "patrickstar"
    except RuntimeError:  # a user without a home
        return None


class PlanCache:
    """The plans in a folder. Processes may share it: entries are written atomically, and the last writer wins.

    Args:
        folder: created when the first plan is saved.
        most_entries: most plans kept; the least recently used are removed.
        most_bytes: most bytes of all plans together.
    """

    def __init__(self, folder: Path, most_entries: int = 64, most_bytes: int = 64 * 2**20):
        self.folder = folder
        self._most_entries = most_entries
        self._most_bytes = most_bytes

    def load(self, key: str) -> Plan | None:
        """Returns the plan saved under ``key``, or None."""
        path = self._path(key)
        try:
            digest, _, text = path.read_text(encoding="utf-8").partition("\n")
            if digest != _digest(text):
                raise ValueError(f"{path} is damaged")
            plan = Plan.from_json(text, str(path))
            os.utime(path)  # used
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.debug("a kept plan is not used: %s", error)
            return None
        return plan

    def save(self, key: str, plan: Plan) -> None:
        """Saves ``plan`` under ``key``, replacing an earlier one."""
        text = plan.to_json()
        entry = f"{_digest(text)}\n{text}".encode()
        if len(entry) > self._most_bytes:
            logger.debug(
                "a plan of %s is not kept: all may take %s", show_size(len(entry)), show_size(self._most_bytes)
            )
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._write(self._path(key), entry)
            self._make_room()
        except OSError as error:
            logger.debug("a plan is not kept: %s", error)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def _write(self, path: Path, entry: bytes) -> None:
        with tempfile.NamedTemporaryFile(suffix=_UNFINISHED, dir=self.folder, delete=False) as file:
            unfinished = Path(file.name)
            try:
                file.write(entry)
                file.flush()
                unfinished.replace(path)
            except BaseException:
                unfinished.unlink(missing_ok=True)
                raise

    def _make_room(self) -> None:
        """Removes entries beyond the limits, and files of killed writers."""
        entries = []
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process removed it
                status = path.stat()
                if path.name.endswith(_UNFINISHED) and time.time() - status.st_mtime > _SECONDS_TO_FINISH:
                    path.unlink()
                elif _ENTRY.fullmatch(path.name):
                    entries.append((status.st_mtime_ns, status.st_size, path))
        num_bytes = 0
        for index, (_used, size, path) in enumerate(sorted(entries, reverse=True)):
            num_bytes += size
            if index >= self._most_entries or num_bytes > self._most_bytes:
                path.unlink(missing_ok=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
