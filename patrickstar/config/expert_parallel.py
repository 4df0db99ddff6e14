"""The section ``expert_parallel``: this engine's key, and those of DeepSpeed's AutoEP."""

from __future__ import annotations

from typing import Annotated

from patrickstar.config.fates import HONOURED, mapped
from patrickstar.config.values import AtLeast0, AtLeast1, Section, Switch


class ExpertParallelConfig(Section):
    """The section ``expert_parallel``: each rank has some experts of every layer, and tokens travel to them."""

    size: Annotated[AtLeast1, HONOURED] = 1
    """Neighbouring ranks that divide the experts of each layer; it divides the number of ranks, and of experts. Other
    parameters, and batches, are as without it. The model's experts are those that transformers computes by its registry
    (``experts_implementation``).
    """
    enabled: Annotated[Switch, HONOURED] = True
    """False: as without the section."""
    autoep_size: Annotated[AtLeast0, mapped("expert_parallel.size", "so many ranks divide the experts; 0 is 1")] = 0
    """Ranks that divide the experts; 0: expert parallelism is off."""
