"""Links between GPUs of different nodes, by name. Standard library only."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """The link between GPUs of different nodes."""

    name: str
    gbps: float | None
    """Per GPU adapter and direction, 1e9 bytes per second; None: all nodes are in one NVLink domain."""


# 400 and 25 Gbit/s at an assumed efficiency of 92 % (not measured here).
LINKS = {
    "nvlink": Link(name="nvlink", gbps=None),
    "ib400": Link(name="ib400", gbps=46.0),
    "eth25": Link(name="eth25", gbps=2.9),
}


def parse_link(text: str) -> Link:
    """Parses ``--link``: a name in ``LINKS``, or GB/s per GPU.

    Raises:
        ValueError: it is neither.
    """
    if text in LINKS:
        return LINKS[text]
    try:
        gbps = float(text)
    except ValueError:
        gbps = 0.0
    if not 0 < gbps < float("inf"):
        raise ValueError(f"it is {text!r}; give one of {', '.join(LINKS)}, or GB/s for each GPU, such as 12.5")
    return Link(name=f"{gbps:g} GB/s", gbps=gbps)
