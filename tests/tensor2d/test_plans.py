import pytest
import torch
import transformers
from torch import nn

from patrickstar.tensor2d import Linear2D, MeshGroup, SmallEmbedding2D, Summa2D, divide_batch, parallelize, whole_logits
from patrickstar.tensor2d.layer import source_values
from tests.tensor2d.models import GPT2, LLAMA, VOCABULARY, batch, exact_norms
from tests.tensor2d.on_meshes import gap, on_mesh, open_mesh

SMALL = {"vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2}
CONFIGS = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "qwen2": transformers.Qwen2Config(**SMALL, num_attention_heads=12, num_key_value_heads=6, tie_word_embeddings=True),
    "bert": transformers.BertConfig(
        **SMALL,
        num_attention_heads=6,
        max_position_embeddings=8,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
        pad_token_id=0,
    ),
}


def build(name, dtype=torch.float64):
    torch.manual_seed(0)
    make = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    model = make.from_config(CONFIGS[name], attn_implementation="sdpa").to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return exact_norms(model)


def run(model, name, ids, labels, padding, loss=None):
    others = {"token_type_ids": ids % 2} if name == "bert" else {"shift_labels": labels}
    out = model(ids, attention_mask=padding, labels=labels, **others)
    # Hugging Face's is rounded to float32.
    return out.logits, out.loss if loss is None else loss(out.logits, labels)


def compare(name, group):
    theirs, ours = build(name), build(name)
    parallelize(ours, group)
    ids, labels = batch()
    padding = torch.ones_like(ids)
    padding[1, -2:] = 0
    labels = labels.masked_fill(padding == 0, -100)
    logits, expected = run(
        theirs, name, ids, labels, padding, lambda logits, labels: nn.functional.cross_entropy(logits.mT, labels)
    )
    expected.backward()
    mine = [divide_batch(part, group.place) for part in (ids, labels, padding)]
    found, loss = run(ours, name, *mine)
    loss.backward()
    gaps = {"loss": gap(loss, expected)}
    gaps["logits"] = gap(whole_logits(found, VOCABULARY, group), divide_batch(logits, group.place))
    grads = source_values(ours, lambda parameter: parameter.grad)
    parameters = dict(theirs.named_parameters(remove_duplicate=False))
    assert {id(parameters[key]) for key in grads} == {id(parameter) for parameter in theirs.parameters()}
    gaps |= {key: gap(grad, parameters[key].grad) for key, grad in grads.items()}
    with torch.no_grad():
        again = run(ours, name, *mine)
    gaps["loss without autograd"] = gap(again[1], expected)
    gaps["whole logits"] = gap(again[0], divide_batch(logits, group.place))
    return gaps


def generate(group):
    theirs, ours = build("llama").eval(), build("llama").eval()
    parallelize(ours, group)
    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    prompts = batch()[0]
    expected = theirs.generate(prompts, attention_mask=torch.ones_like(prompts), **settings)
    mine = divide_batch(prompts, group.place)
    found = ours.generate(mine, attention_mask=torch.ones_like(mine), **settings)
    return torch.equal(found, divide_batch(expected, group.place))


def on_each_rank(rows, columns):
    group = open_mesh(rows, columns)
    return {name: compare(name, group) for name in CONFIGS}, generate(group)


@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (2, 2), *(pytest.param(*mesh, marks=pytest.mark.slow) for mesh in ((2, 3), (3, 3)))]
)
def test_models_are_sharded_in_place(rows, columns):
    for by_model, continues in on_mesh(rows, columns, on_each_rank):
        for name, gaps in by_model.items():
            assert {key: value for key, value in gaps.items() if not value <= 1e-10} == {}, name
        assert continues


def test_what_a_plan_leaves_out_is_refused_by_name():
    group = MeshGroup.alone()
    with pytest.raises(ValueError, match=r"Sequential: the plan has nothing for module '1' \(Linear\).* 1.weight"):
        parallelize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), group, {"0": Summa2D()})
    with pytest.raises(ValueError, match=r"1 \(Conv1d\) cannot be sharded .*: Summa2D divides linear layers"):
        parallelize(nn.Sequential(nn.Linear(4, 4), nn.Conv1d(4, 4, 1)), group, {"*": Summa2D()})
    model = build("bert")
    model.loss_type = "ForQuestionAnswering"
    parallelize(model, group)
    with pytest.raises(ValueError, match="BertForMaskedLM .* CrossEntropy2D"):
        model(batch()[0], labels=batch()[1])


def test_own_plans():
    model = nn.ModuleDict({"a": nn.Linear(6, 4), "b": nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2, bias=False))})
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    parallelize(model, MeshGroup.alone(), {"a": Summa2D(), "b.*": Summa2D()})
    assert isinstance(model["a"], Linear2D) and isinstance(model["b"][1], Linear2D)
    found = source_values(model)
    assert found.keys() == values.keys() and all(torch.equal(found[name], values[name]) for name in values)
    gpt2 = build("gpt2")
    parallelize(gpt2, MeshGroup.alone())
    assert isinstance(gpt2.transformer.wpe, SmallEmbedding2D)
    assert gpt2.lm_head.weight is gpt2.transformer.wte.weight
