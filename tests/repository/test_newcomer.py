import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import newcomer  # noqa: E402

PAGE = """# Page

```bash
# a remark
mkdir inner && cd inner
export WORD=one
echo $WORD \\
  two
cat <<END
$PWD
END
```

```output
not a command
```

<!--
```python
print("hidden")
```
-->

<!-- newcomer: GPU -->
```bash
false
```

```python
import os
print("python in", os.path.basename(os.getcwd()), os.environ["WORD"])
```

```bash
for name in a b; do
  echo "it's $name"
done
```
"""


def walk(page, folder):
    script = folder / "readme.sh"
    script.write_text(newcomer.script(list(newcomer.steps(page)), folder))
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    return subprocess.run(["bash", str(script)], cwd=folder, env=environment, capture_output=True, text=True)


def test_every_step_is_taken_in_one_shell(tmp_path):
    steps = [(step.line, step.language, step.not_run is None) for step in newcomer.steps(PAGE)]
    shell = [(line, "bash", True) for line in (5, 6, 7, 9)]
    assert steps == [*shell, (26, "bash", False), (30, "python", True), (35, "bash", True)]
    done = walk(PAGE, tmp_path)
    assert done.returncode == 0 and done.stderr == "", done.stdout + done.stderr
    printed = [line for line in done.stdout.splitlines() if line and not line.startswith("===")]
    for line in ("one two", str(tmp_path / "inner"), "python in inner one", "it's a", "it's b"):
        assert line in printed
    assert "=== README.md:26: not run: it needs a GPU\nfalse\n" in done.stdout
    assert done.stdout.count(": passed in ") == 6 and "hidden" not in done.stdout


def test_the_first_failure_is_the_last_command(tmp_path):
    done = walk("```bash\necho first\n(exit 3)\necho after\n```\n", tmp_path)
    assert done.returncode == 1
    assert "=== README.md:3: FAILED with status 3 after" in done.stdout and "echo after" not in done.stdout
    script = walk("```python\nraise ValueError\n```\n", tmp_path)
    assert script.returncode == 1 and "ValueError" in script.stderr


@pytest.mark.parametrize("fence", ["", "powershell"])
def test_a_block_that_nobody_runs_must_say_so(fence):
    with pytest.raises(SystemExit, match=r"README.md:1: a block of .*; give one of bash, python, json, output, text"):
        list(newcomer.steps(f"```{fence}\nmake demo\n```\n"))


def test_nothing_but_the_way_to_packages_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.example")
    monkeypatch.setenv("https_proxy", "proxy.example")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("VIRTUAL_ENV", "/env")
    monkeypatch.setenv("PATH", "/env/bin:/usr/bin:/bin")
    page = "```bash\ngit clone --depth 1 https://example.com/a.git && cd a\n```\n"
    kept = newcomer.newcomers_environment(tmp_path, page, newcomer.ROOT)
    assert kept["PIP_INDEX_URL"] and kept["https_proxy"] and kept["HOME"] == str(tmp_path / "home")
    assert kept["PATH"] == f"{tmp_path}/python/bin:/usr/bin:/bin" and not {"PYTHONPATH", "VIRTUAL_ENV"} & kept.keys()
    asked = ["git", "config", "--get-regexp", "^url"]
    told = subprocess.run(asked, env=kept, cwd=tmp_path, capture_output=True, text=True).stdout
    name, address = told.split()
    assert ROOT.as_uri() in name and address == "https://example.com/a.git"
    with pytest.raises(SystemExit, match="has no `git clone ADDRESS`"):
        newcomer.newcomers_environment(tmp_path, "nothing", newcomer.ROOT)


def test_an_archive_without_history_is_cloned_too(tmp_path, monkeypatch):
    unpacked, folder = tmp_path / "unpacked", tmp_path / "folder"
    (unpacked / "build").mkdir(parents=True)
    folder.mkdir()
    (unpacked / "README.md").write_text("hello\n")
    monkeypatch.setattr(newcomer, "ROOT", unpacked)
    cloned = newcomer.origin(folder)
    assert newcomer.git(cloned, "show", "HEAD:README.md").stdout == "hello\n"
    assert newcomer.git(cloned, "ls-files").stdout.split() == ["README.md"]
    newcomer.git(unpacked, "init", "-q")
    assert newcomer.origin(folder) == unpacked


@pytest.mark.parametrize(
    ("numbers", "learned"),
    [
        ([(0, 3), (3, 3)], True),
        ([(0, 3), (2, 3)], True),
        ([(0, 3), (1, 3)], False),
        ([(2, 3), (3, 3)], False),
        ([], False),
    ],
)
def test_a_model_has_learned_what_it_could_not_say_before(numbers, learned):
    printed = "\n".join(
        f"  {equal} of {asked} answers are the held-out ones, word for word" for equal, asked in numbers
    )
    assert newcomer.has_learned(printed) is learned


@pytest.mark.parametrize(("last", "status"), [("3", 0), ("0", 1)])
def test_a_wheel_is_installed_as_the_page_says_it(last, status, tmp_path, monkeypatch, capfd):
    wheel = tmp_path / "patrickstar-1.whl"
    wheel.touch()
    page = tmp_path / "root" / "docs" / "installation.md"
    page.parent.mkdir(parents=True)
    says = "answers are the held-out ones"
    page.write_text(f"```bash\nls dist $HOME\necho 0 of 3 {says}\necho {last} of 3 {says}\n```\n")
    monkeypatch.setattr(newcomer, "ROOT", tmp_path / "root")
    assert newcomer.run(tmp_path / "walk", 1, wheel) == status
    printed = capfd.readouterr().out
    assert (
        "dist:\npatrickstar-1.whl\n" in printed
        and " s from an empty home to the end of docs/installation.md" in printed
    )
    assert ("does not answer held-out questions" in printed) == bool(status)
