"""Attention over a sharded sequence against float64. Tolerances are errors of PyTorch's own attention in the same
precision; each part of a sequence is rounded once more, so twice that error is allowed.
"""

import dataclasses
import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from patrickstar.sequence import HybridGroup, Mode, SequenceGroup, attention, block, positions_of_rank
from patrickstar.sequence.kernel_choice import AttentionDevice, Kernel
from patrickstar.sequence.kernels import token_major
from patrickstar.sequence.layout import Slice
from patrickstar.sequence.masking import Cover
from tests.distributed import run_ranks
from tests.ranks.sharded import Model, Run, train_all
from tests.ranks.test_sequence_parallel import GPT_OSS, GRANITE, NEMOTRON_H, QWEN3_5, QWEN3_NEXT
from tests.sequence.emulation import count_kernels, dense_attention, rule_of, sharded_attention

pytestmark = pytest.mark.gpu

BACKENDS = {
    Kernel.CUDNN: SDPBackend.CUDNN_ATTENTION,
    Kernel.FLASH: SDPBackend.FLASH_ATTENTION,
    Kernel.EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
    Kernel.PLAIN: SDPBackend.MATH,
}
NAMES = ["out", "grad q", "grad k", "grad v"]
LENGTH = 2048
WHOLE = Slice(0, LENGTH), Slice(0, LENGTH)


@pytest.fixture(autouse=True)
def _fast_kernels():
    with sdpa_kernel(list(BACKENDS.values())):
        yield


def tensors(dtype, heads=8, key_heads=8, width=64, length=LENGTH, value_width=None):
    generator = torch.Generator("cuda").manual_seed(3)

    def draw(heads, width):
        drawn = torch.randn(2, length, heads, width, generator=generator, device="cuda")
        return drawn.to(dtype).transpose(1, 2)

    value_width = value_width or width
    return draw(heads, width), draw(key_heads, width), draw(key_heads, value_width), draw(heads, value_width)


def errors(got, expected):
    return [((one.double() - other).norm() / other.norm()).item() for one, other in zip(got, expected, strict=True)]


def sdpa(q, k, v, grad, rule, backend):
    leaves = [part.detach().requires_grad_() for part in (q, k, v)]
    given, counts = {"is_causal": rule.masking.causal}, torch.ones(1, dtype=torch.bool, device=q.device)
    if rule.masking.cover(*WHOLE) is Cover.SOME:
        seen = rule.masking.mask(*WHOLE, q.device)
        counts = seen.any(dim=-1, keepdim=True)
        given = {"attn_mask": seen | ~counts}
    # Some backends have no grouped heads.
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in leaves[1:])
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(leaves[0], token_major(k), token_major(v), **given)
    out.backward(token_major(grad * counts))
    return [out.detach() * counts, *(leaf.grad for leaf in leaves)]


def assert_as_exact(got, parts, rule, backend):
    expected = dense_attention(*parts, rule)
    ours, theirs = errors(got, expected), errors(sdpa(*parts, rule, backend), expected)
    for name, own, other in zip(NAMES, ours, theirs, strict=True):
        print(f"{name}: {own:.2e}, PyTorch's {other:.2e}")
    assert all(part.isfinite().all() for part in got)
    assert all(own <= 2 * other for own, other in zip(ours, theirs, strict=True)), (ours, theirs)


def skip_without(kernel):
    if kernel is not Kernel.PLAIN and kernel not in AttentionDevice.of(torch.empty(0, device="cuda")).enabled:
        pytest.skip(f"{kernel} is not there")
    if kernel is Kernel.CUDNN and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("cuDNN is asked on Hopper alone")


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("key_heads", [8, 2])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", list(BACKENDS))
def test_each_kernel(monkeypatch, kernel, dtype, is_causal, key_heads, size):
    skip_without(kernel)
    calls, parts = count_kernels(monkeypatch), tensors(dtype, key_heads=key_heads)
    rule = rule_of(parts[0], causal=is_causal)
    with sdpa_kernel(BACKENDS[kernel]):
        got = sharded_attention(*parts, size, "zigzag", rule)
    assert {used for used, _ in calls} == {kernel}
    assert_as_exact(got, parts, rule, BACKENDS[kernel])


@pytest.mark.parametrize("width", [96, 128, 256])
def test_widths_of_heads(monkeypatch, width):
    calls, parts = count_kernels(monkeypatch), tensors(torch.bfloat16, heads=4, key_heads=2, width=width)
    rule = rule_of(parts[0], causal=True)
    got = sharded_attention(*parts, 2, "zigzag", rule)
    print(dict(calls))
    assert calls[Kernel.PLAIN, "forward"] == 0
    assert_as_exact(got, parts, rule, [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION])


