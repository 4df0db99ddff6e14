import pytest
import torch

from patrickstar import _C
from tests.bits import assert_same_bits
from tests.quant.formulas import NF4, Int8, Nf4, dynamic_map

ISAS = _C.optim.supported_isas()
DTYPES = {torch.float32: _C.DType.FLOAT32, torch.bfloat16: _C.DType.BFLOAT16, torch.float16: _C.DType.FLOAT16}
NUMELS = [1, 2, 63, 64, 65, 200, 256, 4096, 16384, 16385, 3 * 16384 + 77, 100_003]
QUANT = {"nf4": _C.QuantType.NF4, "int8": _C.QuantType.INT8}


def some_values(numel: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(numel, generator=generator) * 0.02
    values[::97] *= 30
    values[numel // 3 : numel // 3 + 300] = 0
    values[numel // 2 : numel // 2 + 70] *= 1e-30
    values[-3:] = -0.0
    return values


def quantize(isa: str, kind: str, values: torch.Tensor, threads: int = 2) -> torch.Tensor:
    array = torch.zeros(_C.quant.num_bytes(QUANT[kind], values.numel()), dtype=torch.uint8)
    _C.quant.quantize(isa, QUANT[kind], values.data_ptr(), values.numel(), array.data_ptr(), threads)
    return array


def dequantize(isa: str, kind: str, array: torch.Tensor, numel: int, dtype: torch.dtype, threads: int = 2):
    out = torch.empty(numel, dtype=dtype)
    _C.quant.dequantize(isa, QUANT[kind], array.data_ptr(), numel, out.data_ptr(), DTYPES[dtype], threads)
    return out


def parts(kind: str, array: torch.Tensor, numel: int) -> dict[str, torch.Tensor]:
    where = _C.quant.layout(QUANT[kind], numel)
    if kind == "int8":
        count = -(-numel // 256)
        scales = array[where["scales"] :][: 4 * count].view(torch.float32)
        return {"codes": array[where["codes"] :][:numel].view(torch.int8), "scales": scales}
    num_blocks = -(-numel // 64)
    return {
        "codes": array[where["codes"] :][: -(-numel // 2)],
        "block_scales": array[where["block_scales"] :][:num_blocks],
        "scales": array[where["scales"] :][: 4 * -(-num_blocks // 256)].view(torch.float32),
        "offset": array[where["offset"] :][:4].view(torch.float32)[0],
    }


def test_maps():
    assert torch.tensor(_C.quant.NF4_VALUES).equal(NF4)
    assert torch.tensor(_C.quant.DYNAMIC_VALUES).equal(dynamic_map())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", QUANT)
def test_published_formulas(isa, kind):
    for numel in NUMELS:
        values = some_values(numel)
        expected = Nf4.of(values) if kind == "nf4" else Int8.of(values)
        array = quantize(isa, kind, values)
        for name, stored in parts(kind, array, numel).items():
            assert_same_bits(stored, getattr(expected, name), f"{name} of {numel} elements")
        for dtype in DTYPES:
            assert_same_bits(dequantize(isa, kind, array, numel, dtype), expected.values(dtype), f"{numel} {dtype}")


@pytest.mark.parametrize("kind", QUANT)
def test_instruction_sets_and_threads_agree(kind):
    values = some_values(100_003)
    arrays = [quantize(isa, kind, values, threads) for isa in ISAS for threads in (1, 3)]
    for array in arrays[1:]:
        assert array.equal(arrays[0])
    for dtype in DTYPES:
        outs = [dequantize(isa, kind, arrays[0], values.numel(), dtype, t) for isa in ISAS for t in (1, 3)]
        for out in outs[1:]:
            assert_same_bits(out, outs[0])


def test_denormals_do_not_depend_on_the_callers_mode():
    values = some_values(4096) * 1e-36
    array = quantize("scalar", "nf4", values)
    expected = Nf4.of(values).values(torch.float32)
    assert torch.set_flush_denormal(True)
    try:
        outs = [dequantize(isa, "nf4", array, 4096, torch.float32, 1) for isa in ISAS]
    finally:
        torch.set_flush_denormal(False)
    is_denormal = (expected != 0) & (expected.abs() < torch.finfo(torch.float32).tiny)
    assert int(is_denormal.sum()) > 500
    for out in outs:
        assert_same_bits(out, expected)


def test_bytes_per_element():
    """QLoRA: 4 bits, and 0.127 for the scales."""
    numel = 2**24
    assert _C.quant.num_bytes(_C.QuantType.NF4, numel) * 8 / numel == pytest.approx(4.127, abs=1e-3)
    assert _C.quant.num_bytes(_C.QuantType.INT8, numel) / numel == 1 + 4 / 256


@pytest.mark.parametrize("kind", QUANT)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(kind, wrong):
    values = some_values(1000)
    values[777] = wrong
    with pytest.raises(ValueError, match="NaN or infinite"):
        quantize(ISAS[-1], kind, values)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="none"):
        _C.quant.num_bytes(_C.QuantType.NONE, 10)
    with pytest.raises(ValueError, match="0 elements"):
        _C.quant.num_bytes(_C.QuantType.NF4, 0)
    with pytest.raises(ValueError, match="lacks"):
        _C.quant.quantize("mmx", _C.QuantType.NF4, 0, 10, 0, 1)
