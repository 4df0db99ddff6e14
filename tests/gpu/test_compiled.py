import pytest
import torch

from tests.gpu.conftest import deterministic_algorithms
from tests.gpu.test_equality import MIB, WIDE
from tests.models import Case
from tests.training import assert_same, make_config, train

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def inductor():
    """Starts inductor's processes. Algorithms are deterministic in all tests here, since Dynamo guards on it."""
    with deterministic_algorithms():
        torch.compile(lambda x: torch.tanh(x).sum())(torch.ones(64, device="cuda", requires_grad=True)).backward()
        yield


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def resident(inductor, request):
    torch.compiler.reset()
    case = Case(lambda: torch.compile(WIDE.build()), WIDE.batch)
    yield request.param, case, train(case, make_config(request.param, default_chunk_size=4 * MIB), steps=6)
    torch.compiler.reset()


def test_a_quarter_of_model_data_changes_no_number(resident):
    precision, case, unlimited = resident
    model_data = unlimited.report["num_parameters"] * (16 if precision == "fp32" else 14)
    torch.cuda.empty_cache()
    run = train(case, make_config(precision, device_memory=model_data // 4), steps=6)
    print(f"{precision}: peak {run.report['device_peak_bytes'] / MIB:.0f} of {model_data / 4 / MIB:.0f} MiB")
    assert run.report["device_peak_bytes"] <= model_data // 4
    assert run.report["uploaded_bytes"] > 0
    assert_same(run, unlimited)


def test_losses_are_near_those_of_the_uncompiled_model(resident):
    precision, _, run = resident
    eager = train(WIDE, make_config(precision, default_chunk_size=4 * MIB), steps=6)
    assert run.losses == pytest.approx(eager.losses, rel=1e-4 if precision == "fp32" else 5e-2)
