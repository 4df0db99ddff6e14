"""Compares codes, scales and values with those of bitsandbytes on the CPU: ``python -m
tests.quant.against_bitsandbytes``.

Needs ``pip install bitsandbytes`` (43 MB), which the tests do not require. Recorded output:
benchmark/results/cpu-bitsandbytes.txt.
"""

import platform

import torch

from patrickstar import _C
from tests.quant.test_kernels import dequantize, parts, quantize, some_values

SHAPES = [(64, 64), (512, 1024), (2048, 4096), (1000, 257 * 4)]


def weights(shape: tuple[int, int]) -> torch.Tensor:
    return some_values(shape[0] * shape[1]).view(shape)


def differing(one: torch.Tensor, other: torch.Tensor) -> str:
    one, other = one.reshape(-1), other.reshape(-1)
    count = int((one != other).sum())
    return "equal" if count == 0 else f"{count} of {one.numel()} differ"


def compare_nf4(shape: tuple[int, int], dtype: torch.dtype) -> list[str]:
    from bitsandbytes import functional

    values = weights(shape).to(dtype)
    numel = values.numel()
    array = quantize(_C.optim.isa(), "nf4", values.float().reshape(-1).contiguous())
    ours = parts("nf4", array, numel)
    codes, state = functional.quantize_4bit(values, blocksize=64, quant_type="nf4", compress_statistics=True)
    own_last_bits = (ours["offset"].view(torch.int32) - state.offset.view(torch.int32)).item()
    map_ = functional.create_dynamic_map()
    nested = functional.QuantState(absmax=ours["scales"].clone(), blocksize=256, code=map_, dtype=torch.float32)
    given = functional.QuantState(
        absmax=ours["block_scales"].clone(),
        shape=values.shape,
        dtype=dtype,
        blocksize=64,
        code=state.code,
        quant_type="nf4",
        offset=ours["offset"],
        state2=nested,
    )
    theirs = functional.dequantize_4bit(ours["codes"].clone().unsqueeze(1), given)
    mine = dequantize(_C.optim.isa(), "nf4", array, numel, dtype)
    whole = functional.dequantize_4bit(codes, state)
    return [
        f"codes {differing(ours['codes'], codes)}",
        f"offset {own_last_bits:+d} units in the last place",
        f"codes of scales {differing(ours['block_scales'], state.absmax)}",
        f"our codes and scales, dequantised by bitsandbytes: {differing(mine, theirs)}",
        f"quantised and dequantised by bitsandbytes: {differing(mine, whole)}, by at most "
        f"{float((mine.float() - whole.float().reshape(-1)).abs().max() / values.float().abs().max()):.1e} of the "
        "largest weight",
    ]


def compare_int8(shape: tuple[int, int], dtype: torch.dtype) -> list[str]:
    from bitsandbytes import functional

    values = weights(shape).to(dtype)
    values[values == 0] = 1e-3  # a row of zeros is divided by zero there
    numel = values.numel()
    array = quantize(_C.optim.isa(), "int8", values.float().reshape(-1).contiguous())
    ours = parts("int8", array, numel)
    rows = values.float().view(-1, 256)
    codes, stats, _ = functional.int8_vectorwise_quant(rows)
    theirs = functional.int8_vectorwise_dequant(codes, stats).to(dtype)
    mine = dequantize(_C.optim.isa(), "int8", array, numel, dtype)
    return [
        f"codes {differing(ours['codes'], codes)}",
        f"scales {differing(ours['scales'], stats)}",
        f"values {differing(mine, theirs)}",
    ]


def main() -> None:
    import bitsandbytes

    print(
        f"bitsandbytes {bitsandbytes.__version__}, PyTorch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"{platform.machine()}, {_C.optim.isa()}"
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for shape in SHAPES:
            print(f"nf4 {shape[0]} x {shape[1]} {dtype}: " + "; ".join(compare_nf4(shape, dtype)))
        for shape in SHAPES[:3]:  # whole rows
            print(f"int8 in rows of 256, {shape[0]} x {shape[1]} {dtype}: " + "; ".join(compare_int8(shape, dtype)))


if __name__ == "__main__":
    main()
