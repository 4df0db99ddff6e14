import dataclasses
import itertools
import math
import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn

from patrickstar.ranks.distributed import open_ranks
from patrickstar.ranks.mesh import Mesh, MeshRanks
from patrickstar.sequence import HybridGroup, Mode, Padding, SequenceGroup, attention, block, positions_of_rank
from patrickstar.sequence.division import gathered_parts
from patrickstar.sequence.dropout import Dropout
from patrickstar.sequence.kernels import KERNELS
from patrickstar.sequence.masking import Cover, KeyPadding
from patrickstar.sequence.positions import Numbering
from patrickstar.sequence.ring import blocks_of_turn
from patrickstar.sequence.sharded_attention import running, shared_mask
from patrickstar.sequence.shared_mask import Reach, SharedMask, reach_of
from patrickstar.sequence.survey import Survey, check_reached, survey_model, without_numbers
from patrickstar.sequence.ulysses import key_heads, query_heads
from tests.distributed import rank_outcomes, run_ranks
from tests.sequence.emulation import Place, count_kernels, rule_of
from tests.text_models import build

LENGTH = 24  # divided by 2, 3 and 4 ranks, and by twice as many slices
SEED = 11


# Padding of a batch's two sequences; a whole slice of 2, 3 and 4 ranks may be padding.
PADDINGS = {
    "right": torch.arange(LENGTH) < torch.tensor([[LENGTH - 5], [LENGTH - 15]]),
    "left": torch.arange(LENGTH) >= torch.tensor([[13], [0]]),
    "middle": (torch.arange(LENGTH) - torch.tensor([[9], [20]])).abs() > 3,
    "all of one": torch.tensor([[True], [False]]).expand(2, LENGTH),
}


@dataclasses.dataclass(frozen=True)
class Case:
    heads: int = 12
    key_heads: int = 12
    causal: bool = False
    window: tuple = None
    cu_seqlens: tuple = None
    length: int = None
    padding: str = None
    sees: bool = False  # padding attends but is not attended to
    dropout_p: float = 0.0
    scale: float = None
    value_dim: int = 8
    softcap: float = None
    has_sinks: bool = False

    def options(self):
        padding = None if self.padding is None else PADDINGS[self.padding]
        return {
            "causal": self.causal,
            "window": self.window,
            "cu_seqlens": self.cu_seqlens,
            "length": self.length,
            "padding": KeyPadding(padding) if self.sees else padding,
            "dropout_p": self.dropout_p,
            "scale": self.scale,
            "softcap": self.softcap,
            "seed": SEED,
        }

    def sinks(self):
        return torch.linspace(-1, 2, self.heads, dtype=torch.float64).requires_grad_() if self.has_sinks else None


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
    "padding right": Case(causal=True, padding="right"),
    "padding left": Case(key_heads=4, causal=True, padding="left"),
    "padding in the middle": Case(padding="middle", window=(9, 2)),
    "padding that sees": Case(key_heads=4, padding="left", sees=True),
    "padding that sees what was before": Case(causal=True, padding="middle", sees=True),
    "padding alone": Case(causal=True, padding="all of one"),
    "padding of packed": Case(padding="left", cu_seqlens=(0, 7, LENGTH), value_dim=16),
    "padding and dropout": Case(causal=True, padding="right", dropout_p=0.3),
    "dropout": Case(causal=True, dropout_p=0.3),
    "grouped dropout": Case(key_heads=4, dropout_p=0.5, scale=0.7),
    "wide values": Case(causal=True, value_dim=16),
    "soft cap": Case(key_heads=4, causal=True, padding="left", softcap=0.5),
    "soft cap, dropout": Case(window=(5, 2), softcap=2.0, dropout_p=0.3),
    "sinks": Case(key_heads=4, causal=True, has_sinks=True),
    "sinks, window, padding": Case(causal=True, window=(4, 0), padding="all of one", has_sinks=True),
    "sinks, soft cap, packed": Case(
        causal=True, cu_seqlens=(0, 5, LENGTH - 3), length=LENGTH - 3, softcap=1.0, has_sinks=True
    ),
    "sinks, dropout": Case(causal=True, dropout_p=0.3, has_sinks=True),
}


def whole(case):
    generator = torch.Generator().manual_seed(5)

    def draw(heads, width):
        return torch.randn(2, heads, LENGTH, width, generator=generator, dtype=torch.float64)

    q, k = draw(case.heads, 8), draw(case.key_heads, 8)
    return q, k, draw(case.key_heads, case.value_dim), draw(case.heads, case.value_dim)


