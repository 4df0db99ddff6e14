"""A language model's head and loss, with the vocabulary sharded over the mesh."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from patrickstar.tensor2d.division import Placement, Split
from patrickstar.tensor2d.embedding import Embedding2D, padded_vocabulary
from patrickstar.tensor2d.group import MeshGroup
from patrickstar.tensor2d.layer import Layer2D
from patrickstar.tensor2d.lines import Line
from patrickstar.tensor2d.panels import check_divides, sum_dtype
from patrickstar.tensor2d.products import multiply
from patrickstar.tensor2d.sums import replicated, world_total
from patrickstar.tensor2d.turning import turned

_TILE_LOGITS = 2**26
"""Logits that have a float32 copy at a time: 256 MiB."""


class LMHead2D(Layer2D):
    """Logits [b/r, ..., v/c] of activations [b/r, ..., h/c].

    v is the vocabulary padded to a multiple of lcm(r, c). Logits of the padding are meaningless: :func:`whole_logits`
    drops them, the loss ignores them.

    A head that shares the table [v/r, h/c] of an embedding would be A Bᵀ, which sends partial sums of all logits.
    Instead the table is transposed over the mesh, and logits are A B. That sends activations: h elements per token, not
    v.

    Args:
        features: h.
        vocabulary: number of real tokens.
        group: the mesh.
        bias: the layer has one.
        tied: the embedding whose table is shared; None: a weight [h/r, v/c] of its own.
        dtype: of the parameters.
        device: of the parameters.

    Raises:
        ValueError: sizes do not fit.
    """

    def __init__(
        self,
        features: int,
        vocabulary: int,
        group: MeshGroup,
        *,
        bias: bool = False,
        tied: Embedding2D | None = None,
        dtype: torch.dtype | None = None,
        device: object = None,
    ):
        super().__init__(group)
        place = group.place
        check_divides(f"LMHead2D({features}, {vocabulary}): features", features, place)
        if tied is not None and (tied.num_embeddings, tied.features) != (vocabulary, features):
            raise ValueError(
                f"LMHead2D({features}, {vocabulary}): the embedding's table is {tied.num_embeddings} x "
                f"{tied.features}; give one of {vocabulary} x {features}"
            )
        self.features, self.vocabulary, self.is_tied = features, vocabulary, tied is not None
        padded = padded_vocabulary(vocabulary, group)
        self.whole_rows["weight"] = vocabulary
        if tied is not None:
            self.weight = tied.weight
            self.placements["weight"] = tied.placements["weight"]
        else:
            placement = Placement(Split.BLOCKS, padded_to=padded, transposed=True)
            self.add_parameter("weight", (features // place.rows, padded // place.columns), placement, dtype, device)
            bound = 1 / math.sqrt(features)
            nn.init.uniform_(self.weight, -bound, bound)
            self.clear_padding()
        if bias:
            placement = Placement(Split.COLUMNS, padded_to=padded)
            self.add_parameter("bias", (padded // place.columns,), placement, dtype, device)
            self.whole_rows["bias"] = vocabulary
            nn.init.zeros_(self.bias)
        else:
            self.register_parameter("bias", None)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[b/r, ..., h/c] -> [b/r, ..., v/c]."""
        weight = turned(self.weight, self.group) if self.is_tied else self.weight
        bias = None if self.bias is None else replicated(self.bias, self.group.along_rows)
        rows = hidden.reshape(-1, hidden.shape[-1])
        return multiply(rows, weight, self.group, bias).view(*hidden.shape[:-1], -1)

    def extra_repr(self) -> str:
        """Sizes of the whole layer."""
        return f"{self.features}, {self.vocabulary}, tied={self.is_tied}"


