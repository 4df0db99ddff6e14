import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import benchmark.compare
import benchmark.steps
import patrickstar
from patrickstar import _C
from patrickstar.command import main as command
from patrickstar.command.flags import OLD_SPELLINGS, CommandParser, memory_size, run_reporting
from patrickstar.command.main import SUBCOMMANDS, main
from patrickstar.config import parse_config
from patrickstar.sizes import enough_size, parse_size, parse_size_with_unit, show_exactly, show_shortage, show_size

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]


def run(*words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(words)
        except SystemExit as stop:
            status = stop.code
    return status, out.getvalue(), err.getvalue()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], list(SUBCOMMANDS)),
        (["--help"], list(SUBCOMMANDS)),
        (["--version"], [patrickstar.__version__]),
        (["finetune", "--help"], ["--config FILE", "--method {full,lora,qlora}"]),
    ],
)
def test_it_starts_without_torch(words, said):
    code = """import sys
from patrickstar.command.main import main
try:
    status = main(sys.argv[1:])
except SystemExit as stop:
    status = stop.code
assert not {"torch", "transformers", "numpy", "pydantic", "yaml"} & set(sys.modules), "heavy"
sys.exit(status)"""
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in said)


def test_python_m_patrickstar_is_the_command():
    done = subprocess.run([sys.executable, "-m", "patrickstar"], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == command.overview() + "\n"
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert scripts == {"patrickstar": f"{main.__module__}:{main.__name__}"}


def test_each_subcommand_has_a_line_and_a_help():
    _, overview, _ = run()
    for name, subcommand in SUBCOMMANDS.items():
        assert f"  {name}" in overview and subcommand.does in overview
        status, out, _ = run(name, "--help")
        assert status == 0 and out.startswith(f"usage: patrickstar {name} ")


def test_a_slip_is_answered_with_what_was_meant():
    assert run("chekpoint") == (2, "", "patrickstar: there is no subcommand 'chekpoint'; did you mean checkpoint?\n")
    assert "there are plan, finetune, run, spot, profile, env" in run("xyz")[2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "--model", "4.3b", "--device-memory", "24"], "24 what? 24GiB or 24GB"),
        (["plan"], "the following arguments are required: --model"),
        (["plan", "--model", "4.3b", "--no-such-flag"], "there is no flag --no-such-flag"),
        (["plan", "--model", "no/such"], "--model is 'no/such'; give"),
        (["finetune", "--config", "nowhere.yaml"], "--config nowhere.yaml cannot be read"),
        (["profile", "nowhere.py"], "there is no script nowhere.py"),
        (["run", "nowhere.py"], "there is no script nowhere.py"),
        (["run", "--device-memory", "24", "nowhere.py"], "24 what? 24GiB or 24GB"),
        (["config", "check", "nowhere.json"], "there is no file nowhere.json"),
        (["checkpoint", "list", "nowhere"], "there is no folder nowhere"),
        (["checkpoint", "inspect", "nowhere"], "nowhere has no file 'latest'"),
        (["checkpoint", "verify", "nowhere"], "nothing was saved there yet"),
        (["checkpoint"], "the following arguments are required"),
        (["bench", "--jsn"], "there is no flag --jsn; did you mean --json?"),
    ],
)
def test_errors_are_one_line_and_status_2(words, said):
    status, out, err = run(*words)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert said in err
    assert err.startswith(f"patrickstar {words[0]}")


def test_a_defect_of_ours_keeps_its_traceback():
    def fail():
        raise RuntimeError("a defect")

    with pytest.raises(RuntimeError, match="a defect"):
        run_reporting("patrickstar x", fail)


def parser():
    made = CommandParser("x")
    made.add_argument("--batch-size", type=int, default=16, help="sequences")
    made.add_argument("--device-memory", type=memory_size, required=True)
    made.add_argument("--clip", type=float, default=0.0)
    made.add_argument("--also")
    return made


def test_old_spellings_are_accepted_and_not_shown():
    options = parser().parse_args(["--batch", "4", "--gpu-mem=24GiB", "--clipping", "1"])
    assert vars(options) == {"batch_size": 4, "device_memory": 24 * 2**30, "clip": 1.0, "also": None}
    shown = parser().format_help()
    assert not [old for old in OLD_SPELLINGS if f"{old} " in shown]


def test_old_spellings_of_flags_that_a_command_lacks_are_left_to_whom_they_are_for(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv[1:])")
    status, out, _ = run("profile", "--output", str(tmp_path), str(script), "--batch", "3", "--gpu-mem", "2")
    assert status == 1  # no step was profiled
    assert out == "['--batch', '3', '--gpu-mem', '2']\n"


def test_help_shows_defaults():
    shown = parser().format_help()
    assert "sequences (default: 16)" in shown and "default: 0.0" in shown
    assert "None" not in shown


def test_every_flag_of_plan_and_the_benchmarks_is_of_the_vocabulary():
    steps = CommandParser("steps")
    benchmark.steps.add_arguments(steps)
    shown = [run("plan", "--help")[1], steps.format_help(), help_of(benchmark.compare.parse_arguments)]
    for text in shown:
        words = text.replace("[", " ").replace("]", " ").split()
        assert "--batch-size" in words and "--device-memory" in words and "--clip" in words
        assert not set(words) & set(OLD_SPELLINGS), text


def help_of(parse):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
        parse(["--help"])
    return out.getvalue()


