import copy

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn

from patrickstar.ranks.emulated import run_emulated
from patrickstar.ranks.mesh import Mesh, MeshRanks
from patrickstar.tensor2d import MeshGroup, assemble_activation, divide_activation, divide_batch, parallelize
from patrickstar.tensor2d.layer import source_values
from patrickstar.tensor2d.mixtures import WholeMixture
from patrickstar.tensor2d.model_cost import layer_shape
from patrickstar.tensor2d.norms import Spread
from patrickstar.tensor2d.recognised import embedding_factor, recognise_norm
from patrickstar.tensor2d.sharded_models import parallelize_1d
from patrickstar.tensor2d.structure import find_structure
from patrickstar.tensor2d.styles import TWO_DIMENSIONS, Norm, Spot
from tests import text_models
from tests.models import t5
from tests.tensor2d.on_meshes import draw, gap, on_mesh, open_mesh

FAMILIES = {
    "Qwen3ForCausalLM": "norms of each head",
    "Olmo2ForCausalLM": "norms of all heads, and after attention",
    "OlmoForCausalLM": "norms without parameters",
    "Gemma3ForCausalLM": "windows, norms with an offset, a scaled and tied table",
    "MistralForCausalLM": "a window",
    "Phi3ForCausalLM": "fused queries, keys and values, fused gate and up",
    "Glm4ForCausalLM": "norms around both, fused gate and up",
    "GraniteForCausalLM": "multipliers",
    "Starcoder2ForCausalLM": "biases, a plain MLP",
    "CohereForCausalLM": "a parallel residual, a norm without bias",
    "GPTNeoForCausalLM": "keys first, local layers, positions",
    "RobertaForMaskedLM": "positions after padding",
    "CamembertForMaskedLM": "a head that is registered first",
}
MIXTURES = {
    "MixtralForCausalLM": "a mixture in each layer",
    "Glm4MoeForCausalLM": "a shared expert, and a layer without a mixture",
}
CLASSIFIERS = {
    "LlamaForSequenceClassification": "the last token that is no padding",
    "Qwen3ForTokenClassification": "scores of tokens with a bias",
    "RobertaForSequenceClassification": "two layers above the first token",
    "BertForSequenceClassification": "a pooler",
}
ADAPTED = {
    "Qwen3ForCausalLM+q_proj,v_proj": "parts of a product",
    "Phi3ForCausalLM+all-linear": "fused layers",
    "Starcoder2ForCausalLM+all-linear": "layers with biases",
    "GlmForTokenClassification+all-linear": "a classifier",
    "MistralForSequenceClassification+SEQ_CLS": "a classifier whose head is trained too",
    "RobertaForSequenceClassification+SEQ_CLS": "a head of two layers that is trained too",
}
ALL = (*FAMILIES, *MIXTURES, *CLASSIFIERS, *ADAPTED)
NOT_IN_ONE_DIMENSION = ("RobertaForSequenceClassification", "BertForSequenceClassification")
STEPS, LENGTH, SAMPLES, PADDING = 2, 8, 4, 1


def build(name):
    torch.manual_seed(0)
    name, _, targets = name.partition("+")
    model = text_models.build(name).double().eval()
    model.config.pad_token_id = PADDING
    if name in MIXTURES:
        model.set_experts_implementation("eager")  # other products have no float64
    if targets:
        lora = {"target_modules": targets if targets == "all-linear" else targets.split(",")}
        if targets == "SEQ_CLS":
            lora = {"task_type": targets}
        elif "Classification" in name:
            lora["exclude_modules"] = ["score"]
        model = get_peft_model(model, LoraConfig(r=3, **lora)).get_base_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)  # norms, biases and adapters that would be missed
    return model


