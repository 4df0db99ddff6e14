import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from patrickstar import initialize_engine
from patrickstar.sequence import in_tiles, linear_cross_entropy

HIDDEN, INTERMEDIATE = 8, 20
SHAPES = [(23, HIDDEN), (1, 17, HIDDEN), (3, 7, HIDDEN), (2, 3, 5, HIDDEN)]


class Gated(nn.Module):
    def __init__(self, dropout=0.0, hidden=HIDDEN, intermediate=INTERMEDIATE, bias=True):
        super().__init__()
        self.gate, self.up = (nn.Linear(hidden, intermediate, bias=bias) for _ in range(2))
        self.down = nn.Linear(intermediate, hidden, bias=bias)
        self.dropout = nn.Dropout(dropout)
        self.calls = []

    def forward(self, hidden):
        self.calls.append(tuple(hidden.shape))
        inner = nn.functional.silu(self.gate(hidden)) * self.up(hidden)
        return self.dropout(self.down(inner))


class RowByRow(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(INTERMEDIATE, HIDDEN))
        self.scale = nn.Parameter(torch.randn(INTERMEDIATE))

    def forward(self, hidden):
        inner = (hidden.unsqueeze(-2) * self.weight).sum(-1)
        return self.scale * inner * torch.rsqrt(inner.square().mean(-1, keepdim=True) + 1e-6)


def run(module, hidden, tile_tokens=None):
    module.zero_grad()
    hidden = hidden.clone().requires_grad_()
    params = list(module.parameters())
    output = module(hidden) if tile_tokens is None else in_tiles(module, hidden, params, tile_tokens)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    (output * weights).sum().backward()
    return output.detach(), hidden.grad, [param.grad for param in params]