def test_config_check_and_schema(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"bf16": {"enabled": True}, "device_memory": "24GiB", "wall_clock_breakdown": True}))
    status, out, _ = run("config", "check", str(path), "--for", "initialize")
    assert status == 0
    assert f"device_memory = {24 * 2**30}" in out
    status, out, _ = run("config", "check", str(path), "--for", "initialize", "--json")
    assert json.loads(out)["keys"]["bf16.enabled"] is True
    path.write_text('{"devise_memory": 1, "gradient_clipping": "much"}')
    status, out, err = run("config", "check", str(path))
    assert status == 1 and not out
    assert "devise_memory" in err and "device_memory" in err and "gradient_clipping is" in err
    schema = json.loads(run("config", "schema")[1])
    assert "device_memory" in schema["properties"]
    assert json.loads(run("config", "--json-schema")[1]) == schema


def test_bench_measures_what_the_planner_needs():
    status, out, _ = run("bench", "--json")
    found = json.loads(out)
    assert status == 0
    assert found["host_copy_gbps"] > 0 and found["host_adam_gparams"] > 0 and found["host_threads"] >= 1
    assert (found["gpu"] is None) == (found["upload_gbps"] is None)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("24GiB", 24 * 2**30),
        ("128G", 128 * 2**30),
        ("24 GB", 24 * 10**9),
        ("1.5gib", 3 * 2**29),
        ("500MB", 500 * 10**6),
        ("2T", 2 * 2**40),
        ("4096B", 4096),
    ],
)
def test_sizes_are_read(text, num_bytes):
    assert parse_size(text) == parse_size_with_unit(text) == num_bytes
    assert parse_config({"device_memory": text}).device_memory == num_bytes


@pytest.mark.parametrize("text", ["", "much", "24 gigs", "-3GiB", "1e9", "GiB", "3 G iB", "٣GiB"])
def test_other_texts_are_refused(text):
    assert parse_size(text) is None
    with pytest.raises(ValueError, match="is no amount of memory; give one such as 24GiB"):
        parse_size_with_unit(text)


def test_a_number_alone_is_asked_for_its_unit_on_a_command_line_and_is_bytes_in_a_configuration():
    with pytest.raises(ValueError, match=r"^24 what\? 24GiB or 24GB$"):
        parse_size_with_unit("24")
    with pytest.raises(ValueError, match=r"^25769803776 what\? 25769803776B$"):
        parse_size_with_unit(" 25769803776 ")
    assert parse_config({"device_memory": 4096}).device_memory == parse_size("4096") == 4096


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (948 * 2**30, "948 GiB"),
        (24 * 2**30, "24 GiB"),
        (23.16 * 2**30, "23.2 GiB"),
        (1.518 * 2**20, "1.52 MiB"),
        (12, "12 bytes"),
        (20 * 2**40, "20 TiB"),
        (1.5 * 2**40, "1536 GiB"),
        (0, "0 bytes"),
    ],
)
def test_sizes_are_shown(num_bytes, text):
    assert show_size(num_bytes) == text


@given(st.integers(1, 2**50))
def test_each_shown_size_is_read_by_every_command_and_key(num_bytes):
    shown = show_size(num_bytes)
    read = parse_size_with_unit(shown)
    assert read == parse_config({"device_memory": shown}).device_memory == pytest.approx(num_bytes, rel=0.006)
    exact = show_exactly(num_bytes)
    assert exact == (shown if read == num_bytes else f"{shown} ({num_bytes} bytes)")


@given(st.integers(0, 2**53) | st.sampled_from([*range(2048), *(2**k * 5 // 4 for k in range(53))]))
def test_the_core_shows_sizes_as_python_does(num_bytes):
    assert _C.show_exactly(num_bytes) == show_exactly(num_bytes)
    enough = enough_size(num_bytes)
    assert _C.show_enough(num_bytes) == (enough if parse_size(enough) == num_bytes else f"{enough} ({num_bytes} bytes)")


@given(st.integers(1, 2**50))
def test_a_size_to_paste_is_enough(num_bytes):
    pasted = parse_size_with_unit(enough_size(num_bytes))
    assert num_bytes <= pasted <= max(num_bytes * 1.01, num_bytes + 2**11)


def test_what_is_short_is_said_in_one_unit():
    assert show_shortage(948 * 2**30, 582 * 2**30) == "needs 948 GiB, has 582, short by 366"
    assert show_shortage(int(2.5 * 2**30), 2**30) == "needs 2.5 GiB, has 1, short by 1.5"
    assert show_shortage(2**30 + 5, 2**30) == "needs 1 GiB (1073741829 bytes), has 1073741824 bytes, short by 5 bytes"


@given(st.integers(1, 2**45), st.integers(0, 2**45))
def test_a_shortage_is_never_understated(needed, there):
    text = show_shortage(needed, there)
    rounded = re.fullmatch(r"needs (\S+) (\w+), has (\S+), short by (\S+)", text)
    if rounded is None:
        found = re.fullmatch(r"needs .+?(?: \((\d+) bytes\))?, has (\d+) bytes, short by (\d+) bytes", text)
        assert int(found[1] or needed) == needed and int(found[2]) == there and int(found[3]) == max(needed - there, 0)
        return
    scale = parse_size(f"1{rounded[2]}")
    assert float(rounded[1]) * scale >= needed
    assert float(rounded[3]) * scale <= there
    assert float(rounded[4]) * scale >= needed - there - 1e-6 * scale
