import contextlib
import copy
import pickle

import pytest
import torch
import torch._dynamo.compiled_autograd as compiled_autograd
from safetensors.torch import load_file
from torch import nn

from patrickstar import _C, StateError, torch_scope
from patrickstar.module.chunked_parameter import ChunkedParameter
from patrickstar.module.compiled.dynamo import ElementwiseRecomputation, RecompileLimit
from patrickstar.runtime import initialize_engine
from tests.models import MODELS, Case, gpt2, token_batch
from tests.module.compiled.forms import BACKEND, BEFORE, TOWER, WIDTH, case_of, without_wrappers
from tests.training import assert_same, least_device_memory, make_config, train, train_plain

CONFIG = make_config(default_chunk_size=2048)


def rows(generator):
    return {"x": torch.randn(2, 16, WIDTH, generator=generator)}


def built(build, **config):
    torch.manual_seed(0)
    return initialize_engine(build, 0, {**CONFIG, **config})


@pytest.mark.parametrize("form", ["whole", "one_graph"])
def test_evaluation(form):
    budget = least_device_memory(case_of(form), CONFIG) + 32 * 1024
    torch.manual_seed(0)
    plain = TOWER.build()
    engine, optimizer = built(case_of(form).build, device_memory=budget)
    batch = token_batch(torch.Generator().manual_seed(3))
    with engine:
        for without_gradients in (torch.no_grad, torch.inference_mode):
            engine.backward(engine(**batch)["loss"])
            optimizer.step()
            plain.load_state_dict(without_wrappers(engine.state_dict()))
            with without_gradients():
                with _C.HostAllocations():
                    expected = plain(**batch)["loss"]
                torch.testing.assert_close(engine(**batch)["loss"], expected, rtol=1e-6, atol=0)
        assert engine.report()["num_evictions"] > 0


class Given(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, weight, more=None):
        y = self.linear(x) @ weight
        return y if more is None else y + more["row"][0]


class GivesParameters(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)
        self.table = nn.Parameter(torch.randn(4, WIDTH))
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)))
        self.given = Given()
        self.given.compile(backend=BACKEND, fullgraph=True)

    def forward(self, x):
        hidden = self.given(self.body(x), self.weight.t(), more={"row": [self.table[2]]})
        return {"loss": self.given(hidden, self.weight).square().mean()}


class KeepsParameters(nn.Module):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            with torch_scope():
                self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x):
            return x + torch.tanh(self.linear(self.norm(x)))

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return {"loss": hidden.float().square().mean()}


