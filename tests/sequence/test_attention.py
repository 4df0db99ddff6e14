"""Attention over a divided sequence against softmax(q k^T) v by autograd, in float64, on 1 to 4 ranks."""

import dataclasses
import itertools
import math

import pytest
import torch
import torch.distributed as dist

from patrickstar.sequence import HybridGroup, Mode, SequenceGroup, attention, positions_of_rank
from patrickstar.sequence.dropout import Dropout
from patrickstar.sequence.ulysses import key_heads, query_heads
from tests.distributed import run_ranks

LENGTH = 24  # divided by 2, 3 and 4 ranks, and by twice as many slices
SEED = 11


@dataclasses.dataclass(frozen=True)
class Case:
    heads: int = 12
    key_heads: int = 12
    causal: bool = False
    window: tuple = None
    cu_seqlens: tuple = None
    length: int = None
    dropout_p: float = 0.0
    scale: float = None
    value_dim: int = 8

    def options(self):
        return {
            "causal": self.causal,
            "window": self.window,
            "cu_seqlens": self.cu_seqlens,
            "length": self.length,
            "dropout_p": self.dropout_p,
            "scale": self.scale,
            "seed": SEED,
        }


CASES = {
    "plain": Case(),
    "causal": Case(causal=True),
    "grouped": Case(key_heads=4, causal=True),
    "one key head": Case(key_heads=1),
    "window": Case(window=(5, 2)),
    "causal window": Case(causal=True, window=(4, 0)),
    "back only": Case(window=(3, -1)),
    "packed": Case(causal=True, cu_seqlens=(0, 5, 6, 17, LENGTH)),
    "packed both ways": Case(cu_seqlens=(0, 9, LENGTH)),
    "padded": Case(length=LENGTH - 5),
    "padded and packed": Case(causal=True, length=LENGTH - 5, cu_seqlens=(0, 7, LENGTH - 5)),
    "dropout": Case(causal=True, dropout_p=0.3),
    "grouped dropout": Case(key_heads=4, dropout_p=0.5, scale=0.7),
    "wide values": Case(causal=True, value_dim=16),
}


def whole(case):
    """q, k, v and the gradient of the output, of all tokens."""
    generator = torch.Generator().manual_seed(5)

    def draw(heads, width):
        return torch.randn(2, heads, LENGTH, width, generator=generator, dtype=torch.float64)

    q, k = draw(case.heads, 8), draw(case.key_heads, 8)
    return q, k, draw(case.key_heads, case.value_dim), draw(case.heads, case.value_dim)


