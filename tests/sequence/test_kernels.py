"""Calls of a GPU's kernels without a GPU. Substitutes demand the arguments of PyTorch's operations and compute in
float64. Each call is made on meta tensors first, so that the real operation's schema and shapes hold.
"""

import dataclasses
import types

import pytest
import torch

from patrickstar.sequence import block, flex, kernels
from patrickstar.sequence.kernel_choice import AttentionDevice, Kernel, Question, choose
from patrickstar.sequence.masking import Cover
from tests.sequence.emulation import count_kernels, dense_attention, rule_of, sharded_attention

LENGTH = 520  # halves and quarters of it are no multiples of 16 or 32, quarters enough for cuDNN


def on_meta(name, args, options):
    given = [arg.to("meta") if isinstance(arg, torch.Tensor) else arg for arg in args]
    return getattr(torch.ops.aten, name)(*given, **options)


def is_token_major(tensor):
    _, heads, _, head_dim = tensor.shape
    return tensor.stride()[1:] == (head_dim, heads * head_dim, 1)


def scores_of(q, k, bias, is_causal, scale):
    scores = q.double() @ grouped(k, q).transpose(-1, -2) * scale
    if bias is not None:
        scores = scores + bias.double()
    if is_causal:
        assert q.shape[2] == k.shape[2]
        scores = scores.masked_fill(torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1), -torch.inf)
    return scores


def grouped(part, q):
    return part.double().repeat_interleave(q.shape[1] // part.shape[1], dim=1)


def forward(q, k, v, bias, is_causal, scale):
    scores = scores_of(q, k, bias, is_causal, scale)
    lse = torch.logsumexp(scores, dim=-1)
    out = torch.exp(scores - lse.unsqueeze(-1)) @ grouped(v, q)  # NaN where a query sees nothing
    return out.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2), lse.float()


def backward(grad, q, k, v, bias, out, lse, is_causal, scale):
    probabilities = torch.exp(scores_of(q, k, bias, is_causal, scale) - lse.double().unsqueeze(-1))
    delta = (grad.double() * out.double()).sum(dim=-1, keepdim=True)
    grad_scores = probabilities * (grad.double() @ grouped(v, q).transpose(-1, -2) - delta) * scale
    grads = (
        grad_scores @ grouped(k, q),
        grad_scores.transpose(-1, -2) @ q.double(),
        probabilities.transpose(-1, -2) @ grad.double(),
    )
    sums = (
        part.unflatten(1, (k.shape[1], -1)).sum(dim=2) if part.shape[1] > k.shape[1] else part for part in grads[1:]
    )
    return [part.to(q.dtype) for part in (grads[0], *sums)]


def cudnn_forward(q, k, v, bias, wants_lse, dropout_p, is_causal, *rest, scale):
    assert bias is None and wants_lse and dropout_p == 0.0
    shapes = on_meta(
        "_scaled_dot_product_cudnn_attention", (q, k, v, None, True, 0.0, is_causal, *rest), {"scale": scale}
    )
    assert all(is_token_major(part) for part in (q, k, v)) and q.shape[2] >= 128
    out, lse = forward(q, k, v, None, is_causal, scale)
    return out, lse.reshape(shapes[1].shape)


def cudnn_backward(grad, q, k, v, out, lse, *rest, scale):
    on_meta("_scaled_dot_product_cudnn_attention_backward", (grad, q, k, v, out, lse, *rest), {"scale": scale})
    assert all(is_token_major(part) for part in (grad, q, k, v, out))
    assert lse.is_contiguous() and lse.shape == (*q.shape[:3], 1) and lse.dtype == torch.float32
    seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout_p, is_causal = rest
    assert bias is cum_q is cum_k is None and (max_q, max_k) == (q.shape[2], k.shape[2]) and dropout_p == 0.0
    return backward(grad, q, k, v, None, out, lse[..., 0], is_causal, scale)


def flash_forward(q, k, v, dropout_p, is_causal, wants_mask, *, scale):
    args = q, k, v, dropout_p, is_causal, wants_mask
    on_meta("_scaled_dot_product_flash_attention", args, {"scale": scale})
    return *forward(q, k, v, None, is_causal, scale), None


def flash_backward(grad, q, k, v, out, lse, *rest, scale):
    on_meta("_scaled_dot_product_flash_attention_backward", (grad, q, k, v, out, lse, *rest), {"scale": scale})
    assert lse.is_contiguous() and lse.shape == q.shape[:3] and lse.dtype == torch.float32 and out.dtype == q.dtype
    cum_q, cum_k, max_q, max_k, dropout_p, is_causal, seed, offset = rest
    assert cum_q is cum_k is None and (max_q, max_k) == (q.shape[2], k.shape[2]) and dropout_p == 0.0
    return backward(grad, q, k, v, None, out, lse, is_causal, scale)


