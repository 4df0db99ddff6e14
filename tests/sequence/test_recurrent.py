"""Convolutions and scans over a sharded sequence against one rank with all tokens, in float64."""

import dataclasses
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from patrickstar.sequence import Mode, SequenceGroup, positions_of_rank
from patrickstar.sequence.attention import _Alone
from patrickstar.sequence.division import Division, gathered_parts
from patrickstar.sequence.hugging_face import ShardedModel
from patrickstar.sequence.recurrent import Scan, sharded_convolution, sharded_scan
from patrickstar.sequence.recurrent_layers import RecurrentLayers
from patrickstar.sequence.sharded_attention import running
from patrickstar.sequence.ulysses import key_heads, repeated_heads
from tests.distributed import run_ranks
from tests.sequence.test_attention import groups
from tests.text_models import build

BATCH, CHANNELS = 2, 6
LAYOUTS = Scan(by_head=("value", "decay"), by_key_head=("key",), per_head=("gain", "absent"))


def scan(value, decay, key, gain, absent=None, factor=1.0):
    """state_t = decay_t state_{t - 1} + value_t key_t^T for each head; the output is its sum over keys."""
    key = key.repeat_interleave(value.shape[2] // key.shape[2], dim=2)
    state, outs = 0.0, []
    for token in range(value.shape[1]):
        state = decay[:, token, :, None, None] * state + value[:, token, ..., None] * key[:, token, :, None]
        outs.append(state.sum(-1) * gain[:, None] * factor)
    return torch.stack(outs, dim=1), state


@functools.wraps(scan)
def kernel(x, **options):
    """Names its positional argument otherwise, as kernels behind transformers' functions do."""
    return scan(x, **options)


def convolve(hidden, weight, bias, activation):
    out = F.conv1d(hidden, weight[:, None], bias, padding=weight.shape[1] - 1, groups=len(weight))
    return activation(out[..., : hidden.shape[2]])


@dataclasses.dataclass(frozen=True)
class Case:
    length: int = 24
    heads: int = 12
    key_heads: int = 12
    kernel: int = 4

    def tensors(self):
        generator = torch.Generator().manual_seed(7)

        def draw(*shape):
            return torch.rand(shape, generator=generator, dtype=torch.float64)

        by_token = {
            "value": draw(BATCH, self.length, self.heads, 3),
            "decay": draw(BATCH, self.length, self.heads),
            "key": draw(BATCH, self.length, self.key_heads, 5),
            "hidden": draw(BATCH, self.length, CHANNELS),
        }
        return by_token, {"gain": draw(self.heads), "weight": draw(CHANNELS, self.kernel), "bias": draw(CHANNELS)}


CASES = [
    Case(),
    Case(key_heads=4),
    Case(key_heads=1, length=21),
    Case(heads=6, key_heads=2),
    Case(heads=5, key_heads=5, length=13, kernel=7),  # slices shorter than the halo, heads that no ranks divide
    Case(heads=2, key_heads=1, kernel=1),
]


def results(by_token, params, run_scan, run_convolution, real):
    leaves = {name: value.clone().requires_grad_() for name, value in (by_token | params).items()}
    of_scan = {name: leaves[name] for name in ("decay", "key", "gain")}
    scanned, *rest = run_scan(leaves["value"], factor=0.5, **of_scan)
    convolved = run_convolution(leaves["hidden"].transpose(1, 2), leaves["weight"], leaves["bias"], torch.tanh)
    assert rest == [None] or isinstance(rest[0], torch.Tensor)
    found = {"scanned": scanned[:, real], "convolved": convolved.transpose(1, 2)[:, real]}
    sum(value.square().sum() for value in found.values()).backward()
    found = {name: value.detach() for name, value in found.items()}
    return found | {name: leaves[name].grad[:, real] for name in by_token}, {name: leaves[name].grad for name in params}


def gaps_on_each_rank():
    dist.init_process_group("gloo")
    found = {}
    for mode in Mode:
        group = groups(mode)
        for index, case in enumerate(CASES if group is not None else ()):
            by_token, params = case.tensors()
            division = Division(group.rank, group.size, mode, case.length)
            expected = results(by_token, params, scan, convolve, slice(None))
            here = positions_of_rank(group.rank, group.size, division.local_length, mode)
            real = here < case.length
            mine, sums = results(
                {name: division.local(value, 0.0) for name, value in by_token.items()},
                params,
                lambda *args, group=group, division=division, **kwargs: sharded_scan(
                    group, division, LAYOUTS, kernel, *args, **kwargs
                ),
                lambda *args, group=group, division=division: sharded_convolution(group, division, convolve, *args),
                real,
            )
            pairs = [(value, expected[0][name][:, here[real]]) for name, value in mine.items()]
            pairs += [(sum(gathered_parts(value, group)), expected[1][name]) for name, value in sums.items()]
            found[mode.value, index] = max((one - other).abs().max().item() for one, other in pairs)
    return found


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_as_one_rank(num_ranks):
    for found in run_ranks(num_ranks, gaps_on_each_rank):
        assert len(found) == len(CASES) * (5 if num_ranks == 4 else 4)
        assert {key: gap for key, gap in found.items() if not gap < 1e-11} == {}


def sent_bytes():
    dist.init_process_group("gloo")
    group, case, sent = SequenceGroup(), Case(key_heads=4), []
    by_token, params = ({name: value.requires_grad_() for name, value in part.items()} for part in case.tensors())
    division = Division(group.rank, group.size, Mode.ZIGZAG, case.length)
    mine = {name: division.local(value, 0.0) for name, value in by_token.items()}
    scanned, _ = sharded_scan(group, division, LAYOUTS, scan, mine["value"], mine["decay"], mine["key"], params["gain"])
    sent.append(group.sent_bytes)
    scanned.sum().backward()
    sent.append(group.sent_bytes - sum(sent))
    sharded_convolution(
        group, division, convolve, mine["hidden"].transpose(1, 2), params["weight"], params["bias"], torch.tanh
    ).sum().backward()
    return [*sent, group.sent_bytes - sum(sent)]


def test_bytes_are_those_of_the_formulas():
    """(N - 1) / N of a scan's inputs and outputs, each way; ends of slices to each other rank, and their gradients."""
    tokens = BATCH * 24 // 4
    scanned = (4 - 1) * tokens * (12 * (3 + 1 + 3) + 4 * 5) // 4 * 8
    halo = 2 * (4 - 1) * BATCH * 2 * 3 * CHANNELS * 8
    assert run_ranks(4, sent_bytes) == [[scanned, scanned, halo]] * 4


def test_heads_of_any_number_of_ranks():
    assert repeated_heads(5, 3) == ((0, 1), (2, 3), (4, 0))
    assert key_heads(repeated_heads(10, 3), 2) == ((0, 1), (2, 3), (4, 0))
    assert key_heads(repeated_heads(2, 4), 2) == ((0,), (0,), (0,), (0,))


def test_layers_are_replaced_and_restored():
    model = build("Qwen3NextForCausalLM")
    layers = RecurrentLayers(model)
    assert [type(layer).__name__ for layer in layers.layers.values()] == ["Qwen3NextGatedDeltaNet"]
    assert all("forward" in vars(layer) for layer in layers.layers.values())
    layers.restore()
    assert not any("forward" in vars(layer) for layer in layers.layers.values())


def test_packed_documents_and_models_that_pass_nothing_on_are_refused():
    model = build("Qwen3NextForCausalLM")
    sharded = ShardedModel(model, _Alone(), Mode.RING, lambda: 0, torch.device("cpu"))
    tokens = torch.arange(1, 9)[None]
    arguments = sharded.divide({"input_ids": tokens, "seq_idx": torch.zeros_like(tokens)})
    with (
        pytest.raises(ValueError, match="linear_attn .*is given the bounds of packed documents"),
        sharded.running(arguments),
    ):
        model(**arguments.kwargs)
    layer, hidden = next(iter(RecurrentLayers(build("Mamba2ForCausalLM")).layers.values())), torch.zeros(1, 4, 32)
    assert isinstance(layer, nn.Module)
    with pytest.raises(ValueError, match="Mamba2Mixer is not told by its model"), running(arguments.call):
        layer(hidden)