CASES = {
    "gives_parameters": (Case(GivesParameters, rows), {}),
    "keeps_parameters": (
        Case(
            lambda: torch.compile(KeepsParameters(), backend=BACKEND),
            lambda generator: {"tokens": torch.randint(0, 50, (2, 16), generator=generator)},
        ),
        {"bf16": {"enabled": True}, "use_cpu_embedding": True},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_parameters_from_elsewhere(name):
    case, options = CASES[name]
    config = {**CONFIG, **options}
    unlimited = train(case, config, steps=4)
    small = train(case, {**config, "device_memory": least_device_memory(case, config) + 32 * 1024}, steps=4)
    assert small.report["num_evictions"] > 0
    assert_same(small, unlimited)
    plain = train_plain(case, steps=4)
    assert unlimited.losses == pytest.approx(plain.losses, rel=1e-2 if options else 1e-6)


class Moody(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.mood = ""

    def forward(self, x):
        if self.mood == "writes":
            with torch.no_grad():
                self.linear.weight.mul_(0.5)
        hidden = self.linear(x)
        if self.mood == "raises":
            raise KeyError("mood")
        return hidden


def test_a_call_that_fails():
    moody = Moody()
    moody.compile(backend=BACKEND)
    engine, optimizer = built(lambda: nn.Sequential(moody, nn.Linear(8, 8)))
    with engine:
        for mood, error in (("raises", KeyError), ("writes", RuntimeError)):
            moody.mood = mood
            with pytest.raises(error, match="mood|0.linear.weight was changed in place within the compiled Moody"):
                engine(torch.ones(2, 8))
            moody.mood = ""
            assert type(moody.linear.weight) is ChunkedParameter
            engine.backward(engine(torch.ones(2, 8)).sum())
            optimizer.step()


@pytest.mark.parametrize("options", [{"mode": "reduce-overhead"}, {"mode": "max-autotune"}, {"backend": "cudagraphs"}])
def test_cuda_graphs_are_refused(options):
    module = nn.Linear(8, 8)
    with pytest.raises(ValueError, match="the Linear is compiled with CUDA graphs .* chunks move"):
        initialize_engine(lambda: torch.compile(module, **options), 0, CONFIG)
    assert type(module.weight) is nn.Parameter
    engine, _ = built(lambda: module)
    with engine:
        with pytest.raises(ValueError, match="CUDA graphs"):
            engine.compile(**options)
        torch.compile(engine, **options)(torch.ones(2, 8))  # its caller does not learn this
        assert not engine.is_compiled


def test_refused():
    engine, _ = built(lambda: nn.Linear(8, 8))
    with engine:
        with pytest.raises(ValueError, match=r"compile\(schedule=\.\.\.\)|schedule"):
            engine.compile(schedule=[(0, [])])
        with pytest.raises(ValueError, match="compiled_autograd_enabled"):
            engine.compile(compiled_autograd_enabled=True)
        with pytest.raises(RuntimeError, match=r"leave fullgraph=True out|dynamo.disable\(\)"):
            torch.compile(engine, backend=BACKEND, fullgraph=True)(torch.ones(2, 8))
        loss = engine(torch.ones(2, 8)).sum()
        with (
            compiled_autograd._enable(torch.compile(backend=BACKEND)),
            pytest.raises(StateError, match="compiled autograd is on"),
        ):
            engine.backward(loss)
        engine.backward(loss)
        with pytest.raises(StateError, match="within a forward"):
            engine.run_forward(lambda: engine.compile(backend=BACKEND))


@pytest.mark.slow
def test_generate():
    tokens = torch.arange(1, 9).view(2, 4)
    options = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(tokens)}
    gpt2 = MODELS["gpt2"]
    for form in ("whole", "in_place"):
        torch.manual_seed(0)
        plain = gpt2.build().eval()
        engine, optimizer = built(case_of(form, gpt2).build, device_memory=700_000)
        with engine:
            engine.eval()
            for _ in range(2):
                with _C.HostAllocations():
                    expected = plain.generate(input_ids=tokens, **options)
                assert torch.equal(engine.module.generate(input_ids=tokens, **options), expected)
                engine.train()
                engine.backward(engine(**token_batch(torch.Generator().manual_seed(1))).loss)
                optimizer.step()
                engine.eval()
                plain.load_state_dict(without_wrappers(engine.state_dict()))


def attributes(module):
    names = ("_compiled_call_impl", "forward", "compile", "zero_grad")
    return [[child.__dict__.get(name) for name in names] for child in module.modules()]


@pytest.mark.parametrize("form", BEFORE)
def test_close_leaves_the_module_as_it_was(form):
    module = BEFORE[form](TOWER.build())
    before = attributes(module)
    engine, _ = initialize_engine(lambda: module, 0, CONFIG)
    with engine:
        engine(**token_batch(torch.Generator()))
        if form != "one_graph":
            engine.compile(backend="eager")
            engine(**token_batch(torch.Generator()))
        assert attributes(module) != before
    assert attributes(module) == before
    module(**token_batch(torch.Generator()))["loss"].backward()


@pytest.mark.parametrize("make", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
@pytest.mark.parametrize("form", BEFORE)
def test_copies_are_what_copies_of_a_compiled_module_are(form, make):
    plain = BEFORE[form](TOWER.build())
    engine, _ = initialize_engine(case_of(form).build, 0, CONFIG)
    with engine:
        engine(**token_batch(torch.Generator()))
        outcomes = []
        for module in (plain, engine.module):
            with contextlib.ExitStack() as stack:
                stack.enter_context(_C.HostAllocations())
                clone = make(module)
                clone(**token_batch(torch.Generator()))["loss"].backward()
                kinds = [type(child) for child in clone.modules()]
                calls = [child._compiled_call_impl for child in clone.modules()]
                outcomes.append((kinds, calls, {type(param) for param in clone.parameters()}))
                clone.compile(backend="eager")
                clone(**token_batch(torch.Generator()))
        assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(("saved", "loaded"), [("whole", None), (None, "wrapped_blocks")])
def test_checkpoints_fit_whatever_is_compiled(tmp_path, saved, loaded):
    states = []
    for form in (saved, loaded):
        engine, optimizer = built(TOWER.build if form is None else case_of(form).build)
        with engine:
            for step in range(len(states), 2):
                if step == 1 and states:
                    engine.load_checkpoint(tmp_path)
                engine.backward(engine(**token_batch(torch.Generator().manual_seed(step)))["loss"])
                optimizer.step()
                if step == 0:
                    engine.save_checkpoint(tmp_path)
                    engine.export_weights(tmp_path / "weights")
            states.append(without_wrappers(engine.state_dict()))
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-5, atol=1e-7)
    names = {name for name, _ in TOWER.build().named_parameters()}
    assert set(load_file(tmp_path / "weights" / "model.safetensors")) == names


def test_on_the_meta_device():
    def build(compiles):
        with torch.device("meta"):
            module = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)))
        module[1][0] = compiles(module[1][0])
        return compiles(module)

    states = []
    for compiles in (lambda module: module, lambda module: torch.compile(module, backend=BACKEND)):
        engine, _ = built(lambda compiles=compiles: build(compiles))
        with engine:
            states.append(without_wrappers(engine.state_dict()))
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_every_layer_that_reads_its_own_cache_is_compiled():
    """A Hugging Face model that fills a key-value cache in training has other code in each layer."""
    limit = torch._dynamo.config.recompile_limit
    num_layers, graphs = limit + 2, []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    engine, optimizer = built(lambda: torch.compile(gpt2(layers=num_layers), backend=backend))
    with engine:
        engine.backward(engine(**token_batch(torch.Generator().manual_seed(3)))["loss"])
        optimizer.step()
    assert len(graphs) == num_layers
    assert torch._dynamo.config.recompile_limit == limit


