import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from patrickstar import _C, StateError
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.models import MODELS, token_batch
from tests.training import ADAM, make_config

SMALL = {"device_memory": 1_000_000, "default_chunk_size": 8192}


def built(name, **config):
    torch.manual_seed(0)
    return initialize_engine(MODELS[name].build, 0, make_config(**config))


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [token_batch(generator) for _ in range(count)]


def test_a_call_of_the_module_is_a_call_of_the_engine():
    runs = []
    for through_engine in (True, False):
        engine, optimizer = built("gpt2", gradient_clipping=1.0)
        with engine:
            engine.train()
            model = engine if through_engine else engine.module
            losses = []
            for batch in batches(3):
                loss = model(**batch).loss
                engine.backward(loss)
                optimizer.step()
                losses.append(loss.item())
            runs.append((losses, engine.state_dict()))
    assert runs[0][0] == runs[1][0]
    assert_same_bits(runs[1][1], runs[0][1])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "lora"])
def test_state_dict(name, precision):
    torch.manual_seed(0)
    plain = MODELS[name].build().state_dict(keep_vars=True)
    engine, _ = built(name, precision=precision)
    with engine:
        module = engine.module
        state = module.state_dict()
        assert list(state) == list(plain)
        for key, value in state.items():
            assert type(value) is torch.Tensor
            assert value.dtype == plain[key].dtype
            exact = precision == "fp32" or plain[key].requires_grad
            torch.testing.assert_close(value, plain[key].detach(), rtol=0 if exact else 0.01, atol=0)
        shared = {key: [other for other in plain if plain[other] is plain[key]] for key in plain}
        for key, names in shared.items():
            assert all(state[other].data_ptr() == state[key].data_ptr() for other in names)
        assert len({value.untyped_storage().data_ptr() for value in state.values()}) == len(
            {id(value) for value in plain.values()}
        )
        inner_name, inner = next((n, m) for n, m in module.named_modules() if n and not list(m.children()))
        for key, value in inner.state_dict().items():
            assert_same_bits(value, state[f"{inner_name}.{key}"], key)
        assert (
            all(value is param for value, param in zip(module.state_dict(keep_vars=True).values(), plain, strict=True))
            is False
        )
    assert module._compiled_call_impl is None
    assert "zero_grad" not in module.__dict__


def test_save_pretrained_and_copies(tmp_path):
    engine, optimizer = built("gpt2", precision="bf16", **SMALL)
    with engine:
        engine.train()
        for batch in batches(2):
            engine.backward(engine(**batch).loss)
            optimizer.step()
        expected = engine.state_dict()
        engine.module.save_pretrained(tmp_path)
        loaded = type(engine.module).from_pretrained(tmp_path)  # in the dtype that config.json names
        copied = copy.deepcopy(engine.module)
        pickled = pickle.loads(pickle.dumps(engine.module))
        for other in (loaded, copied, pickled):
            assert type(other) is type(engine.module)
            other.zero_grad()
            state = other.state_dict()
            assert_same_bits(state, {name: expected[name] for name in state})  # float32, an average needs its bits
        batch = batches(1)[0]
        engine.eval()
        with torch.no_grad():
            logits = engine.module(**batch).logits
            torch.testing.assert_close(copied.bfloat16().eval()(**batch).logits, logits, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["gpt2", "lora"])
def test_generate(name):
    torch.manual_seed(0)
    plain = MODELS[name].build().eval()
    tokens = batches(1)[0]["input_ids"][:, :4]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    engine, optimizer = built(name, **SMALL)
    with engine:
        engine.eval()
        for _ in range(2):
            with _C.HostAllocations():  # tensors outside the engine are no activations
                expected = plain.generate(input_ids=tokens, **options)
            assert torch.equal(engine.module.generate(input_ids=tokens, **options), expected)
            engine.train()
            batch = batches(1)[0]
            loss = engine(**batch).loss
            engine.backward(loss)
            optimizer.step()
            engine.eval()
            plain.load_state_dict(engine.state_dict())
        assert engine.report()["device_peak_bytes"] <= SMALL["device_memory"]


def test_gradients_between_backward_and_step():
    torch.manual_seed(0)
    plain = MODELS["gpt2"].build()
    optim = torch.optim.AdamW(plain.parameters(), **ADAM)
    engine, optimizer = built("gpt2", **SMALL)
    session = engine._session
    with engine:
        engine.train()
        with pytest.raises(StateError, match="there are no gradients since the last step"):
            engine.grad_norm()
        for step, batch in enumerate(batches(3)):
            for _ in range(2):
                with _C.HostAllocations():
                    (plain(**batch).loss / 2).backward()
                engine.backward(engine(**batch).loss / 2)
            norm = session.grad_norm()
            for name, param in plain.named_parameters():
                gradient = session.states.gradient(engine.module.get_parameter(name), session.loss_scale)
                torch.testing.assert_close(gradient, param.grad, rtol=1e-4, atol=1e-7)
            if step == 1:  # a gradient that the user changes
                weight = engine.module.get_parameter("transformer.wpe.weight")
                plain.transformer.wpe.weight.grad.mul_(3)
                session.states.set_gradient(weight, plain.transformer.wpe.weight.grad, session.loss_scale)
                session.gradients.note_change()
                norm = session.grad_norm()
            reference = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1 * (step + 1))
            assert norm == pytest.approx(float(reference), rel=1e-5)
            assert float(engine.clip_grad_norm_(0.1 * (step + 1))) == pytest.approx(norm)
            optimizer.step()
            assert not optimizer.step_was_skipped
            optim.step()
            plain.zero_grad()
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-5, atol=1e-6)
            assert_same_bits(engine.full_value(engine.module.get_parameter(name)), value, name)


