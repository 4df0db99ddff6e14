"""Evaluation and ``generate`` within a budget near training's least. The GPU's allocator leaves blocks in pieces, so
the least budget differs between runs.
"""

import pytest
import torch

from patrickstar import MemoryBudgetError
from tests.engine.test_memory import MODELS, SHAPE, case_of, check_fits
from tests.training import make_config, train

pytestmark = pytest.mark.gpu

LARGER = {**SHAPE, "vocab_size": 32000, "hidden_size": 256, "intermediate_size": 512}
BUDGETS = [int(2**32 * 0.7**step) for step in range(18)]


@pytest.mark.parametrize("loss", ["whole", "fused"])
@pytest.mark.parametrize("name", MODELS)
def test_they_fit_where_training_fits(name, loss):
    case = case_of(name, LARGER, tokens_per_sample=1024)
    config = make_config("bf16", default_chunk_size=2**20, activations={"loss": loss})
    fits = []
    for budget in BUDGETS:
        try:
            train(case, {**config, "device_memory": budget}, steps=2)
        except (MemoryBudgetError, torch.OutOfMemoryError):
            break
        fits.append(budget)
    print(name, loss, fits)
    assert 1 < len(fits) < len(BUDGETS)
    check_fits(case, config, fits[-2])
