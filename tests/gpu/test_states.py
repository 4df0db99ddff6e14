import pytest

from tests.engine.test_states import config_of
from tests.gpu.test_equality import MIB, WIDE
from tests.training import assert_same, promised, train

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


@pytest.mark.parametrize("states", ["bf16", "8bit"])
@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp16"])
def test_sides_and_budgets(states, precision):
    options = {"gradient_clipping": 0.1, "default_chunk_size": 4 * MIB}
    on_gpu = train(WIDE, config_of(states, precision, **options))
    on_cpu = train(WIDE, config_of(states, precision, on_device=False, **options))
    assert on_gpu.report["num_device_state_chunks"] > 0 == on_cpu.report["num_device_state_chunks"]
    assert on_gpu.grad_norms == on_cpu.grad_norms
    assert_same(on_gpu, on_cpu)
    budget = on_gpu.report["num_parameters"] * 14 // 4
    assert_same(train(WIDE, config_of(states, precision, device_memory=budget, gradient_clipping=0.1)), on_gpu)


@pytest.mark.parametrize("states", ["bf16", "8bit"])
def test_committed_in_backward(states):
    on_gpu = train(WIDE, config_of(states, speculation="commit", default_chunk_size=4 * MIB))
    on_cpu = train(WIDE, config_of(states, speculation="commit", on_device=False))
    assert promised(on_gpu.report) > 0 < promised(on_cpu.report)
    assert_same(on_gpu, on_cpu)