def test_other_widths_of_values(monkeypatch):
    calls, parts = count_kernels(monkeypatch), tensors(torch.bfloat16, width=96, value_width=64)
    rule = rule_of(parts[0], causal=True)
    got = sharded_attention(*parts, 2, "zigzag", rule)
    assert calls[Kernel.PLAIN, "forward"] == 0
    assert_as_exact(got, parts, rule, [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])


def padding_of(side):
    real = torch.arange(LENGTH, device="cuda") < torch.tensor([[LENGTH], [LENGTH - 700]], device="cuda")
    return real.flip(1) if side == "left" else real


MASKS = {
    "window": {"causal": True, "window": (300, 0)},
    "documents": {"causal": True, "cu_seqlens": (0, 130, 135, LENGTH)},
    "both ways": {"cu_seqlens": (0, 900, LENGTH - 50), "length": LENGTH - 50},
    "padding left": {"causal": True, "padding": "left"},
    "padding right": {"padding": "right"},
}


@pytest.mark.parametrize("tile", [256, 4096])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masks(monkeypatch, dtype, name, tile):
    monkeypatch.setattr(block, "_TILE_TOKENS", tile)
    calls, parts = count_kernels(monkeypatch), tensors(dtype, key_heads=2)
    options = dict(MASKS[name])
    if "padding" in options:
        options["padding"] = padding_of(options["padding"])
    rule = rule_of(parts[0], **options)
    got = sharded_attention(*parts, 2, "zigzag", rule)
    print({f"{kernel.name} {direction}": number for (kernel, direction), number in calls.items()})
    assert calls[Kernel.EFFICIENT, "forward"] > 0 and calls[Kernel.PLAIN, "forward"] == 0
    assert_as_exact(got, parts, rule, SDPBackend.EFFICIENT_ATTENTION)


def test_float32():
    parts = tensors(torch.float32, key_heads=2)
    rule = rule_of(parts[0], causal=True)
    assert_as_exact(sharded_attention(*parts, 2, "zigzag", rule), parts, rule, SDPBackend.EFFICIENT_ATTENTION)


def test_dropout_and_float64():
    parts = [part[:, :, :512].double() for part in tensors(torch.float64, heads=4, key_heads=2)]
    results = []
    for device in ("cpu", "cuda"):
        *leaves, grad = (part.to(device).detach() for part in parts)
        for leaf in leaves:
            leaf.requires_grad_()
        out = attention(*leaves, SequenceGroup(), Mode.ZIGZAG, causal=True, dropout_p=0.2, seed=4)
        out.backward(grad)
        results.append([part.detach().cpu() for part in (out, *(leaf.grad for leaf in leaves))])
    assert max(errors(results[1], results[0])) < 1e-12


def assert_as_exact_as_without(got, expected, parts, rule):
    """Twice the error of PyTorch's attention without a soft cap and sinks is allowed."""
    plain = dataclasses.replace(rule, softcap=None)
    theirs = max(errors(sdpa(*parts, plain, SDPBackend.EFFICIENT_ATTENTION), dense_attention(*parts, plain)))
    ours = errors(got, expected)
    print([f"{own:.1e}" for own in ours], f"{theirs:.1e} without")
    assert all(part.isfinite().all() for part in got) and max(ours) <= 2 * theirs