def check_efficient(q, k, v, bias):
    assert q.shape[1] == k.shape[1] == v.shape[1]
    for part in (q, k, v):
        assert part.stride(-1) == 1 and all(stride % 8 == 0 for stride in part.stride()[:-1])
        assert part.data_ptr() % 16 == 0
    if bias is not None:
        assert bias.shape == (*q.shape[:3], k.shape[2]) and bias.dtype == q.dtype and bias.stride(-1) == 1
        assert all(stride % 8 == 0 for stride in bias.stride()[:-1]) and bias.data_ptr() % 16 == 0


def efficient_forward(q, k, v, bias, wants_lse, dropout_p, is_causal, *, scale):
    assert wants_lse and dropout_p == 0.0
    name = "_scaled_dot_product_efficient_attention"
    shapes = on_meta(name, (q, k, v, bias, True, 0.0, is_causal), {"scale": scale})
    check_efficient(q, k, v, bias)
    out, lse = forward(q, k, v, bias, is_causal, scale)
    padded = torch.full(shapes[1].shape, torch.inf)
    padded[..., : q.shape[2]] = lse
    return out, padded, None, None


def efficient_backward(grad, q, k, v, bias, out, lse, *rest, scale):
    name = "_scaled_dot_product_efficient_attention_backward"
    on_meta(name, (grad, q, k, v, bias, out, lse, *rest), {"scale": scale})
    check_efficient(q, k, v, bias)
    assert is_token_major(out) and out.dtype == q.dtype  # it takes a row's distance to the next from the shape
    assert lse.shape[-1] % 32 == 0 and lse.shape[-1] - q.shape[2] in range(32) and lse.dtype == torch.float32
    _, _, dropout_p, wanted, is_causal = rest
    assert dropout_p == 0.0 and wanted == [True, True, True, False]
    lse = lse[..., : q.shape[2]]
    return *backward(grad, q, k, v, bias, out, lse, is_causal, scale), None


OPERATIONS = types.SimpleNamespace(
    _scaled_dot_product_cudnn_attention=cudnn_forward,
    _scaled_dot_product_cudnn_attention_backward=cudnn_backward,
    _scaled_dot_product_flash_attention=flash_forward,
    _scaled_dot_product_flash_attention_backward=flash_backward,
    _scaled_dot_product_efficient_attention=efficient_forward,
    _scaled_dot_product_efficient_attention_backward=efficient_backward,
)


@pytest.fixture
def hopper(monkeypatch):
    """`hopper(kernels)`: this machine passes for one with a GPU that has these kernels; gives the calls."""
    calls = count_kernels(monkeypatch)
    kernels._cudnn_lse_dims()  # the real operation's
    monkeypatch.setattr(kernels, "_aten", OPERATIONS)

    def switch(*enabled):
        device = AttentionDevice("cuda", (9, 0), 91900, frozenset(enabled))
        monkeypatch.setattr(block.AttentionDevice, "of", staticmethod(lambda tensor: device))
        return calls

    return switch


def tensors(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(3)

    def draw(heads):
        return torch.randn(2, heads, LENGTH, 16, generator=generator).to(dtype)

    return draw(4), draw(2), draw(2), draw(4)


def relative_errors(got, expected):
    return [((one.double() - other).norm() / other.norm()).item() for one, other in zip(got, expected, strict=True)]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("mode", ["ring", "zigzag"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kernel", [Kernel.CUDNN, Kernel.FLASH, Kernel.EFFICIENT, Kernel.PLAIN])
def test_whole_blocks(hopper, kernel, is_causal, mode, size):
    calls, parts = hopper(kernel), tensors()
    rule = rule_of(parts[0], causal=is_causal)
    errors = relative_errors(sharded_attention(*parts, size, mode, rule), dense_attention(*parts, rule))
    print(errors, dict(calls))
    assert max(errors) < 0.01
    assert {used for used, _ in calls} == {kernel}
    blocks = 3 if (size, mode, is_causal) == (2, "ring", True) else size * size
    assert kernel is Kernel.PLAIN or calls == {(kernel, "forward"): blocks, (kernel, "backward"): blocks}


MASKS = {
    "window": {"causal": True, "window": (200, 0)},
    "documents": {"causal": True, "cu_seqlens": (0, 130, 135, LENGTH)},
    "both ways": {"cu_seqlens": (0, 300, LENGTH - 50), "length": LENGTH - 50},
    "padding": {"causal": True, "padding": "left"},
    "padding both ways": {"padding": "right"},
}


def options_of(name):
    options = dict({"causal": {"causal": True}, "everything": {}, **MASKS}[name])
    if "padding" in options:
        real = torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 200]])
        options["padding"] = real.flip(1) if options["padding"] == "left" else real
    return options