class LabelHead2D(Layer2D):
    """A classifier's scores [b/r, ..., labels] of activations [b/r, ..., h/c], the same on all columns. All columns
    compute the same loss of them.

    Args:
        features: h; columns divide it.
        labels: number of scores.
        group: the mesh.
        bias: the layer has one, whole on each rank.
        dtype: of the parameters.
        device: of the parameters.

    Raises:
        ValueError: columns do not divide the features.
    """

    def __init__(
        self,
        features: int,
        labels: int,
        group: MeshGroup,
        *,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: object = None,
    ):
        super().__init__(group)
        check_divides(f"LabelHead2D({features}, {labels}): features", features, group.place, "columns")
        shape = labels, features // group.place.columns
        self.add_parameter("weight", shape, Placement(Split.COLUMNS), dtype, device)
        bound = 1 / math.sqrt(features)
        nn.init.uniform_(self.weight, -bound, bound)
        if bias:
            self.add_parameter("bias", (labels,), Placement(Split.WHOLE), dtype, device)
            nn.init.zeros_(self.bias)
        else:
            self.register_parameter("bias", None)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[b/r, ..., h/c] -> [b/r, ..., labels]."""
        weight, line = replicated(self.weight, self.group.along_rows), self.group.along_columns
        mine = nn.functional.linear(hidden, weight)
        scores = world_total(mine.to(sum_dtype(mine.dtype)), line).to(mine.dtype)
        return scores if self.bias is None else scores + replicated(self.bias, self.group.along_rows)


def whole_logits(logits: torch.Tensor, vocabulary: int, group: MeshGroup) -> torch.Tensor:
    """All-gathers logits [b/r, ..., v/c] over columns: [b/r, ..., vocabulary]. Not differentiable."""
    return torch.cat(group.along_columns.gather(logits.detach()), dim=-1)[..., :vocabulary]


class CrossEntropy2D(nn.Module):
    """Mean over all tokens of the whole batch, equal on all ranks. Every rank must call ``backward``; together they
    compute the gradients once.

    Args:
        vocabulary: number of real tokens; logits after them are ignored.
        group: the mesh.
        ignore_index: label of tokens that do not count.
    """

    def __init__(self, vocabulary: int, group: MeshGroup, *, ignore_index: int = -100):
        super().__init__()
        self.vocabulary, self.group, self.ignore_index = vocabulary, group, ignore_index

    def forward(
        self, logits: torch.Tensor, labels: torch.Tensor, num_targets: torch.Tensor | float | None = None
    ) -> torch.Tensor:
        """The loss: a scalar in float32 (float64 for such logits).

        Args:
            logits: [b/r, ..., v/c].
            labels: int64 [b/r, ...], shifted.
            num_targets: divisor of the sum; None: labels of the whole batch that count.

        Raises:
            ValueError: shapes do not fit, or a label on the CPU is outside the vocabulary.
        """
        self._check(logits, labels)
        rows, targets = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        line = self.group.along_columns
        mine = _CrossEntropySum.apply(rows, targets, line, self.vocabulary, self.ignore_index)
        if num_targets is None:
            num_targets = self.group.along_rows.sum((targets != self.ignore_index).sum())
        return world_total(mine, self.group.along_rows) / num_targets

    def _check(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        if logits.shape[:-1] != labels.shape:
            raise ValueError(f"logits are {list(logits.shape)}, labels {list(labels.shape)}; give [..., v/c] and [...]")
        if labels.device.type == "cpu":
            wrong = labels[(labels != self.ignore_index) & ((labels < 0) | (labels >= self.vocabulary))]
            if wrong.numel():
                raise ValueError(
                    f"a label is {wrong[0].item()}; give 0 to {self.vocabulary - 1}, or {self.ignore_index} for tokens "
                    "that do not count"
                )


class _CrossEntropySum(torch.autograd.Function):
    """Sum of the losses of this row's tokens. The gradient is softmax - onehot.

    Only the logits of this rank's columns and their gradient exist, in their own dtype. float32 values exist for some
    tokens at a time.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, line: Line, vocabulary: int, ignore_index: int
    ) -> torch.Tensor:
        first = line.rank * logits.shape[1]
        real = min(max(vocabulary - first, 0), logits.shape[1])
        dtype = sum_dtype(logits.dtype)
        here = logits[:, :real]
        most = here.amax(-1).to(dtype) if real else logits.new_full(labels.shape, -math.inf, dtype=dtype)
        most = line.maximum(most)
        counts = labels != ignore_index
        index = labels - first
        is_here = counts & (index >= 0) & (index < real)
        index = torch.where(is_here, index, 0)
        sums = logits.new_zeros((2, len(labels)), dtype=dtype)
        for tile in _tiles(here):
            wide = here[tile].to(dtype) - most[tile, None]
            sums[1, tile] = torch.where(is_here[tile], wide.gather(1, index[tile, None])[:, 0], 0.0)
            sums[0, tile] = wide.exp_().sum(-1)
        total, target = line.sum(sums)
        lse = total.log()
        ctx.save_for_backward(logits, lse + most, counts, is_here, index)
        ctx.real = real
        return torch.where(counts, lse - target, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        logits, lse, counts, is_here, index = ctx.saved_tensors
        out = torch.zeros_like(logits)
        here = logits[:, : ctx.real]
        for tile in _tiles(here):
            wide = (here[tile].to(lse.dtype) - lse[tile, None]).exp_()
            wide.scatter_add_(1, index[tile, None], -is_here[tile, None].to(wide.dtype))
            out[tile, : ctx.real] = wide.mul_((counts[tile] * grad)[:, None])
        return out, None, None, None, None


def _tiles(logits: torch.Tensor) -> Iterator[slice]:
    """Slices of rows that may have copies at the same time; none if a row has no elements."""
    if logits.shape[1]:
        each = max(_TILE_LOGITS // logits.shape[1], 1)
        yield from (slice(begin, begin + each) for begin in range(0, len(logits), each))
