"""The pictures of these pages, drawn when they are built, from runs on the simulated device.

``conf.py`` has :func:`setup` called. A page shows one by

    ```{picture}
    :file: chunks
    :alt: what is to be seen, for those who do not see it
    Caption.
    ```

Each is drawn for the light theme and for the dark one, into ``_pictures``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import torch
from crossing import draw_crossing
from docutils import nodes
from docutils.parsers.rst import directives
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from torch import nn

from patrickstar import _C, StateError, initialize_engine
from patrickstar.module.preprocess import plan_params
from patrickstar.planning.machines import H200
from patrickstar.planning.sharded import PlannedDivision
from patrickstar.planning.uses import trace_uses
from patrickstar.profiling import ChunkLayers
from patrickstar.profiling.picture import draw_memory, draw_queues, name_layers
from patrickstar.sequence.choice import Links
from patrickstar.sequence.layout import Mode, slices_of_rank

FOLDER = Path(__file__).resolve().parent / "_pictures"

_INK = {"light": "#222222", "dark": "#d8d8d8"}
_GROUND = {"light": "#ffffff", "dark": "#131416"}
"""Of furo's pages."""
_FILL = {"light": "#f3f3f3", "dark": "#26282c"}
_CYCLE_COLOR = {"light": "#2f6f9f", "dark": "#7db8e0"}
_RANK_COLORS = ("#7aa6c2", "#e0a458", "#9fd3c7", "#c58fa9")


