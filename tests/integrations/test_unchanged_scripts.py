import json

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.bits import assert_same_bits
from tests.distributed import run_python

CLASSES = {
    "language_model": AutoModelForCausalLM,
    "classifier": AutoModelForSequenceClassification,
    "sft": AutoModelForCausalLM,
}


def history(folder):
    entries = json.loads((folder / "checkpoint-12" / "trainer_state.json").read_text())["log_history"]
    evaluations = [entry["eval_loss"] for entry in entries if "eval_loss" in entry]
    return [entry for entry in entries if "loss" in entry], evaluations


def numbers(steps):
    return [(entry["loss"], entry["grad_norm"]) for entry in steps]


@pytest.mark.slow
@pytest.mark.parametrize("script", CLASSES)
def test_a_script_trains_saves_and_resumes_as_it_does_alone(script, tmp_path):
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "resting_tier"), "OMP_NUM_THREADS": "1"}
    done = run_python("-m", "tests.integrations.scripts.runs", tmp_path, script, environment=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    plain, whole, small, resumed = (tmp_path / "runs" / kind for kind in ("plain", "whole", "small", "resumed"))
    (steps, evals), (expected, expected_evals) = history(whole), history(plain)
    assert len(steps) == 6 and steps[-1]["loss"] < 0.8 * steps[0]["loss"]
    for one, other in zip(numbers(steps), numbers(expected), strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    assert evals == pytest.approx(expected_evals, rel=1e-5)

    paged, paged_evals = history(small)
    assert_same_bits(numbers(paged), numbers(steps))
    assert paged_evals == evals
    assert paged[-1]["patrickstar/uploaded_gib"] > 0 == steps[-1]["patrickstar/uploaded_gib"]
    assert paged[-1]["patrickstar/device_gib"] < steps[-1]["patrickstar/device_gib"]
    assert_same_bits(numbers(history(resumed)[0]), numbers(steps))

    weights = load_file(whole / "model.safetensors")
    for other in (small, resumed):
        assert_same_bits(load_file(other / "model.safetensors"), weights)
    assert_same_bits(CLASSES[script].from_pretrained(whole).state_dict(), weights)
    names = {path.name for path in plain.iterdir()}
    assert {path.name for path in whole.iterdir()} == names
    for name in names & {"all_results.json", "eval_results.json"}:
        found, wanted = (json.loads((folder / name).read_text()) for folder in (whole, plain))
        said = {key for key in wanted if key.endswith(("loss", "accuracy", "perplexity"))}
        assert {key: found[key] for key in said} == pytest.approx({key: wanted[key] for key in said}, rel=1e-5)
    if script == "classifier":
        assert (whole / "predict_results.txt").read_text() == (plain / "predict_results.txt").read_text()