@pytest.mark.parametrize("tile", [128, 4096])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_masked_blocks(hopper, monkeypatch, dtype, name, tile):
    monkeypatch.setattr(block, "_TILE_TOKENS", tile)
    calls, parts = hopper(Kernel.CUDNN, Kernel.FLASH, Kernel.EFFICIENT), tensors(dtype)
    rule = rule_of(parts[0], **options_of(name))
    expected = dense_attention(*parts, rule)
    for mode in ("ring", "zigzag"):
        got = sharded_attention(*parts, 2, mode, rule)
        assert all(part.isfinite().all() for part in got)
        assert max(relative_errors(got, expected)) < (0.01 if dtype is torch.bfloat16 else 1e-6)
    print(dict(calls))
    assert calls[Kernel.EFFICIENT, "forward"] > 0 and calls[Kernel.PLAIN, "forward"] == 0
    if tile == 128 and dtype is torch.bfloat16:
        assert calls[Kernel.CUDNN, "forward"] > 0
    assert all(calls[kernel, "forward"] == calls[kernel, "backward"] for kernel in Kernel)


@pytest.mark.parametrize("name", ["causal", "window", "padding"])
@pytest.mark.parametrize("kernel", [Kernel.CUDNN, Kernel.FLASH, Kernel.EFFICIENT])
def test_sinks(hopper, kernel, name):
    calls, parts = hopper(kernel, Kernel.EFFICIENT), tensors()
    rule, sinks = rule_of(parts[0], **options_of(name)), torch.linspace(-1, 6, 4)
    got = sharded_attention(*parts, 2, "zigzag", rule, sinks)
    assert all(part.isfinite().all() for part in got)
    assert max(relative_errors(got, dense_attention(*parts, rule, sinks))) < 0.01
    assert calls[kernel, "forward"] > 0 or name != "causal"


def flex_attention(q, k, v, score_mod, scale, enable_gqa, return_aux):
    """FlexAttention in float64. On a CPU PyTorch's has no backward."""
    assert enable_gqa == (q.shape[1] != k.shape[1]) and return_aux.lse
    index = torch.meshgrid(*(torch.arange(size) for size in (*q.shape[:3], k.shape[2])), indexing="ij")
    scores = score_mod(q.double() @ grouped(k, q).transpose(-1, -2) * scale, *index)
    lse = torch.logsumexp(scores, dim=-1)
    finite = lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)
    return (torch.exp(scores - finite) @ grouped(v, q)).to(q.dtype), flex.flex.AuxRequest(lse=lse.float())


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.bfloat16, "causal"), *((torch.float32, name) for name in [*MASKS, "causal", "everything"])],
)
def test_soft_cap(hopper, monkeypatch, dtype, name):
    monkeypatch.setattr(flex.flex, "flex_attention", flex_attention)
    monkeypatch.setattr(kernels, "capped_attention", flex.attend_with_cap)
    monkeypatch.setattr(block, "_TILE_TOKENS", 192)
    calls, parts = hopper(Kernel.CUDNN, Kernel.FLASH, Kernel.EFFICIENT, Kernel.FLEX), tensors(dtype)
    rule = rule_of(parts[0], softcap=1.5, **options_of(name))
    expected = dense_attention(*parts, rule)
    for mode in ("ring", "zigzag"):
        got = sharded_attention(*parts, 2, mode, rule)
        assert all(part.isfinite().all() for part in got)
        assert max(relative_errors(got, expected)) < (0.01 if dtype is torch.bfloat16 else 1e-6)
    assert {used for used, _ in calls} <= {Kernel.FLEX, Kernel.PLAIN}  # PLAIN for narrow pieces
    assert calls[Kernel.FLEX, "forward"] == calls[Kernel.FLEX, "backward"] > 0
    assert name != "everything" or calls[Kernel.FLEX, "forward"] == 2 * 4


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask", [None, torch.eye(160, dtype=torch.bool), torch.ones(2, 1, 160, 160).tril(9).bool()])
def test_soft_cap_by_flex_attention_itself(mask, is_causal):
    q, k, v, _ = (part[:, :, :160] for part in tensors(torch.float32))
    out, lse = flex.attend_with_cap(q, k, v, mask, is_causal, softcap=1.5, scale=0.25)
    scores = 1.5 * torch.tanh(scores_of(q, k, None, False, 0.25) / 1.5)
    seen = torch.ones(160, 160, dtype=torch.bool) if mask is None else mask
    scores = scores.masked_fill(~(seen.tril() if is_causal else seen), -torch.inf)
    assert max(relative_errors((out, lse), (torch.softmax(scores, -1) @ grouped(v, q), scores.logsumexp(-1)))) < 1e-6