def test_limits_on_variants_end_in_any_order():
    limit = torch._dynamo.config.recompile_limit
    first, second = RecompileLimit(3), RecompileLimit(5)
    first.restore()
    assert torch._dynamo.config.recompile_limit == limit + 5
    second.restore()
    assert torch._dynamo.config.recompile_limit == limit


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def saved_bytes(module):
    """Bytes that ``module``, compiled, saves for backward beside its parameters."""
    torch.compiler.reset()
    saved = {}

    def pack(tensor):
        if not isinstance(tensor, nn.Parameter):
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        torch.compile(module, backend="aot_eager")(torch.randn(64, 8))
    return sum(saved.values())


def test_compiled_modules_save_what_products_gave():
    module, rows = Gated(), 64 * 8 * 4
    usual = saved_bytes(module)
    with built(lambda: torch.compile(Gated(), backend="aot_eager"))[0]:
        assert saved_bytes(module) == 3 * rows  # the input, and two products
    assert saved_bytes(module) == usual > 3 * rows


def test_the_user_decides_what_compiled_modules_recompute():
    option = "ban_recompute_materialized_backward"
    with torch._functorch.config.patch({option: False}):
        first, second = ElementwiseRecomputation(), ElementwiseRecomputation()
        first.restore()
        second.restore()
        assert getattr(torch._functorch.config, option) is False