def dense(case):
    q, k, v, grad = whole(case)
    leaves, sinks = [part.requires_grad_() for part in (q, k, v)], case.sinks()
    k, v = (part.repeat_interleave(case.heads // case.key_heads, dim=1) for part in (k, v))
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(8) if case.scale is None else case.scale)
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
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
    if case.padding is not None:
        real = PADDINGS[case.padding]
        seen = seen & (real[:, None, :] & (real[:, :, None] | case.sees))[:, None]
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)], dim=-1)
    probabilities = torch.softmax(scores, dim=-1)[..., :LENGTH].nan_to_num(0.0)
    if case.dropout_p:
        places = torch.arange(LENGTH)
        dropout = Dropout(case.dropout_p, SEED, case.heads)
        factors = dropout.factors(2, case.heads, places, places, torch.float64)
        assert factors.max().item() == pytest.approx(1 / (1 - case.dropout_p))
        assert (factors == 0).double().mean().item() == pytest.approx(case.dropout_p, abs=0.02)
        probabilities = probabilities * factors
    out = probabilities @ v
    out.backward(grad)
    found = [out.detach(), *(leaf.grad for leaf in leaves)]
    return found if sinks is None else [*found, sinks.grad]


def groups(mode):
    everyone = SequenceGroup()
    if mode is not Mode.HYBRID:
        return everyone
    if everyone.size != 4:
        return None
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group([0, 2]), dist.new_group([1, 3])]
    return HybridGroup(ring=SequenceGroup(pairs[2 + everyone.rank % 2]), heads=SequenceGroup(pairs[everyone.rank // 2]))


def sharded(case, mode, group, dtype=torch.float64, device="cpu"):
    here = positions_of_rank(group.rank, group.size, LENGTH // group.size, mode)
    *leaves, grad = (part.to(dtype)[:, :, here].to(device, copy=True) for part in whole(case))
    for leaf in leaves:
        leaf.requires_grad_()
    sinks = case.sinks()
    out = attention(*leaves, group, mode, **case.options(), sinks=sinks)
    out.backward(grad)
    found = [out.detach(), *(leaf.grad for leaf in leaves)]
    return here, found if sinks is None else [*found, sum(gathered_parts(sinks.grad, group))]


def own_groups(mode, ranks):
    if mode is not Mode.HYBRID:
        return SequenceGroup.of_ranks(ranks)
    sequence = MeshRanks(ranks, Mesh(sequence=len(ranks.members))).along("sequence")
    return HybridGroup.of_ranks(sequence, 2) if sequence.size == 4 else None


def errors_over_torch(cases):
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return errors_on_each_rank(cases, {mode: groups(mode) for mode in Mode})


def errors_in_small_tiles(cases):
    """Masked parts of blocks have 5 queries and keys at most, plain ones as many scores per head."""
    block._TILE_TOKENS, block._TILE_SCORES = 5, 5 * 2 * 12
    return errors_over_torch(cases)


def errors_over_own_groups(cases):
    with open_ranks(timeout_seconds=60) as ranks:
        return errors_on_each_rank(cases, {mode: own_groups(mode, ranks) for mode in Mode})


def errors_on_each_rank(cases, by_mode):
    found = {}
    for name in cases:
        expected = dense(CASES[name])
        for mode, group in by_mode.items():
            if group is None:
                continue
            here, got = sharded(CASES[name], mode, group)
            assert {part.dtype for part in got} == {torch.float64}
            own = [part[:, :, here] if part.dim() == 4 else part for part in expected]
            gaps = [(part - other).abs().max().item() for part, other in zip(got, own, strict=True)]
            found[name, mode.value] = (gaps[0], max(gaps[1:]))
    return found


@pytest.mark.parametrize(
    ("num_ranks", "errors", "cases"),
    [
        *((num_ranks, errors_over_torch, list(CASES)) for num_ranks in (1, 2, 3, 4)),
        (2, errors_in_small_tiles, list(CASES)),
        *((num_ranks, errors_over_own_groups, ["grouped dropout", "padded and packed"]) for num_ranks in (3, 4)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_as_dense_attention(num_ranks, errors, cases):
    for found in run_ranks(num_ranks, errors, cases):
        assert len(found) == len(cases) * (5 if num_ranks == 4 else 4)
        wrong = {key: gaps for key, gaps in found.items() if not (gaps[0] < 1e-12 and gaps[1] < 1e-10)}
        assert wrong == {}


def sent_bytes():
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
    """In elements: `RingAttention`, patrickstar/sequence/rsa.py, and all-to-all's (N - 1) / N of q, k, v and out."""
    num_ranks = 4
    block = 2 * 12 * (LENGTH // num_ranks) * 8 * 4  # bytes of one rank's q, k or v
    rsa = 2 * (num_ranks - 1) * block, (2 * (num_ranks - 1) + 2 * num_ranks) * block
    ring = 2 * (num_ranks - 1) * block, 4 * (num_ranks - 1) * block
    all_to_all = 4 * (num_ranks - 1) * block // num_ranks
    expected = {"rsa": rsa, "ring": ring, "zigzag": ring, "ulysses": (all_to_all, all_to_all)}
    assert run_ranks(num_ranks, sent_bytes) == [expected] * num_ranks


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("mode", "is_causal"), [("zigzag", True), ("zigzag", False), ("ring", False), ("ring", True)])
def test_blocks_of_a_turn_are_merged(mode, is_causal, size):
    length = 2 * size * 4
    rule = rule_of(torch.zeros(1, 1, length, 8), causal=is_causal)
    seen = torch.zeros(length, length, dtype=torch.int64)
    for rank in range(size):
        mine = positions_of_rank(rank, size, length // size, mode)
        for turn in range(size):
            others = positions_of_rank((rank - turn) % size, size, length // size, mode)
            blocks = blocks_of_turn(Place(rank, size), Mode(mode), turn, length // size, rule)
            assert len(blocks) == (0 if mode == "ring" and is_causal and turn > rank else 1)
            for one in blocks:
                assert one.cover is (Cover.DIAGONAL if is_causal and turn == 0 else Cover.ALL)
                rows, columns = mine[one.rows], others[one.columns]
                causal_part = rows[:, None] >= columns
                seen[rows[:, None], columns] += causal_part if one.cover is Cover.DIAGONAL else 1
    expected = torch.ones_like(seen).tril() if is_causal else torch.ones_like(seen)
    assert torch.equal(seen, expected)


@pytest.mark.parametrize(
    ("options", "num_blocks"),
    [
        ({"window": (6, 0)}, [2, 2]),  # a diagonal and, too far away, nothing
        ({"cu_seqlens": (0, 3, 16)}, [3, 1]),  # the first slice has two documents, the others are of one
        ({"padding": torch.tensor([[True] * 15 + [False]])}, [3, 2]),
        ({"padding": torch.tensor([[True] * 12 + [False] * 4])}, [1, 0]),
    ],
)
def test_blocks_with_masks_are_merged_where_all_is_seen(options, num_blocks):
    """Rank 0 of 2 in zigzag has tokens 0 to 3 and 12 to 15, rank 1 those between."""
    rule = rule_of(torch.zeros(1, 1, 16, 8), causal=True, **options)
    blocks = [blocks_of_turn(Place(0, 2), Mode.ZIGZAG, turn, 8, rule) for turn in range(2)]
    assert [len(found) for found in blocks] == num_blocks


def kernel_calls():
    dist.init_process_group("gloo")
    with pytest.MonkeyPatch.context() as patch:
        calls = count_kernels(patch)
        sharded(CASES["grouped"], Mode.ZIGZAG, SequenceGroup())
        return {f"{kernel.name} {name}": number for (kernel, name), number in calls.items()}


def test_each_turn_calls_a_kernel_once():
    assert run_ranks(3, kernel_calls) == [{"HOST forward": 3, "HOST backward": 3}] * 3


def order_of_backward():
    dist.init_process_group("gloo")
    events = []

    class Recorded(SequenceGroup):
        def pass_on(self, tensors):
            what = "sums" if tensors[0].dtype == torch.float32 else "keys"
            exchange = super().pass_on(tensors)
            wait = exchange.wait
            events.append(f"send {what}")
            exchange.wait = lambda: (events.append(f"wait for {what}"), wait())[1]
            return exchange

    with pytest.MonkeyPatch.context() as patch:
        for kernel, passes in KERNELS.items():
            run = passes.backward
            backward = lambda *args, run=run: (events.append("compute"), run(*args))[1]  # noqa: E731
            patch.setitem(KERNELS, kernel, passes._replace(backward=backward))
        *leaves, grad = (part[:, :, : LENGTH // 3].bfloat16() for part in whole(CASES["plain"]))
        for leaf in leaves:
            leaf.requires_grad_()
        out = attention(*leaves, Recorded(), Mode.ZIGZAG)
        events.clear()
        out.backward(grad)
        return events


def test_keys_and_sums_travel_while_the_next_block_is_computed():
    first = ["send keys", "compute", "wait for keys"]
    second = ["send keys", "compute", "send sums", "wait for keys"]
    third = ["compute", "wait for sums", "send sums", "wait for sums"]
    assert run_ranks(3, order_of_backward) == [first + second + third] * 3


def test_padding_serves_several_calls():
    padding = Padding(PADDINGS["left"])
    *parts, _ = whole(CASES["plain"])
    once, twice = (attention(*parts, SequenceGroup(), padding=mask) for mask in (padding, PADDINGS["left"]))
    assert torch.equal(once, twice) and (once[0, :, :13] == 0).all()


def in_bfloat16():
    dist.init_process_group("gloo")
    found = {}
    modes = Mode.RING, Mode.ZIGZAG, Mode.ULYSSES, Mode.RSA
    for name, mode in itertools.product(("causal", "sinks", "soft cap"), modes):
        here, got = sharded(CASES[name], mode, SequenceGroup(), torch.bfloat16)
        assert [part.dtype for part in got[:4]] == [torch.bfloat16] * 4
        own = [part[:, :, here] if part.dim() == 4 else part for part in dense(CASES[name])]
        found[name, mode.value] = max(relative_gap(part, want) for part, want in zip(got, own, strict=True))
    return found


def relative_gap(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


def test_half_precision_is_rounded_little():
    case = CASES["causal"]
    *leaves, grad = (part.bfloat16() for part in whole(case))
    for leaf in leaves:
        leaf.requires_grad_()
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
    out.backward(grad)
    alone = max(
        relative_gap(part, want)
        for part, want in zip([out.detach(), *(leaf.grad for leaf in leaves)], dense(case), strict=True)
    )
    for found in run_ranks(4, in_bfloat16):
        print(found, alone)
        assert max(found.values()) < 2 * alone


def lose_a_rank_in_backward():
    with open_ranks(timeout_seconds=6) as ranks:
        group = SequenceGroup.of_ranks(ranks)
        q, k, v, grad = (part[:, :, : LENGTH // group.size] for part in whole(CASES["causal"]))
        for step in range(2):
            with ranks.guard(f"step {step}"):
                out = attention(q.requires_grad_(), k, v, group, Mode.ZIGZAG, causal=True)
                if step == 1 and group.rank == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                out.backward(grad)


def test_a_rank_that_dies_in_attention_is_named_by_all():
    outcomes = rank_outcomes(3, lose_a_rank_in_backward, timeout_seconds=90)
    assert outcomes[2].returncode == -signal.SIGKILL
    for outcome in outcomes[:2]:
        print(outcome.error)
        assert outcome.error.startswith("RankFailure: ") and "rank 2 of 3 failed rank" in outcome.error


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
        (
            [(2, 4, 6, 8)] * 3,
            {"padding": torch.ones(2, 6)},
            r"padding is \[2, 6\] of torch.float32; give bool, \[batch",
        ),
        ([(2, 4, 6, 8)] * 3, {"padding": torch.ones(2, 5).bool()}, r"\[2, 5\], but .* have 2 sequences of 6 tokens"),
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
    assert key_heads(query_heads(8, 2), 2) == ((0, 1), (2, 3))
    assert key_heads(query_heads(8, 4), 4) == ((0,), (0,), (1,), (1,))
    assert key_heads(query_heads(12, 3), 3) == ((0, 0, 0, 1), (1, 1, 2, 2), (2, 3, 3, 3))


def masks():
    from transformers import masking_utils as masks

    tokens = torch.tensor([[0, 0, 1, 1, 2]])
    window = masks.sliding_window_causal_mask_function
    or_all = masks.or_masks(masks.causal_mask_function, lambda *_: torch.tensor(True))
    return {
        "causal": (masks.causal_mask_function, None, Reach(None, 0)),
        "all": (masks.bidirectional_mask_function, None, Reach(None, None)),
        "window": (window(5), 5, Reach(4, 0)),
        "long window": (window(4096), 4096, Reach(4095, 0)),
        "window of one": (window(1), 1, Reach(0, 0)),
        "both ways": (masks.sliding_window_bidirectional_mask_function(3), 3, Reach(3, 3)),
        "causal, or all": (or_all, None, Reach(None, None)),
        "window that is not told": (window(1000), None, None),
        "window that sees nothing": (window(0), 0, None),
        "chunks": (masks.chunked_causal_mask_function(4, torch.zeros(1)), 4, None),
        "by kinds of tokens": (masks.blockwise_overlay(tokens), None, None),
        "packed": (masks.packed_sequence_mask_function(tokens), None, None),
    }


def test_what_a_mask_lets_see():
    for name, (sees, window, expected) in masks().items():
        assert reach_of(sees, window) == expected, name


def test_transformers_gets_it_while_a_sharded_call_runs():
    from transformers.masking_utils import causal_mask_function

    options = {"batch_size": 2, "kv_length": 6, "mask_function": causal_mask_function, "kv_offset": 0}
    call = object()
    for version in ({"q_length": 6, "q_offset": 0, "device": "cpu"}, {"cache_position": torch.arange(6)}):
        with running(call):
            mask = shared_mask(**options, **version)
        assert (mask.call, mask.reach, tuple(mask.shape)) == (call, Reach(None, 0), (2, 1, 6, 6))
    assert not isinstance(shared_mask(**options, q_length=6, q_offset=0, allow_is_causal_skip=False), SharedMask)


def test_models_hand_it_down_and_compute_nothing_with_it():
    class DogeLike(nn.Module):
        def forward(self, mask):
            return torch.where(mask, 0.0, 1.0)

    call = object()
    mask = SharedMask(call, Reach(None, 0), (2, 1, 8, 8), "cpu")
    for handed in (mask, mask[:, :, :, :8], mask.detach(), mask.to(torch.float32)):
        assert isinstance(handed, SharedMask) and handed.call is call
        assert handed.shape == (2, 1, 8, 8) and handed.dim() == 4 and handed.dtype == torch.bool
    with pytest.raises(ValueError, match=r"DogeLike computes with its attention mask \(where\)"):
        DogeLike()(mask)


BATCH = {
    "input_ids": torch.tensor([[20, 30, 1, 40, 50, 60, 11, 12], [1, 1, 21, 31, 41, 51, 61, 13]]),
    "attention_mask": torch.tensor([[1] * 8, [0, 0, 1, 1, 1, 1, 1, 1]]),
}
PLACES = list(range(8))


@pytest.mark.parametrize(
    ("name", "numbering", "inside", "first"),
    [
        ("LlamaForCausalLM", Numbering.BY_PLACE, (), PLACES),
        ("RobertaForMaskedLM", Numbering.AFTER_PADDING, (), [2, 3, 1, 4, 5, 6, 7, 8]),
        ("EsmForMaskedLM", Numbering.AFTER_PADDING, (), [2, 3, 1, 4, 5, 6, 7, 8]),
        ("OPTForCausalLM", Numbering.BY_MASK, (), PLACES),
        ("BartForCausalLM", Numbering.BY_PLACE, ("model.decoder.embed_positions",), PLACES),
    ],
)
def test_a_model_is_told_what_it_would_count_itself(name, numbering, inside, first):
    model = build(name).eval()
    survey = survey_model(model, BATCH)
    assert (survey.positions.numbering, survey.positions.inside) == (numbering, inside)
    whole = survey.positions.of(BATCH["input_ids"], BATCH["attention_mask"])
    assert whole[0].tolist() == first
    assert Survey.from_json(survey.to_json()) == survey
    if not inside:
        real = BATCH["attention_mask"].bool()
        with torch.no_grad():
            told, alone = (model(**BATCH, **given).logits[real] for given in ({"position_ids": whole}, {}))
        torch.testing.assert_close(told, alone)


def test_a_model_that_counts_otherwise_is_refused():
    model = build("LlamaForCausalLM").eval()
    forward = model.forward

    def backwards(input_ids, attention_mask=None, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).flip(0)[None] * 2
        return forward(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids)

    model.forward = backwards
    with pytest.raises(ValueError, match="LlamaForCausalLM numbers the tokens .* in a way that is not known"):
        survey_model(model, BATCH)


def test_layers_that_did_not_take_part_are_named():
    class Attends(nn.Module):
        pass

    model = nn.ModuleDict({"layers": nn.ModuleList(nn.ModuleDict({"attend": Attends()}) for _ in range(3))})
    attending = Survey(frozenset({without_numbers("layers.0.attend")})).attending_modules(model)
    modules = [layer["attend"] for layer in model["layers"]]
    check_reached(model, attending, {id(module) for module in modules})
    with pytest.raises(ValueError, match=r"attention of layers.1.attend \(Attends\) was not computed over the whole"):
        check_reached(model, attending, {id(modules[0]), id(modules[2])})
    with pytest.raises(ValueError, match="attention of ModuleDict was not"):
        check_reached(model, {}, set())