def relative(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tile_tokens", [1, 4, 1000])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=["fp64", "fp32"])
def test_outputs_and_gradients(shape, tile_tokens, dtype, tolerance):
    torch.manual_seed(0)
    module, hidden = Gated().to(dtype), torch.randn(shape, dtype=dtype)
    output, slope, gradients = run(module, hidden)
    module.calls.clear()
    tiled_output, tiled_slope, tiled_gradients = run(module, hidden, tile_tokens)
    assert {len(called) for called in module.calls} == {len(shape)}
    assert tiled_output.shape == output.shape and tiled_output.dtype == dtype
    for found, expected in zip((tiled_output, tiled_slope, *tiled_gradients), (output, slope, *gradients), strict=True):
        assert relative(found, expected) <= tolerance


@pytest.mark.parametrize("tile_tokens", [2, 5, 16])
def test_bits_where_rows_do_not_depend_on_their_number(tile_tokens):
    torch.manual_seed(0)
    module, hidden = RowByRow(), torch.randn(3, 11, HIDDEN)
    output, slope, gradients = run(module, hidden)
    found = run(module, hidden, tile_tokens)
    assert torch.equal(found[0], output) and torch.equal(found[1], slope)
    for one, other in zip(found[2], gradients, strict=True):
        assert relative(one, other) <= 1e-6


def test_a_gradient_is_rounded_once_and_handed_in_once():
    """`in_tiles`: 512 tiles lose no more than one rounding to bfloat16."""
    torch.manual_seed(0)
    module, hidden = nn.Linear(HIDDEN, HIDDEN).bfloat16(), torch.randn(512, HIDDEN).bfloat16().abs()
    handed_in = []
    module.weight.register_post_accumulate_grad_hook(lambda param: handed_in.append(param.grad))
    in_tiles(module, hidden, list(module.parameters()), 1).sum().backward()
    exact = hidden.double().sum(0).expand(HIDDEN, HIDDEN)
    assert len(handed_in) == 1
    assert ((module.weight.grad.double() - exact).abs() <= exact * 2**-8).all()


def test_dropout_drops_the_same_again():
    module, hidden = Gated(dropout=0.4).double(), torch.randn(2, 9, HIDDEN, dtype=torch.float64)

    def one_after_the_other(rows):
        return torch.cat([module(tile) for tile in rows.view(-1, HIDDEN).split(4)]).view(rows.shape)

    results = []
    for compute in (one_after_the_other, lambda rows: in_tiles(module, rows, list(module.parameters()), 4)):
        torch.manual_seed(3)
        module.zero_grad()
        rows = hidden.clone().requires_grad_()
        output = compute(rows)
        between = torch.rand(1)
        output.square().sum().backward()
        results.append(
            [output.detach(), rows.grad, *(param.grad for param in module.parameters()), between, torch.rand(1)]
        )
    for found, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert (results[0][0] == 0).any()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_within_a_checkpointed_layer(use_reentrant):
    """`_Kept`: a layer's last module is not computed a third time."""
    torch.manual_seed(0)
    module, hidden = Gated().double(), torch.randn(10, HIDDEN, dtype=torch.float64)
    params = list(module.parameters())

    def layer(rows, tile_tokens):
        return rows + (module(rows.sin()) if tile_tokens is None else in_tiles(module, rows.sin(), params, tile_tokens))

    gradients = []
    for tile_tokens in (None, 5):
        module.zero_grad()
        module.calls.clear()
        rows = hidden.clone().requires_grad_()
        checkpoint(layer, rows, tile_tokens, use_reentrant=use_reentrant).square().sum().backward()
        gradients.append([rows.grad, *(param.grad for param in params)])
    assert len(module.calls) == (2 + 2 if not use_reentrant else 2 + 2 + 2)
    for found, expected in zip(*reversed(gradients), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_autocast_and_frozen_parameters():
    torch.manual_seed(0)
    module, hidden = Gated(), torch.randn(9, HIDDEN)
    module.up.requires_grad_(False)
    gradients = []
    for tile_tokens in (None, 4):
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = (
                module(hidden)
                if tile_tokens is None
                else in_tiles(module, hidden, list(module.parameters()), tile_tokens)
            )
        assert output.dtype == torch.bfloat16
        output.float().square().sum().backward()
        assert module.up.weight.grad is None
        gradients.append([param.grad for param in module.parameters() if param.requires_grad])
    for found, expected in zip(*reversed(gradients), strict=True):
        assert found.dtype == torch.float32 and relative(found, expected) < 0.01


def test_without_gradients_nothing_is_kept():
    module, hidden = Gated(), torch.randn(9, HIDDEN)
    params = list(module.parameters())
    with torch.no_grad():
        output = in_tiles(module, hidden, params, 4)
    assert not output.requires_grad and module.calls == [(4, HIDDEN), (4, HIDDEN), (1, HIDDEN)]
    module.requires_grad_(False)
    assert not in_tiles(module, hidden, params, 4).requires_grad


def peak_bytes(function):
    """Most bytes of live tensors in ``function()``, beyond those before; every allocation counts."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    sizes = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(sizes))


def test_intermediate_tensors_exist_for_one_tile():
    """docs/guides/long_sequences.md: a gated MLP has six of [tokens, intermediate size] at its peak; in tiles, six of
    [tile, intermediate size], two gradients of the parameters and four tensors of [tokens, hidden size].
    """
    tokens, hidden_size, size = 1024, 8, 512
    module = Gated(hidden=hidden_size, intermediate=size, bias=False)
    params = list(module.parameters())
    num_params = sum(param.numel() for param in params)
    module(torch.randn(2, hidden_size)).sum().backward()  # PyTorch's one-time allocations
    peaks = {}
    for tile_tokens in (tokens, 256, 64, 16):
        module.zero_grad()
        hidden = torch.randn(tokens, hidden_size, requires_grad=True)

        def step(hidden=hidden, tile_tokens=tile_tokens):
            in_tiles(module, hidden, params, tile_tokens).sum().backward()

        peaks[tile_tokens] = peak_bytes(step)
    print(peaks)
    assert peaks[tokens] >= 4 * 6 * tokens * size
    for tile_tokens in (256, 64, 16):
        inner, rest = 4 * 6 * tile_tokens * size, 4 * (2 * num_params + 4 * tokens * hidden_size)
        assert inner <= peaks[tile_tokens] <= inner + 1.2 * rest


def test_wrong_calls():
    module, hidden = Gated(), torch.randn(6, HIDDEN)
    with pytest.raises(ValueError, match="tile_tokens is 0; give at least 1"):
        in_tiles(module, hidden, [], 0)
    with pytest.raises(ValueError, match=r"compute was called with \[8\]; tiles need"):
        in_tiles(module, hidden[0], [], 1)
    for compute, gave in ((lambda tile: (tile, tile), "a tuple"), (lambda tile: tile[:1], r"\[1, 8\]")):
        with pytest.raises(ValueError, match=rf"experts gave {gave} for a tile of \[4, 8\]; .* leave it untiled"):
            in_tiles(compute, hidden, [], 4, name="experts")
    twice = in_tiles(module, hidden.requires_grad_(), [], 4)
    with pytest.raises(RuntimeError, match="create_graph=True, but tiled modules have no second derivative"):
        torch.autograd.grad(twice.sum(), hidden, create_graph=True)


def draw(dtype=torch.float64, tokens=(3, 7), with_bias=True):
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(*tokens, 16, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(50, 16, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    bias = torch.randn(50, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() if with_bias else None
    labels = torch.randint(50, tokens, generator=generator)
    labels[0, :3] = -100
    return hidden, weight, bias, labels


def whole(hidden, weight, bias, labels, softcap=None, reduction="mean"):
    logits = functional.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction=reduction)


@pytest.mark.parametrize("tile_tokens", [1, 4, 21, None])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("with_bias", [True, False])
def test_as_cross_entropy_of_logits(tile_tokens, softcap, reduction, with_bias):
    hidden, weight, bias, labels = draw(with_bias=with_bias)
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
    expected = whole(hidden, weight, bias, labels, softcap, reduction)
    want = torch.autograd.grad(3.0 * expected, leaves)
    options = {"bias": bias, "softcap": softcap, "reduction": reduction, "tile_tokens": tile_tokens}
    loss = linear_cross_entropy(hidden, weight, labels, **options)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    for got, wanted in zip(torch.autograd.grad(3.0 * loss, leaves), want, strict=True):
        assert got.dtype == torch.float64
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-13)


def test_in_bfloat16_it_is_no_further_from_the_truth_than_whole_logits_are():
    truth = [leaf.detach() for leaf in draw()[:2]]
    labels = draw()[3]
    rounded = [leaf.bfloat16().double().requires_grad_() for leaf in truth]
    exact = torch.autograd.grad(whole(*rounded, None, labels), rounded)
    gaps = []
    for loss_of in (
        lambda h, w: whole(h, w, None, labels),
        lambda h, w: linear_cross_entropy(h, w, labels, tile_tokens=2),
    ):
        leaves = [leaf.bfloat16().requires_grad_() for leaf in truth]
        grads = torch.autograd.grad(loss_of(*leaves), leaves)
        assert all(grad.dtype == torch.bfloat16 for grad in grads)
        gaps.append([(grad.double() - want).abs().max().item() for grad, want in zip(grads, exact, strict=True)])
    assert all(tiled <= 1.5 * plain for plain, tiled in zip(*gaps, strict=True))


def test_tokens_of_all_ranks_may_be_what_the_sum_is_sharded_by():
    hidden, weight, _, labels = draw()
    loss = linear_cross_entropy(hidden, weight, labels, num_targets=40)
    assert loss.item() == pytest.approx(whole(hidden, weight, None, labels, reduction="sum").item() / 40, rel=1e-12)


def test_nothing_is_kept_where_no_gradient_is_asked_for():
    hidden, weight, _, labels = draw()
    loss = linear_cross_entropy(hidden.detach(), weight.detach(), labels)
    assert not loss.requires_grad and loss.grad_fn is None
    frozen = linear_cross_entropy(hidden, weight.detach(), labels)
    frozen.backward()
    assert hidden.grad is not None and weight.grad is None


def test_a_second_backward_is_refused():
    hidden, weight, _, labels = draw()
    loss = linear_cross_entropy(hidden, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward through the same loss; compute the loss again"):
        loss.backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.zeros(3, 6, dtype=torch.int64)}, r"labels \[3, 6\]; give \[..., hidden size\]"),
        ({"bias": torch.zeros(49)}, r"bias is \[49\]; weight is \[50, 16\], so it must be \[50\]"),
        ({"reduction": "none"}, "reduction is 'none'; give mean or sum"),
        ({"tile_tokens": 0}, "tile_tokens is 0; give at least 1"),
    ],
)
def test_what_does_not_go_together_is_refused(change, message):
    hidden, weight, _, labels = draw()
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(hidden, weight, **({"labels": labels} | change))


class LanguageModel(torch.nn.Module):
    def __init__(self, loss, is_tied):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(64, 32)
        self.layer = torch.nn.Linear(32, 32)
        self.head = torch.nn.Linear(32, 64, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight
        self.loss = loss

    def forward(self, tokens):
        hidden = torch.relu(self.layer(self.embedding(tokens[:, :-1])))
        return self.loss(hidden, self.head, tokens[:, 1:])


def tiled(hidden, head, labels):
    return linear_cross_entropy(hidden, head.weight, labels, tile_tokens=5)


def plain(hidden, head, labels):
    return functional.cross_entropy(head(hidden).flatten(0, -2), labels.flatten())


def train(loss, is_tied, **config):
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "default_chunk_size": 1024, **config}
    engine, optimizer = initialize_engine(lambda: LanguageModel(loss, is_tied), config=config)
    tokens = torch.randint(64, (4, 9), generator=torch.Generator().manual_seed(1))
    losses = []
    with engine:
        for _ in range(6):
            optimizer.zero_grad()
            value = engine(tokens)
            engine.backward(value)
            optimizer.step()
            losses.append(value.item())
        return losses, engine.report()["device_peak_bytes"]


@pytest.mark.parametrize("is_tied", [False, True])
def test_in_an_engine_a_budget_changes_no_bit(is_tied):
    ample, peak = train(tiled, is_tied)
    scarce, used = train(tiled, is_tied, device_memory=int(0.7 * peak))
    assert scarce == ample and used < peak
    assert ample == pytest.approx(train(plain, is_tied)[0], rel=1e-5)
    assert ample[-1] < ample[0]
