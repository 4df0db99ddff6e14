import pytest
import torch

from patrickstar import _C
from tests.bits import assert_same_bits
from tests.engine.test_quantized import TOWER, Tower
from tests.models import Case
from tests.quant.test_kernels import DTYPES, NUMELS, QUANT, dequantize, quantize, some_values
from tests.training import assert_same, make_host_config, train

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


@pytest.mark.parametrize("kind", QUANT)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("misalign", [0, 1])
def test_the_kernel_gives_the_bits_of_the_hosts(kind, dtype, misalign):
    for numel in NUMELS:
        array = quantize("scalar", kind, some_values(numel))
        expected = dequantize("scalar", kind, array, numel, dtype)
        on_device = array.cuda()
        out = torch.full((numel + misalign + 8,), float("nan"), dtype=dtype, device="cuda")
        stream = torch.cuda.current_stream().cuda_stream
        _C.quant.cuda_dequantize(
            QUANT[kind], on_device.data_ptr(), numel, out[misalign:].data_ptr(), DTYPES[dtype], stream
        )
        assert_same_bits(out[misalign : misalign + numel].cpu(), expected, f"{numel}")
        assert out[misalign + numel :].isnan().all() and out[:misalign].isnan().all()


def deep_tower() -> Tower:
    """67 M frozen weights: 134 MB in 16 bits, 35 MB in NF4."""
    return Tower(num_layers=64, width=1024)


@pytest.mark.parametrize("kind", QUANT)
def test_budgets_change_no_bit(kind):
    case = Case(deep_tower, TOWER.batch)
    config = make_host_config("bf16", quantization={"type": kind}, default_chunk_size=2**20)
    reference = train(case, config, steps=4)
    small = train(case, {**config, "device_memory": "112MiB"}, steps=4)
    assert small.report["uploaded_bytes"] > reference.report["uploaded_bytes"]
    assert_same(small, reference)
    late = {**config, "device_memory": "112MiB", "delays": {"max_random_us": 200}}
    assert_same(train(case, late, steps=4), reference)
    config["optimizer"]["params"]["use_hybrid_adam"] = True
    assert_same(train(case, {**config, "device_memory": "112MiB"}, steps=4), reference)
