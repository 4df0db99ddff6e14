import pytest
import torch
from torch import nn

from patrickstar.runtime import initialize_engine
from tests.training import make_config

NUM_LAYERS, WIDTH = 24, 64
CHUNK_BYTES = 4 * WIDTH * WIDTH
WEIGHT_BYTES = NUM_LAYERS * CHUNK_BYTES
KEPT = 4  # chunks: those that a pass leaves behind, and one that comes


def build():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))


def uploads(engine, count):
    """Bytes of each of some evaluations."""
    found = []
    for _ in range(count):
        before = engine.report()["uploaded_bytes"]
        with torch.no_grad():
            engine(torch.ones(2, WIDTH))
        found.append(engine.report()["uploaded_bytes"] - before)
    return found


@pytest.mark.parametrize(("share", "trained"), [(2.5, False), (1.5, True), (0.6, True)])
def test_weights_that_fit_stay_from_one_evaluation_to_the_next(share, trained):
    """``share``: device memory over the weights' bytes."""
    memory = int(share * WEIGHT_BYTES)
    config = make_config("fp32", default_chunk_size=WIDTH * WIDTH, device_memory=memory)
    config["optimizer"]["params"]["use_hybrid_adam"] = False
    engine, optimizer = initialize_engine(build, 0, config)
    with engine:
        if trained:
            for _ in range(2):
                engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        first, *others = uploads(engine, 5)
        print(first / CHUNK_BYTES, [each / CHUNK_BYTES for each in others])
        assert first <= WEIGHT_BYTES
        missing = max(WEIGHT_BYTES - memory, 0)
        assert max(others) <= missing + KEPT * CHUNK_BYTES * (missing > 0)
