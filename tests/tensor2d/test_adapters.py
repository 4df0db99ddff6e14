import functools

import pytest
import torch
import transformers
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn

from patrickstar.ranks.emulated import run_emulated
from patrickstar.ranks.mesh import Mesh, MeshRanks
from patrickstar.tensor2d import Linear2D, MeshGroup, divide_batch, parallelize, whole_values
from patrickstar.tensor2d.layer import source_values
from patrickstar.tensor2d.one_dimension import ColumnLinear1D, RowLinear1D
from patrickstar.tensor2d.sharded_models import parallelize_1d
from tests.tensor2d.models import batch, exact_norms
from tests.tensor2d.on_meshes import draw, gap
from tests.tensor2d.test_plans import CONFIGS

LENGTH, STEPS = 6, 3
LINEAR = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "bert": ["query", "key", "value", "dense"],
}
LINEAR["qwen2"] = LINEAR["llama"]


def adapted(name, targets=None, further=None, **options):
    torch.manual_seed(0)
    make = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    model = make.from_config(CONFIGS[name], attn_implementation="sdpa")
    model = get_peft_model(model, LoraConfig(r=3, target_modules=targets, fan_in_fan_out=name == "gpt2", **options))
    if further is not None:
        further(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return exact_norms(model.double())


def trained(model, group=None):
    ids, labels = batch(LENGTH)
    if group is not None:
        ids, labels = divide_batch(ids, group.place), divide_batch(labels, group.place)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        out = model(input_ids=ids, labels=ids)
        loss = out.loss if group is not None else exact_loss(model, out.logits, ids)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64)


def exact_loss(model, logits, ids):
    if model.config.model_type == "bert":
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def on_threads(rows, columns, mode, build):
    def train_here(ranks):
        group = MeshGroup.of_ranks(MeshRanks(ranks, Mesh(rows=rows, columns=columns)))
        model = models[ranks.context.rank]
        base = model.get_base_model() if isinstance(model, PeftModel) else model
        if mode == "1d":
            parallelize_1d(base, group.world_group)
            group = MeshGroup.alone()  # whole sequences are given
        else:
            parallelize(base, group)
        losses = trained(model, group)
        prefix = "base_model.model." if model is not base else ""
        return losses, {prefix + name: value for name, value in source_values(base).items()}, model

    models = [build() for _ in range(rows * columns)]
    return run_emulated(rows * columns, train_here)


def compare(mesh, name, targets=None, **options):
    rows, columns, *mode = mesh
    plain = adapted(name, targets, **options)
    start = {key: value.detach().clone() for key, value in plain.named_parameters(remove_duplicate=False)}
    expected = trained(plain)
    values = dict(plain.named_parameters(remove_duplicate=False))
    picked = get_peft_model_state_dict(plain)
    build = functools.partial(adapted, name, targets, **options)
    for losses, found, model in on_threads(rows, columns, (mode or ["2d"])[0], build):
        assert gap(losses, expected) <= 1e-10
        assert {id(values[key]) for key in found} == {id(parameter) for parameter in plain.parameters()}
        for key, value in found.items():
            assert value.shape == values[key].shape and gap(value, values[key]) <= 1e-8, key
            assert torch.equal(values[key], start[key]) != values[key].requires_grad, key
        assert get_peft_model_state_dict(model, state_dict=found).keys() == picked.keys()


MESHES = [(1, 2), (2, 2), (1, 2, "1d")]
MORE = [(2, 1), (2, 3), (1, 3, "1d")]


@pytest.mark.parametrize("mesh", [*MESHES, *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in MORE)], ids=str)
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("llama", None),
        ("llama", LINEAR["llama"]),
        ("gpt2", LINEAR["gpt2"]),
        pytest.param("qwen2", LINEAR["qwen2"], marks=pytest.mark.slow),
        pytest.param("bert", LINEAR["bert"], marks=pytest.mark.slow),
    ],
    ids=["llama-qv", "llama", "gpt2", "qwen2", "bert"],
)
def test_adapters_are_trained_as_by_peft(mesh, name, targets):
    compare(mesh, name, targets)


def train_another(model):
    model.add_adapter("another", LoraConfig(r=2, target_modules=["q_proj", "o_proj"]))
    model.set_adapter("another")


def train_two(model):
    train_another(model)
    model.base_model.set_adapter(["default", "another"])


OPTIONS = {
    "scaling": ("llama", None, {"use_rslora": True, "lora_alpha": 7}),
    "biases of adapters": ("gpt2", LINEAR["gpt2"], {"lora_bias": True}),
    "biases of adapted layers": ("gpt2", ["c_attn", "mlp.c_proj"], {"bias": "lora_only"}),
    "all biases": ("qwen2", None, {"bias": "all"}),
    "another adapter": ("llama", None, {"further": train_another}),
    "two adapters": ("llama", None, {"further": train_two}),
}