def test_a_skipped_step():
    engine, optimizer = built("gpt2", precision="fp16")
    with engine:
        engine.train()
        for factor, skipped in ((float("inf"), True), (1.0, False)):
            engine.backward(engine(**batches(1)[0]).loss * factor)
            optimizer.step()
            assert optimizer.step_was_skipped is skipped


def test_zero_grad_of_the_module():
    engine, optimizer = built("gpt2")
    with engine:
        engine.train()
        before = engine.state_dict()
        engine.backward(engine(**batches(1)[0]).loss)
        engine.module.zero_grad()
        optimizer.step()
        assert_same_bits(engine.state_dict(), before)


def test_a_walk_through_all_parameters():
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    engine, optimizer = initialize_engine(lambda: layers, 0, {"device_memory": 90_000, "default_chunk_size": 4160})
    with engine:
        engine.backward(engine(torch.ones(1, 64)).sum())
        optimizer.step()
        expected = engine.state_dict()
        for _ in range(2):
            with torch.no_grad():
                norms = {name: param.norm() for name, param in engine.module.named_parameters()}
            for name, norm in norms.items():
                torch.testing.assert_close(norm, expected[name].norm())
        assert engine.report()["device_peak_bytes"] <= 90_000


CONVERSIONS = {
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "float": lambda m: m.float(),
    "to float32": lambda m: m.to(torch.float32),
    "of a part": lambda m: m.transformer.h[0].half(),
    "to another device": lambda m: m.to("meta"),
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "share_memory": lambda m: m.share_memory(),
}


def test_compilers_of_an_open_module_are_refused():
    engine, _ = initialize_engine(lambda: nn.Linear(4, 2), 0, make_config())
    x = torch.ones(1, 4)
    with engine:
        expected = engine(x).detach()
        for compiler in (lambda: torch.jit.script(engine.module), lambda: torch.export.export(engine.module, (x,))):
            with pytest.raises(StateError, match=r"after engine.close\(\)"):
                compiler()
        assert torch.equal(torch.export.export(copy.deepcopy(engine.module), (x,)).module()(x), expected)
    assert torch.equal(torch.jit.script(engine.module)(x), expected)


def test_conversions_of_an_open_module_are_refused():
    engine, _ = built("gpt2", precision="bf16", device_memory=1_000_000, default_chunk_size=8192)
    with engine:
        module = engine.module
        module.register_buffer("shift", torch.rand(3))
        expected = engine.state_dict()
        for name, convert in CONVERSIONS.items():
            for owner in (module, engine):
                with pytest.raises(StateError, match="would (become|move to|get other memory)") as refused:
                    convert(owner if name != "of a part" else module)
            print(f"{name}: {refused.value}")
            assert_same_bits(engine.state_dict(), expected, name)
        fetches = engine.report()["num_on_demand_fetches"]
        for convert in (
            lambda m: m.bfloat16(),
            lambda m: m.to("cpu"),
            lambda m: m.cpu(),
            lambda m: m.to(engine.device),
        ):
            assert convert(module) is module
        assert engine.report()["num_on_demand_fetches"] == fetches
        assert module.shift.dtype == torch.bfloat16  # an ordinary tensor of the user's
        assert copy.deepcopy(module).half().transformer.wte.weight.dtype == torch.float16
    assert "_apply" not in module.__dict__
    assert module.half().transformer.wte.weight.dtype == torch.float16


class Model(nn.Module):
    def __init__(self, change):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        change(self)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def tie_by_data(m):
    m.head.weight.data = m.embed.weight.data


def tie_frozen(m):
    tie_by_data(m)
    m.head.requires_grad_(False)


def tie_rows(m):
    m.head.weight = nn.Parameter(m.embed.weight[:12].detach())


def tie_transposed(m):
    m.square, m.embed.weight = nn.Parameter(torch.rand(8, 8)), nn.Parameter(torch.rand(8, 8))
    m.square.data = m.embed.weight.data.t()


def keep_buffer(m):
    m.register_buffer("table", m.embed.weight.data)


def keep_attribute(m):
    m.table = m.embed.weight.detach()


def keep_in_a_list(m):
    m.head.rows = {"of": [m.embed.weight.data[3:5]]}


def keep_with_pytorch(m):
    m.embed.max_norm = 1.0
    m.table = m.embed.weight.data


