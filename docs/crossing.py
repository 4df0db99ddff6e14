"""The picture of where tensor parallelism in two dimensions begins to send less than in one."""

from __future__ import annotations

import math
from collections.abc import Callable

import matplotlib
from matplotlib.figure import Figure

from patrickstar.tensor2d.cost import LayerShape, crossing_tokens, received_1d, received_2d

_RANKS = (4, 16, 64)
_MOST, _STEPS = 3.0, 60  # tokens per hidden size
_HIDDEN = 8192
_COLORS = {"1D": "#e0a458", "2D": "#7aa6c2"}


def draw_crossing() -> Callable[[Figure], None]:
    """Received elements of a GPT's layer against tokens per hidden size, on 4, 16 and 64 ranks."""
    layer = LayerShape(hidden=_HIDDEN)
    shares = [_MOST * step / _STEPS for step in range(_STEPS + 1)]

    def draw(figure: Figure) -> None:
        figure.set_size_inches(9, 3.4)
        for axes, ranks in zip(figure.subplots(1, len(_RANKS), sharey=True), _RANKS, strict=True):
            side = math.isqrt(ranks)
            tokens = [share * _HIDDEN for share in shares]
            lines = {
                "1D": [received_1d(layer, count, ranks).total for count in tokens],
                "2D": [received_2d(layer, count, side, side).total for count in tokens],
            }
            for name, elements in lines.items():
                label = "one dimension" if name == "1D" else f"{side} x {side}"
                axes.plot(shares, [one / _HIDDEN**2 for one in elements], color=_COLORS[name], label=label)
            crossing = crossing_tokens(layer, side, side, passes="total")
            height = received_1d(layer, crossing, ranks).total / _HIDDEN**2
            axes.plot([crossing / _HIDDEN], [height], marker="o", color=matplotlib.rcParams["text.color"])
            axes.annotate(
                f"{crossing / _HIDDEN:.2g}", (crossing / _HIDDEN, height), xytext=(6, -12), textcoords="offset points"
            )
            axes.set_title(f"{ranks} ranks")
            axes.set_xlabel("tokens b s / h")
            axes.set_xlim(0, _MOST)
            axes.set_ylim(0)
            axes.legend(frameon=False, labelcolor=matplotlib.rcParams["text.color"], loc="upper left")
        figure.axes[0].set_ylabel("received by a rank, h²")

    return draw
