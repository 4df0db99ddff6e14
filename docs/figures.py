"""Figures of the pages, from benchmark/results/latest.json: ``{{ case.field }}`` becomes a figure with its unit.

Each row of that file names its record. ``python docs/figures.py`` reads the figures of JSON records into the
file again; figures of text records stand beside the ``quote`` that has them. tests/repository/test_figures.py
compares both.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "benchmark" / "results"
LATEST = RESULTS / "latest.json"
REFERENCE = re.compile(r"\{\{ ([\w./-]+)\.(\w+) \}\}")
_GIB = 2**30


def read_latest() -> dict[str, dict[str, Any]]:
    """Rows by case."""
    return json.loads(LATEST.read_text(encoding="utf-8"))


def fill(text: str, rows: dict[str, dict[str, Any]]) -> str:
    """``text`` with each reference replaced.

    Raises:
        KeyError: no row, or no such field in it.
    """
    return REFERENCE.sub(lambda found: show(rows[found[1]], found[2]), text)


def show(row: dict[str, Any], field: str) -> str:
    """A figure as pages print it."""
    value = row[field]
    if isinstance(value, str):
        return value
    if "quote" in row:  # as its record prints it
        return f"{value:g}" + {"seconds": " s", "ratio": " x"}.get(field, "")
    if field == "seconds":
        return f"{value:.3f} s" if value < 10 else f"{value:.2f} s" if value < 100 else f"{value:.1f} s"
    if field == "scaling":
        return f"{100 * value:.1f} %"
    if field.endswith("_gib"):
        return f"{value:.1f} GiB" if value < 99.95 else f"{value:.0f} GiB"
    shown = {
        "ms": "{:.1f} ms",
        "ratio": "{:.2f} x",
        "share": "{:.3f}",
        "model_tflops": "{:.0f}",
        "init_seconds": "{:.1f} s",
    }
    return shown.get(field, row.get("shown", "{:,.0f}")).format(value)


def figures(row: dict[str, Any], rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The figures of a row, from its record; of a text record the row's own.

    ``system`` names a run of ``benchmark.compare``, ``select`` a row of another case, ``key`` one value. ``against``
    names the row of ``ratio``, which is the peer's seconds over PatrickStar's.
    """
    if not row["file"].endswith(".json"):
        return {}
    record = json.loads((RESULTS / row["file"]).read_text(encoding="utf-8"))
    found = {"commit": record["commit"], "hardware": _hardware(record, row), "torch": _release(record["torch_version"])}
    if "system" in row:
        found |= _compared(record, row)
    elif "select" in row:
        (one,) = [part for part in record["rows"] if row["select"].items() <= part.items()]
        if "key" in row:
            return found | {"value": _round(one[row["key"]])}
        found |= {"ms": _round(one["median_seconds"] * 1e3), "gpu_peak_gib": _round(one["peak_bytes"] / _GIB)}
        found["share"] = _round(one.get("of_linear") or one["of_best"])
    else:
        found["value"] = _round(record[row["key"]])
    if "against" in row:
        own, other = found["seconds"], rows[row["against"]]["seconds"]
        found["ratio"] = _round(other / own if row["system"] == "patrickstar" else own / other)
    return found


def _compared(record: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    (run,) = [
        run for run in record["systems"] if (run["system"], run.get("ranks", 1)) == (row["system"], row.get("ranks", 1))
    ]
    length, batch, seconds = record["length"], record["batch"], run["step_seconds"]
    return {
        "seconds": _round(seconds),
        "tokens_per_second": _round(batch * length / seconds),
        "model_tflops": _round(run.get("model_tflops_per_gpu") or run["model_tflops"]),
        "gpu_limit_gib": run["gpu_limit_bytes"] and _round(run["gpu_limit_bytes"] / _GIB),
        "gpu_peak_gib": _round(run["device_peak_bytes"] / _GIB),
        "host_peak_gib": _round(run["host_peak_bytes"] / _GIB),
        "init_seconds": _round(run["init_seconds"]),
        **({"scaling": _round(run["scaling"])} if run.get("scaling") else {}),
        "version": _release(run["version"]),
    }


def _round(value: float) -> float:
    return float(f"{value:.6g}")


def _release(version: str) -> str:
    return version.partition("+")[0]


def _hardware(record: dict[str, Any], row: dict[str, Any]) -> str:
    number = row.get("ranks", record.get("ranks", 1))
    gpu = f"{number} x {record['gpu']}" if record["gpu"] != "none" else "no GPU"
    return f"{gpu}, {record['num_cpus']} cores, {record['host_memory_bytes'] / _GIB:.0f} GiB"


def write(rows: dict[str, dict[str, Any]]) -> None:
    """One line per row."""
    lines = [f"  {json.dumps(case)}: {json.dumps(row)}" for case, row in rows.items()]
    LATEST.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    latest = read_latest()
    for case_row in latest.values():
        case_row |= figures(case_row, latest)
    write(latest)
