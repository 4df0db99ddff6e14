"""The models' own ways to give experts equal work: a loss of the routers, or biases that the user's loop corrects."""

from collections.abc import Callable

import torch
from torch import nn

from tests.ranks.mixed_models import MIXTURES, build

BIASED = ["DeepseekV3", "Glm4Moe"]
"""Families whose routers have a correction bias."""
WITH_LOSS = [*(name for name in MIXTURES if name not in (*BIASED, "Llama4Text")), "Qwen3VLMoe", "Qwen3_5Moe"]
"""Families with an auxiliary loss."""


def build_balanced(family: str, experts: str = "eager") -> Callable[[], nn.Module]:
    """``build``, with the auxiliary loss if the family has one."""

    def make() -> nn.Module:
        model = build(family, experts)()
        if family in WITH_LOSS:
            model.config.output_router_logits = model.config.get_text_config().output_router_logits = True
        return model

    return make


class RouterBiases:
    """Counts the tokens of each expert, and corrects the biases by DeepSeek-V3's rule."""

    def __init__(self, module: nn.Module):
        self._routers = [each for each in module.modules() if hasattr(each, "e_score_correction_bias")]
        self._loads = [torch.zeros_like(router.e_score_correction_bias) for router in self._routers]
        for router, load in zip(self._routers, self._loads, strict=True):
            router.register_forward_hook(lambda *call, load=load: _count(load, call[-1][2]))

    @torch.no_grad()
    def update(self, sum_over_ranks: Callable[[torch.Tensor], object] = lambda load: None) -> None:
        """Called between two steps."""
        for router, load in zip(self._routers, self._loads, strict=True):
            sum_over_ranks(load)
            router.e_score_correction_bias += 0.01 * (load.mean() - load).sign()
            load.zero_()


def _count(load: torch.Tensor, chosen: torch.Tensor) -> None:
    load += torch.bincount(chosen.flatten(), minlength=len(load))
