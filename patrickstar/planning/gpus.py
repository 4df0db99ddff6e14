"""GPUs by name, with figures of their data sheets. Standard library only."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Sequence

PRECISIONS = ("bf16", "fp16", "fp32")
"""Compute dtypes, by the names of ``--precision``."""

_NO_BF16 = ("fp16", "fp32")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSheet:
    """Figures of a GPU's data sheet; nothing was measured."""

    tflops: float
    """Dense products of bfloat16 (GPUs without: float16) with float32 sums; GeForce: half of what 16-bit sums reach."""
    float32_tflops: float
    """Float32 without tensor cores."""
    gbps: float
    """Memory bandwidth, 1e9 bytes per second."""
    gib: float
    """Memory that a process can use, in GiB."""
    pcie: int
    """Generation of 16 PCIe lanes, or of what has their bandwidth."""
    nvlink_gbps: float = 0.0
    """NVLink, both directions; 0: collectives over PCIe."""
    precisions: tuple[str, ...] = PRECISIONS

    @property
    def has_float8(self) -> bool:
        """True if its tensor cores multiply in 8-bit floating point: Ada, Hopper, Blackwell."""
        return self not in _WITHOUT_FLOAT8

    @property
    def has_grouped_float8(self) -> bool:
        """True if PyTorch multiplies groups of rows so on it: Hopper."""
        return self in _HOPPER


H200 = "h200"
"""The measured GPU, to which data sheets are compared."""

DATA_SHEETS = {
    H200: DataSheet(tflops=989, float32_tflops=67, gbps=4800, gib=139, pcie=5, nvlink_gbps=900),
    "b200": DataSheet(tflops=2250, float32_tflops=75, gbps=8000, gib=178, pcie=5, nvlink_gbps=1800),
    "h100": DataSheet(tflops=989, float32_tflops=67, gbps=3350, gib=79, pcie=5, nvlink_gbps=900),
    "h100-nvl": DataSheet(tflops=835, float32_tflops=60, gbps=3900, gib=93, pcie=5, nvlink_gbps=600),
    "h100-pcie": DataSheet(tflops=756, float32_tflops=51, gbps=2000, gib=79, pcie=5),
    "h800": DataSheet(tflops=989, float32_tflops=67, gbps=3350, gib=79, pcie=5, nvlink_gbps=400),
    "h20": DataSheet(tflops=148, float32_tflops=44, gbps=4000, gib=95, pcie=5, nvlink_gbps=900),
    "a100": DataSheet(tflops=312, float32_tflops=19.5, gbps=2000, gib=79, pcie=4, nvlink_gbps=600),
    "a100-40": DataSheet(tflops=312, float32_tflops=19.5, gbps=1555, gib=39.4, pcie=4, nvlink_gbps=600),
    "a30": DataSheet(tflops=165, float32_tflops=10.3, gbps=933, gib=23.5, pcie=4, nvlink_gbps=200),
    "a40": DataSheet(tflops=149.7, float32_tflops=37.4, gbps=696, gib=44.4, pcie=4),
    "a10": DataSheet(tflops=125, float32_tflops=31.2, gbps=600, gib=22, pcie=4),
    "a10g": DataSheet(tflops=70, float32_tflops=31.5, gbps=600, gib=22, pcie=4),
    "l40s": DataSheet(tflops=362, float32_tflops=91.6, gbps=864, gib=44.4, pcie=4),
    "l40": DataSheet(tflops=181, float32_tflops=90.5, gbps=864, gib=44.4, pcie=4),
    "l4": DataSheet(tflops=121, float32_tflops=30.3, gbps=300, gib=22, pcie=4),
    "v100": DataSheet(tflops=125, float32_tflops=15.7, gbps=900, gib=31.7, pcie=3, nvlink_gbps=300,
                      precisions=_NO_BF16),
    "t4": DataSheet(tflops=65, float32_tflops=8.1, gbps=320, gib=14.6, pcie=3, precisions=_NO_BF16),
    "rtx6000-ada": DataSheet(tflops=364, float32_tflops=91.1, gbps=960, gib=47.4, pcie=4),
    "rtxpro6000": DataSheet(tflops=504, float32_tflops=126, gbps=1792, gib=94.9, pcie=5),
    "a6000": DataSheet(tflops=154.8, float32_tflops=38.7, gbps=768, gib=47.4, pcie=4),
    "a5000": DataSheet(tflops=111, float32_tflops=27.8, gbps=768, gib=23.5, pcie=4),
    "rtx3060": DataSheet(tflops=25.5, float32_tflops=12.7, gbps=360, gib=11.6, pcie=4),
    "rtx3080": DataSheet(tflops=59.5, float32_tflops=29.8, gbps=760, gib=9.6, pcie=4),
    "rtx3090": DataSheet(tflops=71, float32_tflops=35.6, gbps=936, gib=23.5, pcie=4),
    "rtx4060ti": DataSheet(tflops=44, float32_tflops=22, gbps=288, gib=15.6, pcie=3),  # 16 GB; 8 lanes of PCIe 4
    "rtx4070ti-super": DataSheet(tflops=88, float32_tflops=44, gbps=672, gib=15.6, pcie=4),
    "rtx4080": DataSheet(tflops=97.5, float32_tflops=48.7, gbps=717, gib=15.6, pcie=4),
    "rtx4090": DataSheet(tflops=165, float32_tflops=82.6, gbps=1008, gib=23.5, pcie=4),
    "rtx5070ti": DataSheet(tflops=88, float32_tflops=44, gbps=896, gib=15.5, pcie=5),
    "rtx5080": DataSheet(tflops=112.6, float32_tflops=56.3, gbps=960, gib=15.5, pcie=5),
    "rtx5090": DataSheet(tflops=209.5, float32_tflops=104.8, gbps=1792, gib=31.3, pcie=5),
}  # fmt: skip