def batches(model):
    """Random tokens; in the second batch with padding on the left."""
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        tokens = torch.randint(text_models.FIRST_WORD, text_models.VOCAB, (SAMPLES, LENGTH), generator=generator)
        mask = torch.ones_like(tokens)
        if step:
            mask[:2, : LENGTH // 4] = 0
            tokens[mask == 0] = PADDING
        counts = mask.bool() & (torch.rand(tokens.shape, generator=generator) < 0.8)
        labels = torch.where(counts, tokens % (2 if "Classification" in model.loss_type else text_models.VOCAB), -100)
        labels = torch.arange(SAMPLES) % 2 if "Sequence" in model.loss_type else labels
        yield {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def exact_loss(model, logits, labels):
    """Hugging Face rounds logits to float32."""
    if model.loss_type == "ForCausalLM":
        logits, labels = logits[:, :-1], labels[:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def trained(model, place=None):
    """Losses of a few steps of SGD, which changes parameters by their gradients."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for batch in batches(model):
        if place is None:
            out = model(**batch)
            loss = exact_loss(model, out.logits, batch["labels"])
        else:
            loss = model(**{name: divide_batch(value, place) for name, value in batch.items()}).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64)


def compare(name, group, mode):
    theirs, ours = build(name), build(name)
    if mode == "1d":
        parallelize_1d(ours, group.world_group)
        losses = trained(ours, MeshGroup.alone().place)
    else:
        parallelize(ours, group)
        losses = trained(ours, group.place)
    gaps = {"losses": gap(losses, trained(theirs))}
    values, found = dict(theirs.named_parameters(remove_duplicate=False)), source_values(ours)
    assert {id(values[key]) for key in found} == {id(parameter) for parameter in theirs.parameters()}
    return gaps | {key: gap(value, values[key]) for key, value in found.items()}


def compare_all(rows, columns, modes):
    group = open_mesh(rows, columns)
    tried = [
        (name, mode) for mode in modes for name in ALL if mode == "2d" or not name.startswith(NOT_IN_ONE_DIMENSION)
    ]
    return {(name, mode): compare(name, group, mode) for name, mode in tried}


@pytest.mark.parametrize(
    ("rows", "columns", "modes"),
    [(1, 2, ("2d", "1d")), (2, 2, ("2d",)), pytest.param(2, 1, ("2d",), marks=pytest.mark.slow)],
)
def test_families_as_hugging_face_computes_them(rows, columns, modes):
    for by_family in on_mesh(rows, columns, compare_all, modes):
        for which, gaps in by_family.items():
            # norms of Hugging Face are rounded to float32
            assert {key: value for key, value in gaps.items() if not value <= 2e-6} == {}, which


def with_a_table(model):
    model.model.layers[0].mlp.table = nn.Parameter(torch.zeros(3, 2))
    return model


def with_positions(model):
    model.model.layers[1].self_attn.sinks = nn.Parameter(torch.zeros(4))
    return model


def with_router_loss(model):
    model.config.output_router_logits = True
    return model


REFUSED = {
    "no structure": (
        lambda: nn.Sequential(nn.Linear(4, 4)),
        "Sequential .*: it has no configuration with a hidden",
    ),
    "an encoder and a decoder": (t5, "T5ForConditionalGeneration .*: it is an encoder-decoder model"),
    "attention of its own": (
        lambda: build("BloomForCausalLM"),
        "BloomForCausalLM .*: no ModuleList of it has layers",
    ),
    "latent attention": (
        lambda: build("DeepseekV3ForCausalLM"),
        r"the linear layers of model.layers.0.self_attn \(DeepseekV3Attention: q_a_proj \[32, 8\], .* not the queries",
    ),
    "attention twice": (lambda: build("BartForCausalLM"), "layers.0 .* attends in .*self_attn and in .*encoder_attn"),
    "layers without attention": (lambda: build("OlmoHybridForCausalLM"), r"model.layers.0 .* attends in no module"),
    "a parameter of attention": (
        lambda: with_positions(build("LlamaForCausalLM")),
        r"module 'model.layers.1.self_attn' \(LlamaAttention\), whose parameter .*sinks is \[4\], is no attention",
    ),
    "a parameter of an MLP": (
        lambda: with_a_table(build("LlamaForCausalLM")),
        r"module 'model.layers.0.mlp' \(Ll",
    ),
    "an output of another kind": (
        lambda: transformers.BertForPreTraining(transformers.BertConfig(hidden_size=24, num_hidden_layers=1)),
        "BertForPreTraining .*: cls.seq_relationship computes an output of another kind",
    ),
    "a loss of routers": (
        lambda: with_router_loss(build("MixtralForCausalLM")),
        r"MixtralForCausalLM .*: it adds a loss of its routers \(output_router_logits\)",
    ),
    "a table with a forward": (
        lambda: build("OPTForCausalLM"),
        "OPTForCausalLM .*: model.decoder.embed_positions .* something else",
    ),
}


@pytest.mark.parametrize(
    ("number", "kind"), [(1, "regression"), (3, "regression"), (3, "multi_label_classification")], ids=str
)
def test_losses_of_classifiers_over_rows(number, kind):
    def build_one():
        torch.manual_seed(0)
        config = text_models.tiny_config(transformers.RobertaConfig)
        config.num_labels, config.problem_type = number, kind
        return transformers.RobertaForSequenceClassification(config).double().eval()

    def loss_of(ranks):
        group = MeshGroup.of_ranks(MeshRanks(ranks, Mesh(rows=2)))
        parallelize(models[ranks.context.rank], group)
        return models[ranks.context.rank](
            input_ids=divide_batch(tokens, group.place), labels=divide_batch(labels, group.place)
        ).loss.item()

    tokens, shape = next(batches(build_one()))["input_ids"], (SAMPLES, number) if number > 1 else (SAMPLES,)
    labels = (draw(*shape) > 0).double()
    models = [build_one() for _ in range(2)]
    expected = build_one()(input_ids=tokens, labels=labels).loss.item()
    assert run_emulated(2, loss_of) == [pytest.approx(expected, rel=1e-12)] * 2


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_has_no_form_is_refused_by_name(case):
    make, expected = REFUSED[case]
    with pytest.raises(ValueError, match=expected):
        parallelize(make(), MeshGroup.alone())


def test_heads_that_the_mesh_does_not_divide_are_refused_before_a_module_changes():
    model = build("GPTBigCodeForCausalLM")  # one head of keys
    group = MeshGroup.alone()
    group.place = group.place.__class__(1, 2)
    before = list(model.modules())
    with pytest.raises(
        ValueError,
        match="GPTBigCodeForCausalLM: .*heads of keys and values: 1 cannot be cut into 2 columns .* a mesh of 2 x 1",
    ):
        parallelize(model, group)
    assert list(model.modules()) == before


def test_layers_are_counted_by_their_structure():
    phi = layer_shape(build("Phi3ForCausalLM"))
    assert phi.linears() == [(32, 64), (32, 32), (32, 96), (48, 32)] and phi.is_gated
    assert layer_shape(build("Starcoder2ForCausalLM")).linears() == [(32, 64), (32, 32), (32, 48), (48, 32)]
    structure = find_structure(build("RobertaForMaskedLM"))
    assert structure.table == "roberta.embeddings.word_embeddings" and structure.head == "lm_head.decoder"
    assert structure.attentions[0].pair.second == "roberta.encoder.layer.0.attention.output.dense"
    assert [pair.second for pair in structure.mlps][0] == "roberta.encoder.layer.0.output.dense"


def test_norms_and_tables_are_recognised_by_what_they_compute():
    gemma = build("Gemma3ForCausalLM").model
    norm = recognise_norm(gemma.norm, 32)
    assert (norm.offset, norm.has_mean, norm.has_bias, norm.eps) == (1.0, False, False, gemma.config.rms_norm_eps)
    assert embedding_factor(gemma.embed_tokens) == pytest.approx(32**0.5)
    olmo = recognise_norm(build("OlmoForCausalLM").model.norm, 32)
    assert olmo.has_mean and not olmo.has_weight and olmo.features == 32
    with torch.device("meta"):
        assert recognise_norm(nn.LayerNorm(4, eps=1e-3, bias=False), 8).eps == 1e-3
        assert recognise_norm(nn.RMSNorm(4), 8).eps == torch.finfo(torch.float32).eps
    assert recognise_norm(nn.Dropout(0.5), 8) is recognise_norm(nn.BatchNorm1d(4), 8) is None


def test_rare_norms_of_features_that_columns_share():
    def normed(ranks):
        group = MeshGroup.of_ranks(MeshRanks(ranks, Mesh(rows=1, columns=2)))
        found = []
        for layer, kind in zip(layers, kinds, strict=True):
            style = Norm(kind, lambda group, by: Spread.of_tokens(group))
            made = style.replace(layer, Spot("norm", group, {}, TWO_DIMENSIONS))
            found.append(torch.cat(group.along_columns.gather(made(whole.chunk(2, -1)[ranks.context.rank])), -1))
        return found

    whole = draw(3, 8)
    layers = [nn.LayerNorm(8, bias=False), nn.LayerNorm(8, elementwise_affine=False), nn.RMSNorm(8, 1e-3)]
    layers = [layer.double() for layer in layers]
    kinds = [recognise_norm(layer, 8) for layer in layers]
    for found in run_emulated(2, normed):
        assert all(gap(one, layer(whole)) <= 1e-12 for one, layer in zip(found, layers, strict=True))


def test_whole_modules_compute_as_many_tokens_on_each_rank():
    def computed(ranks):
        group = MeshGroup.of_ranks(MeshRanks(ranks, Mesh(rows=2, columns=3)))
        layer = WholeMixture(copy.deepcopy(plain), "mlp", group)
        hidden = divide_activation(whole, group.place).requires_grad_()
        out = layer(hidden)
        out.sin().sum().backward()
        outs = [group.world_group.gather(part.detach()) for part in (out, hidden.grad)]
        return [assemble_activation(parts, group.place) for parts in outs], source_values(layer, lambda p: p.grad)

    plain, whole = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 6)).double(), draw(2, 5, 6)
    leaf = whole.clone().requires_grad_()
    expected = plain(leaf)
    expected.sin().sum().backward()
    for (out, grad), of_params in run_emulated(6, computed):
        assert gap(out, expected) <= 1e-12 and gap(grad, leaf.grad) <= 1e-12
        for name, param in plain.named_parameters():
            assert gap(of_params[f"mlp.{name}"], param.grad) <= 1e-12