class Block(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The input and what the layers make of it; shape and dtype stay."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Twelve blocks of half a million parameters each, between an embedding and a head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, 256)
        self.blocks = nn.Sequential(*(Block(256) for _ in range(12)))
        self.head = nn.Linear(256, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [..., 256] of tokens [...]."""
        return self.head(self.blocks(self.embedding(tokens)))


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """A step, and which layers lie in the chunks that it used."""

    trace: dict[str, Any]
    layers: ChunkLayers


def run_steps(first: int, last: int, **config: Any) -> TracedStep:
    """Trains :class:`Model` on one batch and traces the steps ``first`` to ``last``, from 1; gives the shortest of
    these, which the rest of the machine has disturbed least.
    """
    torch.manual_seed(0)
    base = {
        "bf16": {"enabled": True},
        "device_memory": "12MiB",
        "default_chunk_size": 2**18,
        "plan_cache": False,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    model, optimizer = initialize_engine(Model, config={**base, **config})
    runtime = model._session.runtime
    tokens = torch.randint(256, (1, 128))
    traces = []
    with model:
        for step in range(1, last + 1):
            if step >= first:
                runtime.start_trace()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
            model.backward(loss)
            optimizer.step()
            traces.append(runtime.take_trace())
        return TracedStep(min(filter(None, traces), key=lambda trace: trace["seconds"]), model._session.chunk_layers)


def draw_chunks() -> Callable[[Figure], None]:
    """Activation memory and chunks under the budget, in a step that follows its plan."""
    done = run_steps(6, 11)

    def draw(figure: Figure) -> None:
        figure.set_size_inches(9, 6)
        memory, queues = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        draw_memory(memory, done.trace)
        draw_queues(queues, done.trace)
        name_layers(memory, done.trace, done.layers)

    return draw


def draw_overlap() -> Callable[[Figure], None]:
    """A first step, which fetches on demand and updates when backward is over, above one that follows its plan."""
    delays = {"link_gbps": 1.2, "link_latency_us": 20.0}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    on_demand = {"delays": delays, "optimizer": {**optimizer, "speculation": "never"}}
    firsts = [run_steps(1, 1, **on_demand) for _ in range(3)]
    without = min(firsts, key=lambda done: done.trace["seconds"])
    overlapping = run_steps(8, 13, delays=delays, optimizer={**optimizer, "speculation": "always"})
    pairs = (
        ("without overlap: chunks come when they are used, updates when backward is over", without),
        ("with overlap: chunks come before they are used, updates run beside backward", overlapping),
    )

    def draw(figure: Figure) -> None:
        figure.set_size_inches(9, 5)
        both = figure.subplots(2, 1, sharex=True)
        for axes, (title, done) in zip(both, pairs, strict=True):
            draw_queues(axes, done.trace)
            axes.set_title(title, fontsize=10, loc="left")
            axes.set_xlabel("")
        ends = [span["begin_seconds"] + span["seconds"] for _, done in pairs for span in done.trace["spans"]]
        both[0].set_xlim(0, max(ends) * 1e3)
        both[1].set_xlabel("time, ms; the line is the end of the step")

    return draw


_STATES = {
    "FREE": (0.0, 1.0, "no value; the master\nhas it"),
    "HOLD": (0.0, 0.0, "has a value,\nnot used yet"),
    "COMPUTE": (1.0, 0.5, "in use: stays\non the device"),
    "HOLD_AFTER_FWD": (2.0, 1.0, "used in forward,\nmay leave"),
    "HOLD_AFTER_BWD": (2.0, 0.0, "backward is over: the\ngradient has its place"),
}
_CYCLE = {
    ("FREE", "COMPUTE"): "first use",
    ("HOLD", "COMPUTE"): "used",
    ("COMPUTE", "HOLD_AFTER_FWD"): "forward\nis over",
    ("HOLD_AFTER_FWD", "COMPUTE"): "used in\nbackward",
    ("COMPUTE", "HOLD_AFTER_BWD"): "backward\nis over",
    ("HOLD_AFTER_BWD", "HOLD"): "the optimizer writes new values",
}


def _is_legal(before: str, after: str) -> bool:
    try:
        _C.check_transition(before, after)
    except StateError:
        return False
    return before != after


def draw_states() -> Callable[[Figure], None]:
    """The states of a parameter with all moves that the core allows; those of a training step are thick."""
    moves = [(before, after) for before in _STATES for after in _STATES if _is_legal(before, after)]
    missing = set(_CYCLE) - set(moves)
    if missing:
        raise ValueError(f"the core forbids {missing}, which the picture has")

    def draw(figure: Figure) -> None:
        figure.set_size_inches(9, 5)
        axes = figure.subplots()
        boxes = {name: _box(axes, name, *place) for name, place in _STATES.items()}
        for before, after in moves:
            _arrow(axes, boxes, before, after)
        axes.set_xlim(-1.1, 7.5)
        axes.set_ylim(-1.0, 3.6)
        axes.axis("off")

    return draw


def _theme() -> str:
    return next(theme for theme, ink in _INK.items() if ink == matplotlib.rcParams["text.color"])


def _box(axes: Axes, name: str, column: float, row: float, meaning: str) -> Rectangle:
    x, y = 3.2 * column, 2.6 * row
    box = Rectangle((x - 0.95, y - 0.45), 1.9, 0.9, facecolor=_FILL[_theme()], edgecolor=_INK[_theme()], zorder=3)
    axes.add_patch(box)
    axes.text(x, y + 0.22, name, ha="center", va="center", fontsize=10, fontweight="bold", zorder=4)
    axes.text(x, y - 0.16, meaning, ha="center", va="center", fontsize=8.5, zorder=4)
    return box


def _arrow(axes: Axes, boxes: dict[str, Rectangle], before: str, after: str) -> None:
    (x0, y0), (x1, y1) = boxes[before].get_center(), boxes[after].get_center()
    label = _CYCLE.get((before, after))
    bend = -0.2 if {before, after} == {"HOLD", "HOLD_AFTER_BWD"} else 0.14
    look = {"linewidth": 2.2, "mutation_scale": 15, "color": _CYCLE_COLOR[_theme()]}
    if label is None:
        look = {"linewidth": 0.8, "mutation_scale": 9, "color": _INK[_theme()], "alpha": 0.4}
    curve = {"connectionstyle": f"arc3,rad={bend}", "arrowstyle": "-|>", "zorder": 2 if label else 1}
    ends = {"patchA": boxes[before], "patchB": boxes[after], "shrinkA": 0, "shrinkB": 1}
    axes.add_patch(FancyArrowPatch((x0, y0), (x1, y1), **curve, **ends, **look))
    if label:
        middle = (x0 + x1) / 2 + bend / 2 * (y1 - y0), (y0 + y1) / 2 - bend / 2 * (x1 - x0)
        ground = {"facecolor": _GROUND[_theme()], "edgecolor": "none", "pad": 1.5}
        axes.text(*middle, label, ha="center", va="center", fontsize=8.5, bbox=ground, zorder=5)


def draw_ranks() -> Callable[[Figure], None]:
    """Which share of each chunk is on which rank, and one chunk that is whole on all of them while it is used."""
    numels = [param.numel() for param in Model().parameters()]
    num_ranks = len(_RANK_COLORS)
    layout = _C.Layout.pack(numels, [_C.DType.BFLOAT16] * len(numels), [True] * len(numels), 2**20, num_ranks, 0)
    chunks = [layout.chunk(index) for index in range(layout.num_chunks)]
    used = len(chunks) // 2

    def draw(figure: Figure) -> None:
        figure.set_size_inches(9, 4.4)
        axes = figure.subplots()
        ink = matplotlib.rcParams["text.color"]
        for rank, color in enumerate(_RANK_COLORS):
            left = rank * 4.4
            axes.text(left + 2, 1.15, f"rank {rank}", ha="center", fontsize=11, fontweight="bold")
            axes.text(left + 2, 0.62, "a GPU and a batch of its own", ha="center", fontsize=8.5)
            for index, chunk in enumerate(chunks):
                share = chunk["shard_numel"] / chunk["numel"]
                y = -0.95 * index
                axes.add_patch(Rectangle((left, y - 0.35), 4, 0.7, fill=False, edgecolor=ink, linewidth=0.7))
                for other in range(num_ranks):
                    if other == rank or index == used:
                        place = (left + 4 * share * other, y - 0.35)
                        shade = _RANK_COLORS[other] if index == used else color
                        axes.add_patch(Rectangle(place, 4 * share, 0.7, facecolor=shade, linewidth=0))
        for index in range(len(chunks)):
            state = "in use: gathered" if index == used else "a share on each rank"
            axes.text(-0.25, -0.95 * index, f"chunk {index}\n{state}", ha="right", va="center", fontsize=8.5)
        axes.text(
            2 * 4.4 - 0.2,
            -0.95 * len(chunks) - 0.1,
            "Before a chunk is used each rank sends its share to the others; after its backward each rank gets\n"
            "the mean of all gradients of its share, and updates that share alone.",
            ha="center",
            va="center",
            fontsize=9,
        )
        axes.set_xlim(-3.3, 4 * 4.4)
        axes.set_ylim(-0.95 * len(chunks) - 0.6, 1.6)
        axes.axis("off")

    return draw


_SHARED = 4
"""Ranks in the pictures of a sequence that ranks share."""


def draw_ring() -> Callable[[Figure], None]:
    """Whose keys and values each rank has in each turn of the ring, and which blocks causal attention sees."""

    def draw(figure: Figure) -> None:
        figure.set_size_inches(9, 3.4)
        for turn, axes in enumerate(figure.subplots(1, _SHARED)):
            for rank in range(_SHARED):
                owner = (rank - turn) % _SHARED
                y = -1.1 * rank
                kinds = (("Q", rank, 0.0), ("K, V", owner, 1.7))
                for text, whose, x in kinds:
                    axes.add_patch(Rectangle((x, y - 0.4), 1.3, 0.8, facecolor=_RANK_COLORS[whose], linewidth=0))
                    axes.text(x + 0.65, y, f"{text} {whose}", ha="center", va="center", fontsize=9, color=_INK["light"])
                axes.text(1.5, y, "·", ha="center", va="center", fontsize=13)
                if turn == 0:
                    axes.text(-0.25, y, f"rank {rank}", ha="right", va="center", fontsize=9)
                if turn + 1 < _SHARED and rank + 1 < _SHARED:
                    ends = {"posA": (3.15, y), "posB": (3.15, y - 1.1)}
                    curve = {"connectionstyle": "arc3,rad=-0.5", "arrowstyle": "-|>", "mutation_scale": 9}
                    axes.add_patch(FancyArrowPatch(**ends, **curve, color=_CYCLE_COLOR[_theme()], linewidth=1.4))
            axes.set_title(f"turn {turn}", fontsize=10)
            axes.set_xlim(-1.4 if turn == 0 else -0.1, 3.6)
            axes.set_ylim(-1.1 * _SHARED + 0.4, 0.6)
            axes.axis("off")

    return draw


def draw_zigzag() -> Callable[[Figure], None]:
    """Which tokens a rank has, one slice or the two of zigzag, and how much of the scores that gives it to compute."""
    count = 4 * _SHARED

    def owners(mode: Mode) -> list[int]:
        found = [0] * count
        for rank in range(_SHARED):
            for part in slices_of_rank(rank, _SHARED, count // _SHARED, mode):
                found[part.start : part.stop] = [rank] * part.length
        return found

    def draw(figure: Figure) -> None:
        figure.set_size_inches(9, 4.6)
        for axes, mode in zip(figure.subplots(1, 2), (Mode.RING, Mode.ZIGZAG), strict=True):
            whose = owners(mode)
            seen = [0] * _SHARED
            for query, rank in enumerate(whose):
                seen[rank] += query + 1
                for key in range(query + 1):
                    axes.add_patch(Rectangle((key, -query - 1), 0.94, 0.94, facecolor=_RANK_COLORS[rank], linewidth=0))
            shares = ", ".join(str(part) for part in seen)
            axes.set_title(f"{mode.value}: {shares} scores on ranks 0 to {_SHARED - 1}", fontsize=10)
            axes.set_xlim(-0.3, count + 0.3)
            axes.set_ylim(-count - 0.3, 0.3)
            axes.set_xlabel("16 keys, of which a query sees its own and those before")
            axes.set_ylabel("queries; the color is the rank that has them")
            axes.set_xticks([])
            axes.set_yticks([])
            axes.set_aspect("equal")
            for side in axes.spines.values():
                side.set_visible(False)

    return draw


def _activation_bytes(length: int, size: int) -> int:
    """Of a step of a Llama with 2 layers, on one rank, as ``patrickstar plan`` counts it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        config = LlamaConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=2, num_attention_heads=16,
                             num_key_value_heads=4, vocab_size=8192, use_cache=False)  # fmt: skip
        model = LlamaForCausalLM(config)
    params = plan_params(model, torch.bfloat16, use_cpu_embedding=False)
    divisions = [PlannedDivision(model, 1, length, size, Links())] if size > 1 else []
    tokens = torch.empty(1, length, dtype=torch.long, device="meta")
    inputs = {"input_ids": tokens, "labels": tokens} if not divisions else divisions[0].inputs(1, model)
    uses = trace_uses(model, params, torch.bfloat16, inputs, H200.gpu, divisions=divisions)
    return max(use.activation_peak_bytes for use in uses.uses)


def draw_sequence_memory() -> Callable[[Figure], None]:
    """Memory of activations on each rank, for a length that grows with the ranks, and for one that does not."""
    ranks, tokens = (1, 2, 4, 8, 16), 2**15
    growing = [_activation_bytes(tokens * size, size) / 2**30 for size in ranks]
    fixed = [_activation_bytes(tokens, size) / 2**30 for size in ranks]

    def draw(figure: Figure) -> None:
        figure.set_size_inches(9, 3.4)
        axes = figure.subplots()
        for values, label, color in (
            (growing, f"{tokens // 1024} K tokens for each rank: {tokens // 1024} K to {tokens * 16 // 1024} K", 1),
            (fixed, f"{tokens // 1024} K tokens in all", 0),
        ):
            axes.plot(ranks, values, marker="o", label=label, color=_RANK_COLORS[color])
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, [str(size) for size in ranks])
        axes.set_ylim(0, 1.15 * max(growing))
        axes.set_xlabel("ranks that share a sequence")
        axes.set_ylabel("activations of a rank, GiB")
        axes.legend(frameon=False, labelcolor=matplotlib.rcParams["text.color"])

    return draw


