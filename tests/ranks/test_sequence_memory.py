import pytest
import torch

from patrickstar.module.preprocess import make_layout, plan_params
from patrickstar.planning.divided import PlannedDivision
from patrickstar.planning.machines import H200
from patrickstar.planning.timeline import make_timeline
from patrickstar.planning.uses import trace_uses
from patrickstar.sequence.choice import Links
from patrickstar.sequence.layout import Mode
from tests.distributed import run_ranks
from tests.ranks.activations import LLAMA, saved_bytes

LENGTH = 128
CASES = [(1, "auto", LENGTH), (2, "zigzag", 2 * LENGTH), (4, "zigzag", 4 * LENGTH), (4, "ulysses", 4 * LENGTH)]


def planned_tide(size, mode, length):
    with torch.device("meta"):
        module = LLAMA.build()
    params = plan_params(module, torch.float32, use_cpu_embedding=False)
    # Transfers take all of the time, of which ulysses has fewer; or none, where the ring is taken.
    links = Links(gbps=1e-3) if mode == "ulysses" else Links(attention_tflops=1e-9)
    division = PlannedDivision(module, 1, length, size, links)
    assert division.choice.mode is Mode(mode)
    inputs = {**division.inputs(1, module), "use_cache": False}
    uses = trace_uses(module, params, torch.float32, inputs, H200.gpu, divisions=[division])
    layout = make_layout(params, 8192)
    return make_timeline(uses, layout, [False] * layout.num_chunks).tide_peak_bytes


def test_memory_is_flat_where_the_length_grows_with_the_ranks():
    by_rank = run_ranks(4, saved_bytes, CASES)
    for size, mode, length in CASES:
        print(size, mode, length, [found[CASES.index((size, mode, length))] for found in by_rank])
    for found in by_rank:
        alone, two, four, heads = (saved for saved, _ in found)
        assert two == pytest.approx(alone, rel=0.02)  # equal today
        assert four == pytest.approx(alone, rel=0.02)
        # The output by heads and by tokens; and each rank has one of two key heads, of all tokens.
        assert heads == alone + 4 * (LENGTH * 64 + 2 * LENGTH * (64 - 32))
    for case, (_, tide) in list(zip(CASES, by_rank[0], strict=True))[1:]:
        planned = planned_tide(*case)
        print(f"{case}: tide {tide} measured, {planned} planned, {planned / tide - 1:+.1%}")
        assert planned == pytest.approx(tide, rel=0.10)
