import pytest
import torch
from torch import nn

from patrickstar.sequence.positions import Numbering
from patrickstar.sequence.survey import Survey, check_reached, survey_model, without_numbers
from tests.text_models import build

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
