"""The section ``quantization``: frozen weights in 4 or 8 bits."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from patrickstar.choices import QuantizationType
from patrickstar.config.fates import HONOURED
from patrickstar.config.values import Names, Section, ignoring_case


class QuantizationConfig(Section):
    """The section ``quantization``: frozen weights of linear layers, stored in 4 or 8 bits and dequantised on use."""

    type: Annotated[QuantizationType, BeforeValidator(ignoring_case(QuantizationType)), HONOURED] = QuantizationType.NF4
    """``"nf4"``: 0.516 bytes per weight with double quantisation, as in QLoRA and bitsandbytes. ``"int8"``: 1.016
    bytes, in blocks of 256 with a float32 scale. Precision is lost; for a given type results are bitwise the same for
    any budget.
    """
    skip_modules: Annotated[Names, HONOURED] = ()
    """Names of modules whose weights keep the compute dtype, beside the output embeddings (``lm_head``): a whole dotted
    name, or a part of one between dots, such as ``"gate"`` or ``"0"``.
    """
