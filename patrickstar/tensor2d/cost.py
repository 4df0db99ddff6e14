"""Communication volume of a transformer layer under 1D and 2D tensor parallelism.

    layer = LayerShape(hidden=8192)
    received_1d(layer, tokens=16384, ranks=4).forward          # elements received by each rank: 3 bsh
    received_2d(layer, tokens=16384, rows=2, columns=2).forward            # bsh + 3 h²
    choose(layer, batch=8, length=2048, heads=64, ranks=4).reason

*1D* is Megatron's tensor parallelism with sequence parallelism (Korthikanti et al., *Reducing Activation Recomputation
in Large Transformer Models*, arXiv 2205.05198). Attention has an all-gather before and a reduce-scatter after it, and
so has the MLP: 4 (p - 1) / p · bsh on p ranks. Backward has the same, and two more all-gathers of inputs that are saved
sharded.

*2D* on r x c ranks: a linear layer from m to n features with T tokens receives ((c - 1) T w + (r - 1) m n) / (r c)
elements. w is the width of the side that is sent, the narrower one (:class:`~patrickstar.tensor2d.linear.Sent`).
Backward receives twice as many: in each product one operand or its sum goes along columns, the weight or its gradient
along rows. The published algorithm (Optimus, arXiv 2104.05343) always sends the input: (q - 1) / q² · (7 bsh + 12 h²)
for a GPT layer on q x q ranks. With the narrower side it is (q - 1) / q² · (4 bsh + 12 h²).

Counts are elements that a rank receives with optimal collectives. Not counted are the sums of norms (a few elements per
token) and the gradients of biases and norms (a few rows). Communication that overlaps with products is counted.
"""

from __future__ import annotations

import dataclasses
import enum
import math

from patrickstar.sizes import show_size
from patrickstar.tensor2d.group import MeshPlace
from patrickstar.tensor2d.linear import Sent, narrower
from patrickstar.tensor2d.turning import turned_elements


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Widths of a transformer layer's linear layers."""

    hidden: int
    intermediate: int | None = None
    """Width of the MLP; None: 4 hidden."""
    queries: int | None = None
    """Features of the queries of all heads; None: as many as hidden."""
    keys: int | None = None
    """Features of keys, and of values; None: as many as of queries."""
    is_gated: bool = False
    """The MLP has a gate beside its first layer."""

    def linears(self) -> list[tuple[int, int]]:
        """(in, out) features of the fused qkv, the attention output, the up and the down projection."""
        wide = 4 * self.hidden if self.intermediate is None else self.intermediate
        queries = self.hidden if self.queries is None else self.queries
        keys = queries if self.keys is None else self.keys
        return [
            (self.hidden, queries + 2 * keys),
            (queries, self.hidden),
            (self.hidden, wide * (2 if self.is_gated else 1)),
            (wide, self.hidden),
        ]


@dataclasses.dataclass(frozen=True)
class Received:
    """Elements that each rank receives."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Forward and backward together."""
        return self.forward + self.backward

    def __add__(self, other: Received) -> Received:
        return Received(self.forward + other.forward, self.backward + other.backward)


def received_1d(layer: LayerShape, tokens: int, ranks: int) -> Received:
    """Elements for one layer with ``tokens`` tokens of all samples."""
    part = (ranks - 1) / ranks * tokens * layer.hidden
    return Received(4 * part, 6 * part)


def received_2d(layer: LayerShape, tokens: int, rows: int, columns: int, sent: Sent | None = None) -> Received:
    """Elements for one layer with ``tokens`` tokens of all samples, on ``rows`` x ``columns`` ranks.

    Args:
        layer: its linear layers.
        tokens: b s.
        rows: of the mesh.
        columns: of the mesh.
        sent: the side that all linear layers send; None: the narrower one, as in
            :class:`~patrickstar.tensor2d.Linear2D`; ``Sent.INPUT``: as published.
    """
    parts = [linear(tokens, *features, rows, columns, sent) for features in layer.linears()]
    return sum(parts, Received(0, 0))


def linear(
    tokens: int, in_features: int, out_features: int, rows: int, columns: int, sent: Sent | None = None
) -> Received:
    """Elements for one linear layer on ``rows`` x ``columns`` ranks."""
    side = narrower(in_features, out_features) if sent is None else sent
    width = in_features if side is Sent.INPUT else out_features
    one = ((columns - 1) * tokens * width + (rows - 1) * in_features * out_features) / (rows * columns)
    return Received(one, 2 * one)


def embedding(tokens: int, hidden: int, rows: int, columns: int) -> Received:
    """Elements for one table lookup, without the tokens themselves (:mod:`patrickstar.tensor2d.embedding`)."""
    one = (rows - 1) * tokens * hidden / (rows * columns)
    return Received(one, one)