def rule_named(name, parts, **scores):
    options = dict({"causal": {"causal": True}, "everything": {}, **MASKS}[name])
    if "padding" in options:
        options["padding"] = padding_of(options["padding"])
    return rule_of(parts[0], **scores, **options)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["causal", "everything", *MASKS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_soft_cap(monkeypatch, dtype, name, size):
    calls, parts = count_kernels(monkeypatch), tensors(dtype, key_heads=2)
    rule = rule_named(name, parts, softcap=1.5)
    got = sharded_attention(*parts, size, "zigzag", rule)
    print({f"{kernel.name} {direction}": number for (kernel, direction), number in calls.items()})
    assert calls[Kernel.FLEX, "forward"] > 0 and {used for used, _ in calls} <= {Kernel.FLEX, Kernel.PLAIN}
    assert_as_exact_as_without(got, dense_attention(*parts, rule), parts, rule)


@pytest.mark.parametrize("width", [128, 256])
def test_soft_cap_of_wide_heads(monkeypatch, width):
    calls, parts = count_kernels(monkeypatch), tensors(torch.bfloat16, heads=4, key_heads=2, width=width)
    rule = rule_named("causal", parts, softcap=50.0)
    got = sharded_attention(*parts, 2, "zigzag", rule)
    assert calls[Kernel.PLAIN, "forward"] == 0
    assert_as_exact_as_without(got, dense_attention(*parts, rule), parts, rule)


@pytest.mark.parametrize("name", ["causal", "everything", *MASKS])
@pytest.mark.parametrize("kernel", list(BACKENDS))
def test_sinks(monkeypatch, kernel, name):
    skip_without(kernel)
    parts, sinks = tensors(torch.bfloat16, key_heads=2), torch.linspace(-1, 6, 8, device="cuda")
    rule = rule_named(name, parts)
    with sdpa_kernel([BACKENDS[kernel], SDPBackend.EFFICIENT_ATTENTION]):
        got = sharded_attention(*parts, 2, "zigzag", rule, sinks)
    assert_as_exact_as_without(got, dense_attention(*parts, rule, sinks), parts, rule)


def see_gpus(rank):
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES")}


def modes_on_this_rank():
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    pair, singles = SequenceGroup(), [dist.new_group([member]) for member in range(2)]
    alone = SequenceGroup(singles[rank])
    groups = [(mode, pair) for mode in Mode if mode is not Mode.HYBRID]
    groups += [(Mode.HYBRID, HybridGroup(ring=pair, heads=alone)), (Mode.HYBRID, HybridGroup(ring=alone, heads=pair))]
    found = []
    for options in ({"causal": True}, {}, {"causal": True, "padding": padding_of("left")}):
        parts = tensors(torch.bfloat16, key_heads=2)
        rule = rule_of(parts[0], **options)
        expected = dense_attention(*parts, rule)
        backend = SDPBackend.EFFICIENT_ATTENTION if "padding" in options else SDPBackend.FLASH_ATTENTION
        by_sdpa = sdpa(*parts, rule, backend)
        for mode, group in groups:
            here = positions_of_rank(group.rank, 2, LENGTH // 2, mode).cuda()
            *leaves, grad = (token_major(part[:, :, here]) for part in parts)
            for leaf in leaves:
                leaf.requires_grad_()
            for _ in range(2):  # memory is used again
                for leaf in leaves:
                    leaf.grad = None
                out = attention(*leaves, group, mode, **options)
                out.backward(grad)
            exact = [part[:, :, here] for part in expected]
            ours = errors([out.detach(), *(leaf.grad for leaf in leaves)], exact)
            theirs = errors([part[:, :, here] for part in by_sdpa], exact)
            found.append((mode.value, sorted(options), ours, theirs))
    dist.destroy_process_group()
    return found


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_all_modes_on_two_gpus():
    for found in run_ranks(2, modes_on_this_rank, timeout_seconds=120, environment=see_gpus):
        for mode, options, ours, theirs in found:
            print(mode, options, [f"{own:.1e} of {other:.1e}" for own, other in zip(ours, theirs, strict=True)])
        wrong = [one for one in found if any(own > 2 * other for own, other in zip(one[2], one[3], strict=True))]
        assert wrong == []


def train_on_gpus(runs):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return [{name: run[name] for name in ("losses", "norms")} for run in train_all(runs)]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_sinks_soft_cap_and_recurrent_layers_on_two_gpus():
    gemma = Model("gemma2", {"attn_logit_softcapping": 0.05, "head_dim": 16, "sliding_window": 7})
    runs = [Run(gemma, length=512), Run(GPT_OSS, "left"), Run(QWEN3_NEXT, "left"), Run(QWEN3_5)]
    runs += [Run(NEMOTRON_H, "right"), Run(GRANITE, checkpointing=False)]
    (alone,) = run_ranks(1, train_on_gpus, runs, timeout_seconds=300, environment=see_gpus)
    shared = [Run(**{**vars(run), "size": 2, "mode": "zigzag"}) for run in runs]
    for found in run_ranks(2, train_on_gpus, shared, timeout_seconds=300, environment=see_gpus):
        for run, one, expected in zip(runs, found, alone, strict=True):
            print(run.model.name, one["losses"], expected["losses"])
            assert one["losses"] == pytest.approx(expected["losses"], rel=1e-4), run.model.name
            assert one["norms"] == pytest.approx(expected["norms"], rel=1e-3), run.model.name
