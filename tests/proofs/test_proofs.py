import json
import re
import shutil
import subprocess
import sys

import pytest

from proofs import results, soak, table
from proofs.__main__ import NAMES
from proofs.cases import Case, Planted, Proof, replaced
from proofs.planted_races import BUGS, SIMULATION
from proofs.runner import Options, holds, run
from tests.distributed import ROOT, run_python

BRIEF = {  # a case, points of it
    "io": ("verify", 6),
    "memory": ("training, settled, once", 6),
    "crash": ("removals", 4),
    "interrupts": ("instructions, roomy", 2),
    "flips": ("each byte, found by verify", 20),
    "soak": ("engines that come and go", 1),
}


@pytest.mark.parametrize("name", BRIEF)
def test_a_few_points(name, tmp_path):
    case, points = BRIEF[name]
    arguments = [name, "--minutes", "0.05", "--only", case, "--points", points, "--planted", 1, "--out", tmp_path]
    done = run_python("-m", "proofs", *arguments)
    result = json.loads((tmp_path / f"{name}.json").read_text())
    told = [line for case in result["cases"] for line in case["violations"] if "show nothing" not in line]
    assert not told and result["points"] >= 1, done.stdout + done.stderr
    assert result["holds"] == (done.returncode == 0) == (name != "soak")  # one round of a soak shows nothing
    assert all(planted["found"] for planted in result["planted"])


def proof_of(points, *planted, least_points=1):
    case = Case("a case", points, least_points)
    return Proof("trial", "A claim.", "points", [case], planted, quiet_seconds=0.5)


def run_trial(points, *planted, **options):
    found, tried = run(proof_of(points, *planted, **options), Options(minutes=0.02, jobs=1))
    return found, tried, holds(found, tried)


def test_a_proof_holds():
    class Code:
        answer = 42

    def points(setting):
        for _ in range(3):
            yield None if Code.answer == 42 else f"the answer is {Code.answer}"

    bug = Planted("a bug", "a case", lambda: replaced(Code, "answer", 41))
    (planted,), (case,), well = run_trial(points, bug)
    assert well and case["points"] == 3 and case["all"] and not case["violations"]
    assert planted["found"].startswith("the answer is 41")


def violated(setting):
    yield "a bit is wrong"


def raising(setting):
    yield None
    raise AssertionError("a bit is wrong")


def crashing(setting):
    setting.note("the second point")
    yield None
    import os

    os.abort()


def hanging(setting):
    import time

    setting.note("the first point")
    time.sleep(60)
    yield None


@pytest.mark.parametrize(
    ("points", "told"),
    [
        (violated, "a bit is wrong"),
        (raising, "AssertionError: a bit is wrong"),
        (crashing, r"the process ended by SIGABRT \[the second point\]"),
        (hanging, r"no end after .* \[the first point\]"),
    ],
)
def test_a_proof_fails(points, told):
    _, (case,), well = run_trial(points)
    assert not well and re.match(told, case["violations"][0])


def test_a_proof_fails_without_a_bug_or_a_point():
    def points(setting):
        yield None

    def mistaken(setting):
        yield None
        raise NameError("the proof's own mistake")

    for case in (points, mistaken):
        found, _, well = run_trial(case, Planted("a bug", "a case", lambda: replaced(Case, "name", "other")))
        assert not found[0]["found"] and not well
    assert not holds([], [{"points": 0, "violations": []}])


def test_a_proof_of_few_points_fails():
    def points(setting):
        yield None

    _, (case,), well = run_trial(points, least_points=2)
    assert not well and case["violations"] == ["1 points show nothing; 2 are needed: give more minutes"]


def test_a_leak_grows_and_a_jump_does_not():
    def told(resident):
        steady = {"descriptors": 7, "threads": 2, "mappings": 900}
        return soak.growth([{**steady, "resident KiB": resident(number)} for number in range(90)])

    assert told(lambda number: 3e5) is told(lambda number: 3e5 + 4000 * (number > 60)) is None
    assert "resident KiB by 10.00 a round" in told(lambda number: 3e5 + 10 * number)
    assert "resident KiB by" in told(lambda number: 3e5 + 132 * (number // 12))  # blocks of an allocator


def test_bugs_of_order_are_planted_in_the_sources_that_are_there(tmp_path):
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    for edit in (*SIMULATION, *BUGS):
        edit.apply(tmp_path / "csrc")


def test_the_schedulers_files_compile(tmp_path):
    scheduler = ROOT / "proofs" / "scheduler"
    (tmp_path / "common").mkdir()
    for file in scheduler.iterdir():
        shutil.copy2(file, tmp_path / "common")
    (tmp_path / "main.cpp").write_text(PROGRAM)
    sources = [tmp_path / "main.cpp", *(tmp_path / "common").glob("*.cpp")]
    program = tmp_path / "program"
    subprocess.run(
        ["c++", "-std=c++17", f"-I{tmp_path}", f"-I{ROOT / 'csrc'}", "-pthread", "-o", program, *sources], check=True
    )

    def orders(*seeds):
        return subprocess.run([program, *map(str, seeds)], capture_output=True, text=True, check=True).stdout.split()

    once = orders(*range(64))
    assert once == orders(*range(64))
    assert len(set(once)) > 8
    assert all(order.index("a") < order.index("b") and order.index("c") < order.index("d") for order in once)


PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include <string>
#include "common/work_queue.h"
extern "C" void ps_schedule(uint64_t seed);
int main(int count, char** arguments) {
  for (int i = 1; i < count; ++i) {
    ps_schedule(std::strtoull(arguments[i], nullptr, 10));
    std::string order;
    patrickstar::WorkQueue one, other;
    const auto noting = [&order](char name) { return [&order, name] { order += name; }; };
    for (char name : {'a', 'b', 'x'}) one.submit(noting(name));
    for (char name : {'c', 'd', 'y'}) other.submit(noting(name));
    one.drain();
    other.drain();
    std::puts(order.c_str());
  }
}
"""


def test_the_page_has_the_recorded_results():
    page = table.PAGE.read_text()
    assert table.BEGIN + table.text() + table.END in page
    recorded = results.read(table.RECORDED)
    assert {result["proof"] for result in recorded} == set(NAMES) == set(table.ORDER)
    for result in recorded:
        assert result["holds"] and all(planted["found"] for planted in result["planted"]), result["proof"]


def test_the_command_line_lists_all_proofs():
    done = subprocess.run([sys.executable, "-m", "proofs", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert all(name in done.stdout for name in (*NAMES, "--minutes", "table"))
