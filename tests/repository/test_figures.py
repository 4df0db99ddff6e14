"""Figures of README and pages are those of benchmark/results/latest.json, and its figures are those of the records."""

import json
import re
import sys

import pytest

from tests.pages import DOCS, ROOT, Page, all_pages

sys.path.insert(0, str(DOCS))
import figures

ROWS = figures.read_latest()
REFERENCE = re.compile(r"\{\{ ?(.*?) ?\}\}")
PAGES = [page for page in all_pages() if page.path.is_relative_to(DOCS)]

TABLES = ("benchmarks.md", "comparison.md", "guides/fewer_bytes.md", "guides/long_sequences.md")

# Beginnings of README's rows, the row's case, and the case of the peer in it.
README_ROWS = {
    "| Llama-3.1-8B, 4 x 4096 | H200, at most 40 GiB of it |": ("llama-8b-40gib", None),
    "| Llama-3.1-8B, 4 x 4096 | H200 (FSDP2": ("llama-8b", "llama-8b/fsdp2"),
    "| Llama-3.1-8B, 4 x 4096 | two H200s": ("llama-8b-40gib-x2", "llama-8b-40gib-x2/fsdp2"),
    "| Qwen2.5-14B, 4 x 4096": ("qwen-14b-clipped", None),
    "| GPT 68 B, 16 x 1024": ("gpt-68b-x4", None),
    "| GPT 110 B, 4 x 1024": ("gpt-110b-no-master-x2", None),
}


@pytest.mark.parametrize("case", ROWS)
def test_a_row_has_the_figures_of_its_record(case):
    row = ROWS[case]
    record = figures.RESULTS / row["file"]
    assert record.is_file() and row["commit"]
    found = figures.figures(row, ROWS)
    assert found.items() <= row.items()
    if not found:  # a text: the quote is in it, and has the figures
        assert row["quote"] in record.read_text(encoding="utf-8")
        for field in ("seconds", "model_tflops"):
            # DeepSpeed's log has seconds alone; what follows from them is computed below.
            if field in row and "against" not in row:
                numbers = [float(number) for number in re.findall(r"\d+\.?\d*", row["quote"])]
                assert row[field] in numbers, field


def test_figures_that_follow_from_a_log():
    row, ours = ROWS["gpt-4b-24gib/deepspeed"], ROWS["gpt-4b-24gib"]
    log = (figures.RESULTS / row["file"]).read_text(encoding="utf-8")
    timed = re.findall(rf"{row['system']}: timed step \d: ([\d.]+) s", log)
    assert row["seconds"] == sorted(map(float, timed))[len(timed) // 2]
    assert row["ratio"] == round(row["seconds"] / ours["seconds"], 2)
    assert row["model_tflops"] == round(ours["model_tflops"] * ours["seconds"] / row["seconds"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_refers_to_rows_that_exist(page):
    filled = figures.fill(page.text, ROWS)
    assert not REFERENCE.findall(filled)


def test_pages_take_their_figures_from_the_file():
    by_name = {page.path.relative_to(DOCS).as_posix(): len(REFERENCE.findall(page.text)) for page in PAGES}
    assert all(by_name[name] >= 5 for name in TABLES)


@pytest.mark.parametrize("name", TABLES)
def test_cells_of_tables_with_steps_are_references(name):
    for line in Page(DOCS / name).text.splitlines():
        for cell in line.split("|") if line.startswith("|") else ():
            assert not re.match(r" *[\d.,]+ (?:s|ms|model TFLOPS)\b", cell), line


def test_readme_shows_the_figures_of_the_file():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    measured = [line for line in lines if line.endswith("| measured |")]
    assert len(measured) == len(README_ROWS)
    for begin, (case, peer) in README_ROWS.items():
        (line,) = [line for line in measured if line.startswith(begin)]
        host, rate = line.split(" | ")[2:4]
        assert rate == figures.show(ROWS[case], "tokens_per_second"), line
        assert host == f"{ROWS[case]['host_peak_gib']:.0f} GiB", line
        if peer:
            version, beside = re.search(r"FSDP2, PyTorch ([\d.]+), .*?: ([\d,]+)\)", line).groups()
            assert (version, beside) == (ROWS[peer]["version"], figures.show(ROWS[peer], "tokens_per_second")), line


def test_superseded_records_are_listed():
    for folder in (figures.RESULTS, figures.RESULTS / "archive"):
        listed = (folder / "README.md").read_text(encoding="utf-8")
        for path in folder.iterdir():
            if path.is_file() and path.suffix != ".md" and path.name != "latest.json":
                ends = [path.name[index:] for index in range(len(path.name)) if path.name[index] in "-."]
                assert f"`{path.name}`" in listed or any(f"`{end}`" in listed for end in ends), path.name


def test_the_file_is_written_as_the_script_writes_it():
    text = figures.LATEST.read_text(encoding="utf-8")
    assert json.loads(text) == ROWS and len(text.splitlines()) == len(ROWS) + 2
