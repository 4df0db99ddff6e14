import pytest

from tests.engine import test_momentum_rules as rules
from tests.engine import test_stochastic_masters as masters
from tests.gpu.test_equality import MIB, WIDE
from tests.training import assert_same, promised, train

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


@pytest.mark.parametrize("rule", rules.PARAMS)
@pytest.mark.parametrize("states", ["fp32", "8bit"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_sides_and_budgets(rule, states, precision):
    options = {"states": states, "gradient_clipping": 0.1}
    on_gpu = train(WIDE, rules.config_of(rule, precision, default_chunk_size=4 * MIB, **options))
    on_cpu = train(WIDE, rules.config_of(rule, precision, on_device=False, default_chunk_size=4 * MIB, **options))
    assert on_gpu.report["num_device_state_chunks"] > 0 == on_cpu.report["num_device_state_chunks"]
    assert_same(on_gpu, on_cpu)
    budget = on_gpu.report["num_parameters"] * 14 // 4
    assert_same(train(WIDE, rules.config_of(rule, precision, device_memory=budget, **options)), on_gpu)


@pytest.mark.parametrize("states", ["fp32", "8bit"])
@pytest.mark.parametrize("lion", [False, True])
def test_no_master(states, lion):
    on_gpu = train(WIDE, masters.config_of(states, lion=lion, default_chunk_size=4 * MIB))
    on_cpu = train(WIDE, masters.config_of(states, lion=lion, on_device=False))
    assert promised(on_gpu.report) > 0 < promised(on_cpu.report)
    assert_same(on_gpu, on_cpu)
