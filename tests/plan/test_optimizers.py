import json

import pytest
import torch

from patrickstar.config import OptimizerType, States
from patrickstar.machine.state_scheme import state_scheme
from patrickstar.module.layouts import make_layout
from patrickstar.module.preprocess import plan_params
from patrickstar.plan import main
from patrickstar.planning.setting import Setting
from tests.models import gpt2


@pytest.mark.parametrize(
    ("kind", "states", "expects"),
    [
        (OptimizerType.ADAMW, States.FP32, 14),
        (OptimizerType.LION, States.FP32, 10),
        (OptimizerType.SGD, States.FP32, 10),
        (OptimizerType.LION, States.BF16, 8),
    ],
)
def test_bytes_per_parameter(kind, states, expects):
    setting = Setting(device_bytes=1, host_bytes=1, optimizer=kind, states=states)
    params = plan_params(gpt2(), torch.bfloat16, use_cpu_embedding=False)
    layout = make_layout(params, 4096, scheme=state_scheme(setting.optimizer_config()))
    chunks = [layout.chunk(index) for index in range(layout.num_chunks)]
    assert sum(chunk["resting_tier_bytes"] for chunk in chunks) == expects * sum(chunk["numel"] for chunk in chunks)


@pytest.mark.slow
def test_the_command(capsys):
    def plan(*flags):
        shape = (
            "--model",
            "gpt2",
            "--no-checkpointing",
            "--batch-size",
            "1",
            "--seq-len",
            "64",
            "--device-memory",
            "1GiB",
        )
        assert main([*shape, "--host-memory", "16GiB", "--no-advice", "--json", *flags]) == 0
        return json.loads(capsys.readouterr().out)

    adam, lion = plan(), plan("--optimizer", "Lion")
    assert lion["config"]["optimizer"]["type"] == "Lion"
    assert lion["least_host_bytes"] < adam["least_host_bytes"]