@pytest.mark.parametrize("mesh", [(1, 2), *(pytest.param(m, marks=pytest.mark.slow) for m in MESHES[1:])], ids=str)
@pytest.mark.parametrize("case", list(OPTIONS))
def test_options_of_lora(mesh, case):
    name, targets, options = OPTIONS[case]
    compare(mesh, name, targets, **options)


@pytest.mark.parametrize("mode", ["2d", "1d"])
def test_checkpoints_of_activations_over_a_frozen_base(mode):
    """Reentrant checkpoints need inputs with gradients, which a hook of the embedding makes."""

    def build():
        model = adapted("llama")
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": True})
        return model.train()

    expected = trained(build())
    for losses, _, _ in on_threads(1, 2, mode, build):
        assert gap(losses, expected) <= 1e-10


@pytest.mark.parametrize("layer", [(Linear2D, 6, 8), (Linear2D, 8, 6), (ColumnLinear1D, 6, 8), (RowLinear1D, 6, 8)])
def test_frozen_weights_keep_no_activations(layer):
    kind, *sizes = layer
    frozen = kind(*sizes, MeshGroup.alone()).requires_grad_(False)
    hidden = draw(2, 3, sizes[0], dtype=torch.float32).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        out = frozen(hidden)
    assert {tensor.data_ptr() for tensor in kept} == {frozen.weight.data_ptr()}
    (grad,) = torch.autograd.grad(out.sum(), hidden)
    whole = whole_values(frozen)["weight"]
    assert gap(grad, whole.sum(0).expand_as(grad)) <= 1e-6 and frozen.weight.grad is None


def test_a_model_that_transformers_adapts():
    def build():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"])
        model.add_adapter(LoraConfig(target_modules=["q_proj", "down_proj"]))
        return exact_norms(model.double())

    plain = build()
    expected = trained(plain)
    for losses, found, model in on_threads(1, 2, "2d", build):
        assert gap(losses, expected) <= 1e-10
        picked = get_peft_model_state_dict(model, state_dict=found)
        for name, value in get_peft_model_state_dict(plain).items():
            assert gap(picked[name], value) <= 1e-8


def test_adapters_are_switched_off_and_dropped_by_peft():
    ids = batch(LENGTH)[0]
    model = adapted("llama", LINEAR["llama"], lora_dropout=0.5)
    with torch.no_grad(), model.disable_adapter():
        expected = model(ids).logits
    parallelize(model.get_base_model(), MeshGroup.alone())
    with torch.no_grad():
        with model.disable_adapter():
            assert gap(model(ids).logits, expected) <= 1e-12
        one, other = model.train()(ids).logits, model(ids).logits
        assert not torch.equal(one, other)  # other elements are dropped
        assert torch.equal(model.eval()(ids).logits, model(ids).logits)
    with pytest.raises(RuntimeError, match="size mismatch for .*lora_"):
        set_peft_model_state_dict(model, get_peft_model_state_dict(adapted("llama", LINEAR["llama"])))
    with pytest.raises(RuntimeError, match=r"self_attn.q_proj has a part .* load engine.state_dict\(\) into a model"):
        model.merge_adapter()


REFUSED = {
    "DoRA": (LoraConfig(target_modules=["o_proj"], use_dora=True), r"o_proj \(peft.* variant of LoRA \(DoraLinear"),
    "IA3": (
        IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
        r"self_attn.k_proj \(peft.tuners.ia3.layer.Linear\) has no form .*merge_and_unload",
    ),
    "modules_to_save": (
        LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]),
        r"lm_head \(peft.utils.other.ModulesToSaveWrapper\) .* leave it out of .*modules_to_save",
    ),
    "trained tokens": (
        LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1]),
        r"model.embed_tokens \(peft.*TrainableTokensWrapper\) has no form",
    ),
    "embedding": (LoraConfig(target_modules=["embed_tokens"]), r"embed_tokens \(peft.*Embedding\) has no form"),
    "head": (LoraConfig(target_modules=["lm_head"]), r"lm_head \(Linear\) .*leave it out of target_modules"),
    "some biases": (
        LoraConfig(target_modules=["q_proj", "v_proj"], bias="lora_only"),
        r"k_proj.bias is frozen and .*q_proj.base_layer.bias, .*v_proj.base_layer.bias is trained, .* one parameter",
    ),
    "merged": (LoraConfig(target_modules=["q_proj"]), r"q_proj \(peft.* part of its weights now \(default\)"),
}


@pytest.mark.parametrize("case", list(REFUSED))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_no_plain_lora_is_refused_by_name(case):
    config, expected = REFUSED[case]
    model = get_peft_model(transformers.AutoModelForCausalLM.from_config(CONFIGS["qwen2"]), config)
    if case == "merged":
        model.merge_adapter()
    with pytest.raises(ValueError, match=expected):
        parallelize(model.get_base_model(), MeshGroup.alone())
    with pytest.raises(ValueError, match=r"PeftModel is PEFT's; divide .* get_base_model\(\)"):
        parallelize(model, MeshGroup.alone())
