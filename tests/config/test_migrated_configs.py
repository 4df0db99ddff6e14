"""Configurations in the shapes that projects around DeepSpeed ship, as a user brings them along."""

import json
from pathlib import Path

import pytest

from patrickstar.config import Dialect, OptimizerType, fill_auto, parse_config, resolve_batch_sizes
from tests.config.cases import at
from tests.config.test_public_configs import BF16, FP16, TRAINER

SHAPES = json.loads(Path(__file__).with_name("migrated.json").read_text(encoding="utf-8"))
CHUNK = parse_config(None).default_chunk_size

TAKEN = {
    "llama_factory_zero0": {"compute_dtype": BF16, "gradient_clipping": 0.5, "zero_optimization.stage": 0},
    "llama_factory_zero3_sub_group_0": {"zero_optimization.stage": 3, "default_chunk_size": CHUNK},
    "llama_factory_zero2_autotp": {"tensor_parallel.columns": 2, "default_chunk_size": CHUNK},
    "axolotl_zero1": {"compute_dtype": BF16, "wall_clock_breakdown": False, "zero_optimization.stage": 1},
    "axolotl_zero3_cpu_params": {
        "compute_dtype": BF16,
        "default_chunk_size": CHUNK,
        "zero_optimization.offload_param.device": "cpu",
        "gradient_clipping": 0.5,
    },
    "huggingface_zero3_nvme": {
        "compute_dtype": FP16,
        "fp16.loss_scale": 128,
        "disk_memory.path": "/local_nvme",
        "default_chunk_size": 10_000_000,
        "optimizer.params.lr": 2e-5,
        "scheduler.params.total_num_steps": 100,
        "scheduler.params.warmup_max_lr": 2e-5,
    },
    "trainer_of_a_project_with_keys_of_its_own": {
        "optimizer.type": OptimizerType.ADAMW,
        "optimizer.params.betas": (0.9, 0.98),
        "zero_optimization.offload_optimizer.device": "cpu",
        "gradient_clipping": 1.0,
    },
}
"""Resolved values by dotted key, with the values of Hugging Face's Trainer for "auto"."""

REFUSED = {
    "examples_one_bit_adam": "optimizer.type is 'OneBitAdam'; .*compressed gradients change the numbers: use Adam$",
    "examples_zero_plus_plus": "zero_quantized_weights is True; quantized values change the numbers; leave it out",
    "examples_muon": "optimizer.type is 'Muon'; .*Lion too keeps a momentum and no variance: use Lion$",
}
"""Part of the error, which names the replacement."""


def test_each_shape_is_taken_or_refused():
    assert sorted(SHAPES) == sorted([*TAKEN, *REFUSED]) and len(SHAPES) == 10
    for name, values in TAKEN.items():
        config = parse_config(fill_auto(SHAPES[name], TRAINER), Dialect.DEEPSPEED)
        assert {key: at(config, key) for key in values} == values, name
        sizes = resolve_batch_sizes(config, num_ranks=4)
        wanted = (2, 8) if "gradient_checkpointing" in SHAPES[name] else (4, 4)
        assert (sizes.micro_batch_size, sizes.accumulation_steps) == wanted, name
    for name, message in REFUSED.items():
        with pytest.raises(ValueError, match=message):
            parse_config(SHAPES[name], Dialect.DEEPSPEED)


def test_optimizers_that_patrickstar_lacks_are_refused_with_the_nearest_that_it_has():
    for name, nearest in {
        "Adafactor": '8-bit states save as much memory: use AdamW with optimizer.states "8bit"',
        "AdamW8bit": '8-bit states save as much memory: use AdamW with optimizer.states "8bit"',
        "Muon": "Lion too keeps a momentum and no variance: use Lion",
        "Lamb": "use AdamW",
        "AdamWW": "did you mean 'AdamW'?",
    }.items():
        with pytest.raises(ValueError) as raised:
            parse_config({"optimizer": {"type": name}})
        assert str(raised.value) == f"optimizer.type is {name!r}; PatrickStar has Adam, AdamW, Lion and SGD: {nearest}"


def test_a_warning_names_the_keys_of_a_projects_own_and_suggests_nothing(caplog):
    parse_config(SHAPES["trainer_of_a_project_with_keys_of_its_own"], Dialect.DEEPSPEED)
    assert caplog.messages == ["unknown keys without effect, as in DeepSpeed: seed, gradient_checkpointing"]