_WITHOUT_FLOAT8 = [
    DATA_SHEETS[name]
    for name in ("a100", "a100-40", "a30", "a40", "a10", "a10g", "v100", "t4", "a6000", "a5000", "rtx3060", "rtx3080",
                 "rtx3090")
]  # fmt: skip

_HOPPER = [DATA_SHEETS[name] for name in ("h100", "h100-nvl", "h100-pcie", "h800", "h20", H200)]

_VENDOR_WORDS = re.compile(r"nvidia|geforce|tesla|quadro|sxm\d?|(?<=\d)gb$|[^a-z0-9]")
_OTHER_NAMES = {"a10080": "a100", "h10080": "h100", "h10094": "h100-nvl", "h200141": H200, "v10032": "v100",
                "a10040": "a100-40", "a100pcie": "a100", "rtxa6000": "a6000", "rtxa5000": "a5000", "l4048": "l40",
                "l40s48": "l40s", "l424": "l4", "a4048": "a40", "a1024": "a10", "t416": "t4",
                "rtxpro6000blackwell": "rtxpro6000", "6000ada": "rtx6000-ada"}  # fmt: skip


def precision_mistake(precision: str, gpu: str, precisions: Sequence[str]) -> str | None:
    """Returns the reason why ``gpu``, which computes in ``precisions``, cannot train in ``precision``; None: it can."""
    if precision in precisions:
        return None
    return f"--precision is {precision}, which {gpu} does not compute in; give one of {', '.join(precisions)}"


def gpu_name(text: str) -> str:
    """Returns the key of :data:`DATA_SHEETS` for a usual spelling: ``a100-80``, ``RTX 4090``, ``NVIDIA H100 80GB``.

    Raises:
        ValueError: no GPU has that name.
    """
    word = _VENDOR_WORDS.sub("", text.lower())
    plain = {name.replace("-", ""): name for name in DATA_SHEETS}
    plain |= {name.removeprefix("rtx"): found for name, found in plain.items()} | _OTHER_NAMES
    if word in plain:
        return plain[word]
    near = difflib.get_close_matches(word, plain, n=1, cutoff=0.7)
    meant = f"did you mean {plain[near[0]]}?" if near else f"there are {', '.join(DATA_SHEETS)}"
    raise ValueError(f"it is {text!r}; {meant} (others: --gpu-tflops, --gpu-bandwidth, --gpu-memory, --host-link)")
