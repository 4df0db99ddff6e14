import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import sanitize  # noqa: E402

RACE = """==================
WARNING: ThreadSanitizer: data race (pid=7)
  Write of size 8 at 0x7b by thread T1:
    #0 work /home/a/csrc/common/work_queue.cpp:{line} (_C.so+0x1)

SUMMARY: ThreadSanitizer: data race
==================
"""
OVERFLOW = "/home/a/csrc/memory/host_arena.cpp:9:3: runtime error: signed integer overflow: 1 + 2\n    #0 0x1 in f\n"
CRASH = "=================================\n==7==ERROR: AddressSanitizer: SEGV on x\n    #0 f\n"


@pytest.mark.parametrize(
    ("files", "begins"),
    [
        ({}, []),
        ({"thread.1": ""}, []),
        ({"thread.1": RACE + RACE, "thread.2": RACE}, ["WARNING: ThreadSanitizer: data race"] * 3),
        (
            {"address.1": CRASH, "undefined.1": OVERFLOW + OVERFLOW},
            ["7==ERROR: AddressSanitizer: SEGV", *["/home/a"] * 2],
        ),
        ({"thread.1": "FATAL: ThreadSanitizer: unexpected memory mapping\n"}, ["FATAL"]),
    ],
)
def test_all_reports_are_found(tmp_path, files, begins):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    reports = sanitize.read_reports(tmp_path)
    assert len(reports) == len(begins)
    assert all(report.startswith(begin) for report, begin in zip(reports, begins, strict=True)), reports


def test_reports_of_one_place_are_shown_once(capsys):
    races = [RACE.format(line=1), RACE.format(line=1).replace("pid=7", "pid=8"), RACE.format(line=2)]
    sanitize.show([text.strip("=\n") for text in races])
    shown = capsys.readouterr().out
    assert shown.count("2 like this:") == 1 and shown.count("1 like this:") == 1


def test_an_unknown_sanitizer_is_refused():
    done = subprocess.run(
        [sys.executable, "-c", "import patrickstar_recipe"],
        env=os.environ | {"PATRICKSTAR_SANITIZE": "memory", "PYTHONPATH": str(ROOT / "build_backend")},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "PATRICKSTAR_SANITIZE is 'memory'; give address or thread" in done.stderr