def dense(case):
    """The output and the gradients of q, k and v, by PyTorch's autograd."""
    q, k, v, grad = whole(case)
    leaves = [part.requires_grad_() for part in (q, k, v)]
    k, v = (part.repeat_interleave(case.heads // case.key_heads, dim=1) for part in (k, v))
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(8) if case.scale is None else case.scale)
    length = LENGTH if case.length is None else case.length
    seen = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    for query, key in itertools.product(range(length), range(length)):
        back, forward = case.window or (-1, -1)
        allowed = key <= query or not case.causal
        allowed &= back == -1 or query - key <= back
        allowed &= forward == -1 or key - query <= forward
        for begin, end in zip(case.cu_seqlens or (), (case.cu_seqlens or (0,))[1:], strict=False):
            allowed &= (begin <= query < end) == (begin <= key < end)
        seen[query, key] = allowed
    probabilities = torch.softmax(scores.masked_fill(~seen, -math.inf), dim=-1).nan_to_num(0.0)
    if case.dropout_p:
        places = torch.arange(LENGTH)
        dropout = Dropout(case.dropout_p, SEED, case.heads)
        factors = dropout.factors(2, case.heads, places, places, torch.float64)
        assert factors.max().item() == pytest.approx(1 / (1 - case.dropout_p))
        assert (factors == 0).double().mean().item() == pytest.approx(case.dropout_p, abs=0.02)
        probabilities = probabilities * factors
    out = probabilities @ v
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def groups(mode):
    """The group for a mode, None where the mode has none of this size."""
    everyone = SequenceGroup()
    if mode is not Mode.HYBRID:
        return everyone
    if everyone.size != 4:
        return None
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group([0, 2]), dist.new_group([1, 3])]
    return HybridGroup(ring=SequenceGroup(pairs[2 + everyone.rank % 2]), heads=SequenceGroup(pairs[everyone.rank // 2]))


def divided(case, mode, group, dtype=torch.float64):
    """The output and the gradients, of the tokens that are here."""
    here = positions_of_rank(group.rank, group.size, LENGTH // group.size, mode)
    *leaves, grad = (part.to(dtype)[:, :, here].clone() for part in whole(case))
    for leaf in leaves:
        leaf.requires_grad_()
    out = attention(*leaves, group, mode, **case.options())
    out.backward(grad)
    return here, [out.detach(), *(leaf.grad for leaf in leaves)]


def errors_on_each_rank(cases):
    """Of every case and mode, how far output and gradients are from the dense ones at most, on this rank."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    found = {}
    by_mode = {mode: groups(mode) for mode in Mode}
    for name in cases:
        expected = dense(CASES[name])
        for mode, group in by_mode.items():
            if group is None:
                continue
            here, got = divided(CASES[name], mode, group)
            assert [part.dtype for part in got] == [torch.float64] * 4
            gaps = [(part - whole_[:, :, here]).abs().max().item() for part, whole_ in zip(got, expected, strict=True)]
            found[name, mode.value] = (gaps[0], max(gaps[1:]))
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_as_dense_attention(num_ranks):
    for found in run_ranks(num_ranks, errors_on_each_rank, list(CASES)):
        assert len(found) == len(CASES) * (5 if num_ranks == 4 else 4)
        wrong = {key: gaps for key, gaps in found.items() if not (gaps[0] < 1e-12 and gaps[1] < 1e-10)}
        assert wrong == {}


def sent_bytes():
    """What each mode sends forward and in backward, on this rank."""
    dist.init_process_group("gloo")
    found = {}
    for mode in (Mode.RSA, Mode.RING, Mode.ZIGZAG, Mode.ULYSSES):
        group = SequenceGroup()
        *leaves, grad = (part.float()[:, :, : LENGTH // group.size].clone() for part in whole(CASES["causal"]))
        for leaf in leaves:
            leaf.requires_grad_()
        out = attention(*leaves, group, mode, causal=True)
        forward = group.sent_bytes
        out.backward(grad)
        found[mode.value] = forward, group.sent_bytes - forward
    return found


def test_bytes_are_those_of_the_formulas():
    """In elements: [Note: the ring], patrickstar/sequence/rsa.py, and all-to-all's (N - 1) / N of q, k, v and out."""
    num_ranks = 4
    block = 2 * 12 * (LENGTH // num_ranks) * 8 * 4  # bytes of one rank's q, k or v
    ring = 2 * (num_ranks - 1) * block, (2 * (num_ranks - 1) + 2 * num_ranks) * block
    all_to_all = 4 * (num_ranks - 1) * block // num_ranks
    expected = {"rsa": ring, "ring": ring, "zigzag": ring, "ulysses": (all_to_all, all_to_all)}
    assert run_ranks(num_ranks, sent_bytes) == [expected] * num_ranks


def in_bfloat16():
    dist.init_process_group("gloo")
    found = {}
    expected = dense(CASES["causal"])
    for mode in (Mode.RING, Mode.ZIGZAG, Mode.ULYSSES, Mode.RSA):
        here, got = divided(CASES["causal"], mode, SequenceGroup(), torch.bfloat16)
        assert [part.dtype for part in got] == [torch.bfloat16] * 4
        gaps = [(part - whole_[:, :, here]).abs().max().item() for part, whole_ in zip(got, expected, strict=True)]
        found[mode.value] = max(gaps)
    return found


def test_half_precision_is_rounded_little():
    """Inputs and blocks are rounded to 8 bits of mantissa, sums over blocks are not: about that of one rank."""
    case = CASES["causal"]
    *leaves, grad = (part.bfloat16() for part in whole(case))
    for leaf in leaves:
        leaf.requires_grad_()
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
    out.backward(grad)
    alone = max(
        (part - want).abs().max().item()
        for part, want in zip([out.detach(), *(leaf.grad for leaf in leaves)], dense(case), strict=True)
    )
    for found in run_ranks(4, in_bfloat16):
        assert max(found.values()) < 2 * alone


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        ([(2, 4, 6)] * 3, {}, r"give \[batch, heads, tokens, head_dim\] each"),
        ([(2, 4, 6, 8), (2, 3, 6, 8), (2, 3, 6, 8)], {}, "the 3 heads of k must divide the 4 of q"),
        ([(2, 4, 6, 8), (2, 4, 5, 8), (2, 4, 5, 8)], {}, "batch, tokens, the heads of k and v"),
        ([(2, 4, 7, 8)] * 3, {"mode": "zigzag"}, "7 tokens, which are not two equal slices; pad the sequence"),
        ([(2, 4, 6, 8)] * 3, {"dropout_p": 1.0}, "dropout_p is 1.0; give at least 0 and less than 1"),
        ([(2, 4, 6, 8)] * 3, {"length": 9}, "length is 9, but the ranks together have 6 tokens"),
        ([(2, 4, 6, 8)] * 3, {"cu_seqlens": (0, 4)}, r"cu_seqlens is \[0, 4\]; it must rise from 0 to the length"),
        ([(2, 4, 6, 8)] * 3, {"window": (-2, 0)}, "-1 for no limit"),
        ([(2, 4, 6, 8)] * 3, {"mode": "hybrid"}, "hybrid, and it alone, takes a HybridGroup"),
        ([(2, 4, 6, 8)] * 3, {"mode": "zag"}, "'zag' is not a valid Mode"),
    ],
)
def test_what_does_not_go_together_is_refused(shapes, options, message):
    tensors = [torch.zeros(shape) for shape in shapes]
    with pytest.raises(ValueError, match=message):
        attention(*tensors, SequenceGroup(), **options)


def test_heads_of_ranks():
    with pytest.raises(ValueError, match="6 heads cannot be divided among 4 ranks.*or use mode ring, zigzag or hybrid"):
        query_heads(6, 4)
    assert key_heads(8, 4, 2) == ((0, 1), (2, 3))
    assert key_heads(8, 2, 4) == ((0,), (0,), (1,), (1,))
    assert key_heads(12, 4, 3) == ((0, 0, 0, 1), (1, 1, 2, 2), (2, 3, 3, 3))
