"""The section ``fp8``: products in 8-bit floating point."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from patrickstar.choices import Fp8Recipe
from patrickstar.config.fates import HONOURED
from patrickstar.config.values import Names, Section, Switch, ignoring_case


class Fp8Config(Section):
    """The section ``fp8``: linear layers and experts multiply in 8-bit floating point (docs/guides/fp8.md). It needs
    ``bf16``.
    """

    enabled: Annotated[Switch, HONOURED] = True
    """False: as without the section."""
    recipe: Annotated[Fp8Recipe, BeforeValidator(ignoring_case(Fp8Recipe)), HONOURED] = Fp8Recipe.ROWWISE
    """Elements that share a scale. ``"rowwise"``: those that a result sums over. ``"tensorwise"``: a whole matrix; its
    gradients have 5 bits of exponent. ``"block"``: 128, and 128 x 128 of a weight; it is the most precise and the
    slowest.
    """
    skip_modules: Annotated[Names, HONOURED] = ()
    """Names of modules that compute in bfloat16, beside output embeddings, routers, adapters and small layers: a whole
    dotted name, or a part of one between dots, such as ``"down_proj"``.
    """