ON_CUDA = frozenset({Kernel.CUDNN, Kernel.FLASH, Kernel.EFFICIENT, Kernel.FLEX})
H200 = AttentionDevice("cuda", (9, 0), 91900, ON_CUDA)
A100 = AttentionDevice("cuda", (8, 0), 91900, ON_CUDA)
L40 = AttentionDevice("cuda", (8, 9), 91900, ON_CUDA)
V100 = AttentionDevice("cuda", (7, 0), 91900, ON_CUDA)
HOST = AttentionDevice("cpu", (0, 0), 0, frozenset({Kernel.HOST}))
BLOCK = Question(torch.bfloat16, (128, 128), (4096, 8192), Cover.ALL, 0.0)


@pytest.mark.parametrize(
    ("device", "changes", "kernel"),
    [
        (H200, {}, Kernel.CUDNN),
        (H200, {"cover": Cover.DIAGONAL, "dtype": torch.float16}, Kernel.CUDNN),
        (H200, {"head_dims": (64, 128)}, Kernel.CUDNN),
        (H200, {"head_dims": (256, 256)}, Kernel.FLASH),
        (H200, {"lengths": (4096, 100)}, Kernel.FLASH),
        (dataclasses.replace(H200, cudnn=91400), {}, Kernel.FLASH),
        (dataclasses.replace(H200, enabled=ON_CUDA - {Kernel.CUDNN}), {}, Kernel.FLASH),
        (dataclasses.replace(H200, enabled=frozenset({Kernel.EFFICIENT})), {}, Kernel.EFFICIENT),
        (dataclasses.replace(H200, enabled=frozenset()), {}, Kernel.PLAIN),
        (H200, {"cover": Cover.SOME}, Kernel.EFFICIENT),
        (H200, {"head_dims": (192, 128)}, Kernel.EFFICIENT),
        (H200, {"dtype": torch.float32}, Kernel.EFFICIENT),
        (H200, {"dtype": torch.float32, "head_dims": (12, 12)}, Kernel.EFFICIENT),
        (H200, {"head_dims": (12, 12)}, Kernel.PLAIN),
        (H200, {"dtype": torch.float64}, Kernel.PLAIN),
        (H200, {"dropout_p": 0.1}, Kernel.PLAIN),
        (H200, {"softcap": 50.0}, Kernel.FLEX),
        (H200, {"softcap": 50.0, "cover": Cover.SOME}, Kernel.FLEX),
        (H200, {"softcap": 50.0, "lengths": (100, 4096)}, Kernel.PLAIN),
        (H200, {"softcap": 50.0, "dropout_p": 0.1}, Kernel.PLAIN),
        (V100, {"softcap": 50.0}, Kernel.PLAIN),
        (HOST, {"softcap": 50.0}, Kernel.PLAIN),
        (A100, {}, Kernel.FLASH),
        (A100, {"head_dims": (256, 256)}, Kernel.FLASH),
        (L40, {"head_dims": (256, 256)}, Kernel.EFFICIENT),
        (L40, {"head_dims": (192, 192)}, Kernel.FLASH),
        (V100, {"dtype": torch.float16}, Kernel.EFFICIENT),
        (V100, {}, Kernel.PLAIN),
        (HOST, {"dtype": torch.float64}, Kernel.HOST),
        (HOST, {"cover": Cover.DIAGONAL}, Kernel.HOST),
        (HOST, {"cover": Cover.SOME}, Kernel.PLAIN),
        (HOST, {"head_dims": (8, 16)}, Kernel.PLAIN),
        (HOST, {"dropout_p": 0.1}, Kernel.PLAIN),
        (AttentionDevice("xpu", (0, 0), 0, frozenset()), {}, Kernel.PLAIN),
    ],
)
def test_choice(device, changes, kernel):
    assert choose(device, dataclasses.replace(BLOCK, **changes)) is kernel


def test_this_machine():
    assert AttentionDevice.of(torch.zeros(1)) == HOST
    assert AttentionDevice.of(torch.zeros(1, device="meta")).enabled == frozenset()