REFUSED = {
    tie_by_data: "embed.weight and head.weight are two parameters over one memory",
    tie_rows: "embed.weight and head.weight are two parameters over one memory",
    tie_transposed: "square and embed.weight are two parameters over one memory",
    keep_buffer: "the buffer table has memory of embed.weight",
    keep_attribute: "the attribute table has memory of embed.weight",
    keep_in_a_list: "the attribute head.rows has memory of embed.weight",
    keep_with_pytorch: "the attribute table has memory of embed.weight",
}


@pytest.mark.parametrize("change", REFUSED)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_refused(change, device):
    with torch.device(device):
        module = Model(change)
    with pytest.raises(ValueError) as refused:
        initialize_engine(module, 0, make_config())
    assert REFUSED[change] in str(refused.value)
    assert type(module.embed.weight) is nn.Parameter


def tie_trained_head(m):
    tie_by_data(m)
    m.embed.requires_grad_(False)


def tie_both_frozen(m):
    tie_frozen(m)
    m.embed.requires_grad_(False)
    m.last = nn.Parameter(torch.ones(20))
    m.register_forward_hook(lambda module, args, out: out * module.last)


def tie(m):
    m.head.weight = m.embed.weight


def freeze(m):
    keep_buffer(m)
    m.embed.requires_grad_(False)


def normalise(m):
    torch.nn.utils.spectral_norm(m.head)


def prune_head(m):
    prune.l1_unstructured(m.head, "weight", 0.5)


def cut_columns(m):
    both = torch.rand(20, 16)
    m.embed.weight, m.head.weight = nn.Parameter(both[:, :8]), nn.Parameter(both[:, 8:])


def cut_rows(m):
    both = torch.rand(40, 8)
    m.embed.weight, m.head.weight = nn.Parameter(both[:20]), nn.Parameter(both[20:])


def hold_parameter(m):
    m.head.known = [m.embed.weight]


TIES = [tie, tie_frozen, tie_trained_head, tie_both_frozen]
ALLOWED = [freeze, normalise, prune_head, cut_columns, cut_rows, hold_parameter]


@pytest.mark.parametrize("change", [*TIES, *ALLOWED])
def test_trained_as_in_plain_pytorch(change):
    tokens = torch.arange(20)
    plain = Model(change)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), **ADAM)
    engine, optimizer = initialize_engine(lambda: Model(change), 0, make_config())
    with engine:
        for _ in range(3):
            plain_optimizer.zero_grad()
            expected = nn.functional.cross_entropy(plain(tokens), tokens.roll(1))
            expected.backward()
            plain_optimizer.step()
            loss = nn.functional.cross_entropy(engine(tokens), tokens.roll(1))
            engine.backward(loss)
            optimizer.step()
            assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_tie_is_kept(precision, tmp_path):
    tokens = torch.arange(20)
    engine, optimizer = initialize_engine(lambda: Model(tie_frozen), 0, make_config(precision))
    with engine:
        embed, head = engine.module.embed.weight, engine.module.head.weight
        for step in range(3):
            engine.backward(nn.functional.cross_entropy(engine(tokens).float(), tokens.roll(1)))
            assert head.grad is None and embed.grad is not None
            engine.module.head.zero_grad()
            optimizer.step()
            with torch.no_grad():
                (head if step == 0 else embed).mul_(0.5)
                assert_same_bits(head.clone(), embed.clone())
            if step == 0:
                engine.save_checkpoint(tmp_path)
                saved = engine.state_dict(), optimizer.state_dict()
        assert_same_bits(saved[0]["head.weight"], saved[0]["embed.weight"])
        assert set(optimizer.state_dict()["state"]) == {0}
        engine.load_checkpoint(tmp_path)
        assert_same_bits((engine.state_dict(), optimizer.state_dict()), saved)
        optimizer.load_state_dict(saved[1])
        assert_same_bits(optimizer.state_dict(), saved[1])
        head.requires_grad_(True)
        with pytest.raises(ValueError, match="has the memory of embed.weight requires grad by now"):
            engine(tokens)
        head.requires_grad_(False)
        engine(tokens)
    assert type(embed) is type(head) is nn.Parameter and head.data_ptr() == embed.data_ptr()


def test_a_frozen_one_cannot_be_unfrozen():
    tokens = torch.arange(20)
    engine, _ = initialize_engine(lambda: Model(freeze), 0, make_config())
    with engine:
        engine(tokens)
        engine.module.embed.requires_grad_(True)
        with pytest.raises(ValueError, match="the buffer table has memory of embed.weight"):
            engine(tokens)


def test_buffers_that_modules_have_in_common_stay_one():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            for layer in self.layers:
                layer.register_buffer("count", self.layers[0]._buffers.get("count", torch.zeros(())))

        def forward(self, x):
            for layer in self.layers:
                layer.count += 1
                x = layer(x)
            return x

    engine, _ = initialize_engine(Counts, 0, make_config())
    with engine:
        engine(torch.ones(1, 4))
        assert engine.module.layers[0].count.item() == engine.module.layers[1].count.item() == 2