def head(tokens: int, hidden: int, vocabulary: int, place: MeshPlace, *, tied: bool = True) -> Received:
    """Elements for the logits of ``tokens`` at ``place``, for a vocabulary that panels divide. A table shared with the
    embedding adds two transpositions, one of the gradient (:class:`~patrickstar.tensor2d.LMHead2D`).
    """
    found = linear(tokens, hidden, vocabulary, place.rows, place.columns, Sent.INPUT)
    if not tied:
        return found
    return found + Received(turned_elements((vocabulary, hidden), place), turned_elements((hidden, vocabulary), place))


def crossing_tokens(
    layer: LayerShape, rows: int, columns: int, sent: Sent | None = None, *, passes: str = "forward"
) -> float:
    """The number of tokens b s from which 2D receives less than 1D on as many ranks; infinity if it never does.

    Args:
        layer: its linear layers.
        rows: of the mesh.
        columns: of the mesh.
        sent: as for :func:`received_2d`.
        passes: ``"forward"``, ``"backward"`` or their ``"total"``.
    """
    weights = getattr(received_2d(layer, 0, rows, columns, sent), passes)
    per_token = getattr(received_2d(layer, 1, rows, columns, sent), passes) - weights
    gained = getattr(received_1d(layer, 1, rows * columns), passes) - per_token
    if gained <= 1e-9 * per_token:
        return math.inf
    return weights / gained


class Mode(enum.Enum):
    """Dimensions of tensor parallelism."""

    ONE = "1d"
    """Pairs of layers sharded by columns, then by rows."""
    TWO = "2d"
    """Matrices sharded into blocks."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """The chosen mesh, the bytes that each rank receives for a layer in both passes, and the reason."""

    mode: Mode
    rows: int
    columns: int
    received_bytes: float
    reason: str


def choose(
    layer: LayerShape,
    *,
    batch: int,
    length: int,
    heads: int,
    ranks: int,
    key_heads: int | None = None,
    element_bytes: int = 2,
    mode: Mode | None = None,
    mesh: MeshPlace | None = None,
) -> Choice:
    """The mesh that receives least in a training step. Ties go to 1D, then to the mesh with most columns.

    Args:
        layer: its linear layers.
        batch: samples of all ranks.
        length: tokens of each sample.
        heads: of attention.
        ranks: of the mesh.
        key_heads: key/value heads; None: as many as ``heads``.
        element_bytes: of activations and weights.
        mode: consider only this one; None: both.
        mesh: consider only this 2D mesh; None: all.

    Raises:
        ValueError: no mesh of so many ranks divides heads, samples and features.
    """
    key_heads = heads if key_heads is None else key_heads
    tokens = batch * length
    found: list[tuple[float, Mode, int, int]] = []
    why_not: list[str] = []
    for columns in range(ranks, 0, -1):
        rows = ranks // columns
        if rows * columns != ranks or (rows > 1 and not _is_asked(mesh, rows)):
            continue
        if key_heads % columns or heads % columns:
            why_not.append(f"{rows} x {columns} (heads: {heads}, of keys {key_heads})")
            continue
        if rows == 1 and mode is not Mode.TWO:
            if length % ranks:
                why_not.append(f"one dimension (tokens of a sample: {length})")
            else:
                found.append((received_1d(layer, tokens, ranks).total, Mode.ONE, 1, columns))
        if mode is Mode.ONE or not _is_asked(mesh, rows):
            continue
        panels = MeshPlace(rows, columns).num_panels
        if batch % rows:
            why_not.append(f"{rows} x {columns} (samples: {batch})")
        elif any(size % panels for pair in layer.linears() for size in pair):
            why_not.append(f"{rows} x {columns} (features)")
        else:
            found.append((received_2d(layer, tokens, rows, columns).total, Mode.TWO, rows, columns))
    if not found:
        raise ValueError(f"a layer cannot be divided among {ranks} ranks: {'; '.join(why_not)}; take other ranks")
    elements, mode, rows, columns = min(found, key=lambda one: one[0])
    return Choice(mode, rows, columns, elements * element_bytes, _reason(found, element_bytes, tokens, layer, why_not))


def _is_asked(mesh: MeshPlace | None, rows: int) -> bool:
    return mesh is None or mesh.rows == rows


def _reason(
    found: list[tuple[float, Mode, int, int]], element_bytes: int, tokens: int, layer: LayerShape, why_not: list[str]
) -> str:
    shown = []
    for elements, mode, rows, columns in sorted(found, key=lambda one: one[0]):
        name = "one dimension" if mode is Mode.ONE else f"{rows} x {columns}"
        shown.append(f"{name} {show_size(elements * element_bytes)}")
    text = f"{tokens} tokens are {tokens / layer.hidden:.3g} times the hidden size; a layer receives, forward and "
    text += f"backward, on each rank: {', '.join(shown)}"
    return text + (f"; not divided by {', '.join(why_not)}" if why_not else "")
