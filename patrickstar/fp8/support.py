"""Devices that multiply in 8 bits."""

from __future__ import annotations

import torch

from patrickstar.choices import Fp8Recipe
from patrickstar.fp8.casting import Sides, cast
from patrickstar.fp8.linear import RECIPES
from patrickstar.fp8.products import product

_LEAST_CAPABILITY = (8, 9)
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


def _difference(device: torch.device, recipe: Fp8Recipe) -> float:
    """The largest difference of a product of each kind, over its largest entry."""
    chosen, generator = RECIPES[recipe], torch.Generator().manual_seed(0)
    sizes = (_TRIAL_SIZE, _TRIAL_SIZE)
    x, weight, grad = (torch.randn(sizes, generator=generator, device="cpu").bfloat16() for _ in range(3))
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


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the largest entry; infinite for a NaN."""
    difference = (found - expected).abs().max() / expected.abs().max()
    return difference.nan_to_num(nan=float("inf")).item()
