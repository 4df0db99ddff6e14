"""Work for an answer, counted. An answer takes seconds by the layers that are traced and the steps that are played."""

import collections

import pytest

from patrickstar.plan import main
from patrickstar.planning import planner, prediction, uses

QUESTIONS = {  # question: at most so many traces, layers in all of them, and simulated choices of a plan
    "--model meta-llama/Llama-3.1-8B-Instruct --gpu 4090 --host-memory 64GiB": (1, 4, 60),
    "--model llama-3.2-1b --gpu t4 --precision fp16 --host-memory 24GiB": (3, 12, 75),
    "--model llama-3.1-8b --gpu rtx4090 --host-memory 128GiB": (3, 12, 45),
    "--model Qwen/Qwen2.5-14B --gpu a100-80 --host-memory 256GiB": (3, 12, 45),
}


@pytest.fixture
def counts(monkeypatch):
    counts = collections.Counter()

    def counted(owner, name, key, amount=lambda *_: 1):
        call = getattr(owner, name)

        def wrapper(*args, **kwargs):
            counts[key] += amount(*args)
            return call(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapper)

    counted(uses._Tracer, "trace", "traces")
    counted(uses._Tracer, "trace", "layers", lambda tracer: len(tracer._module.model.layers))
    counted(prediction, "choose_plan", "choices")
    counted(planner, "build_model", "models")
    return counts


FIRST, *OTHERS = QUESTIONS


@pytest.mark.parametrize("question", [FIRST, *(pytest.param(other, marks=pytest.mark.slow) for other in OTHERS)])
def test_effort(counts, capsys, question):
    main([*question.split(), "--json"])
    capsys.readouterr()
    print(counts)
    most_traces, most_layers, most_choices = QUESTIONS[question]
    assert counts["traces"] == counts["models"] <= most_traces
    assert counts["layers"] <= most_layers
    assert counts["choices"] <= most_choices
