"""Devices that multiply in 8 bits."""

from __future__ import annotations

import functools

import torch

from patrickstar.choices import Fp8Recipe
from patrickstar.fp8.casting import TILE, Sides, cast
from patrickstar.fp8.grouped import (
    Groups,
    cast_rows,
    cast_turned_weights,
    cast_weights,
    multiply,
    multiply_columns,
    turn,
)
from patrickstar.fp8.linear import RECIPES
from patrickstar.fp8.products import product

_LEAST_CAPABILITY = (8, 9)
_GROUPED_CAPABILITY = (9, 0)
_TRIAL_SIZE = 512
_MOST_DIFFERENCE = 2**-7  # of a product's entries from those on the host, both rounded to bfloat16


def check_device(device: torch.device, recipe: Fp8Recipe) -> None:
    """Tries the recipe's products on a GPU, against those of the same values on the host. The CPU emulates any recipe.

    Raises:
        ValueError: the GPU, or this PyTorch, cannot multiply so.
    """
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        raise ValueError(
            f"fp8 is enabled, but {torch.cuda.get_device_name(device)} has compute capability "
            f"{capability[0]}.{capability[1]}; products in 8 bits need 8.9 or higher (Ada, Hopper, Blackwell); leave "
            "fp8 out"
        )
    others = " or ".join(f'"{other.value}"' for other in Fp8Recipe if other is not recipe)
    try:
        difference = _difference(device, recipe)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f'fp8.recipe is "{recipe.value}", whose products PyTorch {torch.__version__} does not compute on '
            f"{torch.cuda.get_device_name(device)} ({reason}); give {others}"
        ) from error
    if difference > _MOST_DIFFERENCE:
        raise ValueError(
            f'fp8.recipe is "{recipe.value}", whose products on {torch.cuda.get_device_name(device)} with PyTorch '
            f"{torch.__version__} differ from exact ones by {difference:.2g}; at most {_MOST_DIFFERENCE:.2g} is "
            f"rounding; give {others}"
        )


@functools.cache
def exclusion_of_grouped(device: torch.device) -> str | None:
    """Reason why ``device`` does not multiply groups in 8 bits, by a trial; None: it does. The CPU emulates it."""
    if device.type != "cuda":
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability != _GROUPED_CAPABILITY:  # another GPU's error may end the process' use of it
        return f"experts, whose products in 8 bits PyTorch has for Hopper, not for {torch.cuda.get_device_name(device)}"
    try:
        found, expected = _trial_of_groups(device), _trial_of_groups(torch.device("cpu"))
    except RuntimeError as error:
        return f"experts, whose products in 8 bits PyTorch {torch.__version__} refuses: {str(error).splitlines()[0]}"
    difference = max(_distance(*pair) for pair in zip(found, expected, strict=True))
    if difference > _MOST_DIFFERENCE:
        return f"experts, whose products in 8 bits with PyTorch {torch.__version__} differ by {difference:.2g}"
    return None


def _trial_of_groups(device: torch.device) -> list[torch.Tensor]:
    """Products of each kind, of groups that are empty, small, and no multiples of 16."""
    generator = torch.Generator().manual_seed(0)
    ends = torch.tensor([0, 7, 7, 300, 475], dtype=torch.int32)
    num_rows, num_groups = int(ends[-1]), ends.numel()
    x, grad = (torch.randn(num_rows, size, generator=generator).bfloat16().to(device) for size in (2 * TILE, TILE))
    weights = torch.randn(num_groups, TILE, 2 * TILE, generator=generator).bfloat16().to(device)
    groups = Groups.of(ends.to(device), num_rows)
    rows, grads = cast_rows(x), cast_rows(grad)
    return [
        multiply(rows, cast_weights(weights), groups),
        multiply(rows, cast_weights(weights), groups, RECIPES[Fp8Recipe.ROWWISE].forward_sum),
        multiply(grads, cast_turned_weights(weights), groups),
        multiply_columns(turn(grads, groups), turn(rows, groups), groups),
    ]


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the largest entry."""
    wanted = expected.float().cpu()
    difference = (found.float().cpu() - wanted).abs().max() / wanted.abs().max()
    return difference.nan_to_num(nan=float("inf")).item()


def _difference(device: torch.device, recipe: Fp8Recipe) -> float:
    """The largest difference of a product of each kind, over its largest entry."""
    chosen, generator = RECIPES[recipe], torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(_TRIAL_SIZE, _TRIAL_SIZE, generator=generator).bfloat16() for _ in range(3))
    worst = 0.0
    for a, a_block, b, b_block in (
        (x, chosen.inputs, weight, chosen.weights),
        (grad, chosen.gradients, x, chosen.inputs),
    ):
        found = []
        for place in (torch.device("cpu"), device):
            left = cast(a.to(place), a_block, Sides.PLAIN)[0]
            right = cast(b.to(place), b_block, Sides.PLAIN)[0]
            found.append(product(left, right, _TRIAL_SIZE).float().cpu())
        expected, computed = found
        worst = max(worst, _distance(computed, expected))
    return worst
