import pytest
import torch
from torch.nn import functional

from patrickstar import initialize_engine
from patrickstar.sequence import linear_cross_entropy


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


def test_tokens_of_all_ranks_may_be_what_the_sum_is_divided_by():
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