PICTURES = {"chunks": draw_chunks, "overlap": draw_overlap, "states": draw_states, "ranks": draw_ranks}
PICTURES |= {"crossing": draw_crossing}
PICTURES |= {"ring": draw_ring, "zigzag": draw_zigzag, "sequence_memory": draw_sequence_memory}


def write_pictures(folder: Path) -> None:
    """Runs what is to be seen and writes ``<name>-light.svg`` and ``<name>-dark.svg`` for each of ``PICTURES``."""
    folder.mkdir(exist_ok=True)
    torch.set_num_threads(1)  # another core is for transfers and updates
    for name, prepare in PICTURES.items():
        draw = prepare()
        for theme, ink in _INK.items():
            colors = {f"{part}color": ink for part in ("text.", "axes.label", "axes.edge", "xtick.", "ytick.")}
            clear = {"figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none"}
            with matplotlib.rc_context({**colors, **clear, "svg.hashsalt": name}):
                figure = Figure(layout="constrained")
                FigureCanvasAgg(figure)
                draw(figure)
                figure.savefig(folder / f"{name}-{theme}.svg", metadata={"Date": None})


class PictureDirective(SphinxDirective):
    """Shows one of ``PICTURES`` in the theme of the page."""

    has_content = True
    option_spec = {"file": directives.unchanged_required, "alt": directives.unchanged_required}

    def run(self) -> list[nodes.Node]:
        """A figure with an image for each theme."""
        name = self.options["file"]
        if name not in PICTURES:
            raise self.error(f"there is no picture {name}, but {', '.join(PICTURES)}")
        figure = nodes.figure(classes=["picture"])
        for theme in _INK:
            uri = f"/_pictures/{name}-{theme}.svg"
            figure += nodes.image(uri=uri, alt=self.options["alt"], classes=[f"only-{theme}"])
        caption = nodes.caption()
        self.state.nested_parse(self.content, self.content_offset, holder := nodes.Element())
        caption += [child for paragraph in holder for child in paragraph.children]
        figure += caption
        return [figure]


def setup(app: Sphinx) -> None:
    """Draws the pictures before pages are read, and knows the directive."""
    app.add_directive("picture", PictureDirective)
    app.connect("builder-inited", lambda _: write_pictures(FOLDER))
