"""Evaluation and ``generate`` on a GPU within a budget in which training just fits."""

from __future__ import annotations

import pytest
import torch

from patrickstar import MemoryBudgetError
from tests.engine.test_evaluation_memory import MODELS, SHAPE, case_of, check_fits
from tests.training import make_config, train

pytestmark = pytest.mark.gpu

LARGER = {**SHAPE, "vocab_size": 32000, "hidden_size": 256, "intermediate_size": 512}
BUDGETS = [int(2**30 * 0.7**step) for step in range(13)]


@pytest.mark.parametrize("loss", ["whole", "fused"])
@pytest.mark.parametrize("name", MODELS)
def test_they_fit_where_training_fits(name, loss):
    case = case_of(name, LARGER, tokens_per_sample=1024)
    config = make_config("bf16", activations={"loss": loss})
    fits = []
    for budget in BUDGETS:
        try:
            train(case, {**config, "device_memory": budget}, steps=2)
        except (MemoryBudgetError, torch.OutOfMemoryError):
            break
        fits.append(budget)
    assert 0 < len(fits) < len(BUDGETS)
    check_fits(case, config, fits[-1])
