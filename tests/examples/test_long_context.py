from pathlib import Path

import pytest

from tests.example_runs import figure, imported_example, run_example

TINY = ("--seq-len", 256, "--steps", 4, "--hidden", 32, "--vocab-size", 300)


@pytest.fixture(scope="module")
def example():
    with imported_example("long_context") as module:
        yield module


@pytest.mark.slow
def test_two_processes_have_the_losses_of_one(example, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    flags = [*map(str, TINY), "--text", str(tmp_path / "text.txt"), "--output-dir", str(tmp_path / "output")]
    assert example.main(flags) == 0
    one = capsys.readouterr().out
    assert "256 on each of 1 processes" in one and "the same to" not in one
    two = run_example("long_context.py", *flags, ranks=2)
    assert two.returncode == 0, two.stderr
    assert "128 on each of 2 processes" in two.stdout
    assert figure(two.stdout, r"losses-1.json: the same to ([0-9.e+-]+)") < 1e-6
    losses = [figure(one, rf"step {step}: loss ([0-9.]+)") for step in (1, 4)]
    assert losses[1] < losses[0]


def test_the_whole_reference_is_one_document(example, tmp_path):
    args = example.parse_arguments(["--output-dir", str(tmp_path), "--vocab-size", "300"])
    assert len(example.read_document(args)) > 200_000


def test_what_cannot_be_trained_is_refused(example, tmp_path, capsys):
    (tmp_path / "short.txt").write_text("too short", encoding="utf-8")
    flags = ["--output-dir", str(tmp_path), "--text", str(tmp_path / "short.txt")]
    assert example.main(flags) == 2
    assert "--seq-len is 4096; give less" in capsys.readouterr().err
    assert example.main(["--heads", "3", "--output-dir", str(tmp_path)]) == 2
    assert "give a multiple of twice the heads" in capsys.readouterr().err
