import itertools
import json
import logging
import sys
import types
from pathlib import Path

import pytest
import torch

from patrickstar.config import (
    Dialect,
    OptimizerType,
    auto_keys,
    fill_auto,
    log_accepted_options,
    make_loss_scaler,
    parse_config,
    resolve_batch_sizes,
)
from patrickstar.config.keys import all_keys

FOLDER = Path(__file__).parent / "public"

TRAINER = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "bf16.enabled": True,
    "fp16.enabled": False,
    "optimizer.params.lr": 2e-5,
    "optimizer.params.betas": [0.9, 0.95],
    "optimizer.params.eps": 1e-7,
    "optimizer.params.weight_decay": 0.1,
    "scheduler.params.total_num_steps": 100,
    "scheduler.params.warmup_num_steps": 10,
    "scheduler.params.warmup_min_lr": 0,
    "scheduler.params.warmup_max_lr": 2e-5,
}
"""Values that Hugging Face's Trainer fills in for "auto": 64 samples a step on 4 ranks."""

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
EXPECTED = {
    "alpaca_zero3_warmup_decay": (BF16, 0.5, "WarmupDecayLR", (64, 4, 4)),
    "deepspeed_bert_squad": (FP16, 1.0, None, (24, 3, 2)),
    "deepspeed_chat_zero3": (BF16, 1.0, None, (32, 4, 2)),
    "deepspeed_cifar": (FP16, 1.0, "WarmupLR", (16, 4, 1)),
    "fastchat_lora_zero2": (FP16, 1.0, None, (64, 4, 4)),
    "gpt_neox_125m": (FP16, 1.0, None, (16, 4, 1)),
    "huggingface_zero2_offload": (FP32, 0.5, "WarmupLR", (64, 4, 4)),
    "huggingface_zero3_offload": (BF16, 0.5, "WarmupLR", (64, 4, 4)),
    "llama_factory_zero2": (BF16, 0.5, None, (64, 4, 4)),
    "llama_factory_zero3_offload": (BF16, 0.5, None, (64, 4, 4)),
    "megatron_gpt2_zero2": (FP16, 1.0, None, (8, 2, 1)),
    "tutorial_onecycle_monitors": (BF16, 1.0, "OneCycle", (64, 8, 2)),
}
"""By file: dtype, clipping, schedule, batch sizes on 4 ranks."""


def test_public_configurations_are_understood(caplog):
    assert sorted(path.stem for path in FOLDER.glob("*.json")) == sorted(EXPECTED)
    for name, (dtype, clipping, schedule, sizes) in EXPECTED.items():
        path = FOLDER / f"{name}.json"
        parse_config(path, Dialect.DEEPSPEED)  # "auto" is no error when nobody fills it in
        given = json.loads(path.read_text(encoding="utf-8"))
        filled = fill_auto(given, TRAINER)
        assert not set(auto_keys(filled)) & set(TRAINER)
        config = parse_config(filled, Dialect.DEEPSPEED)
        assert (config.compute_dtype, config.gradient_clipping) == (dtype, clipping), name
        assert getattr(config.scheduler, "type", None) == schedule, name
        if "optimizer" in given:
            assert config.optimizer.type is OptimizerType.ADAMW, name
        batches = resolve_batch_sizes(config, num_ranks=4)
        assert (batches.train_batch_size, batches.micro_batch_size, batches.accumulation_steps) == sizes, name
        with caplog.at_level(logging.INFO, logger="patrickstar"):
            caplog.clear()
            log_accepted_options(config)
        assert len(caplog.records) <= 1


def test_values_of_public_configurations_arrive():
    config = parse_config(FOLDER / "tutorial_onecycle_monitors.json", Dialect.DEEPSPEED)
    assert config.optimizer.params.lr == 2e-4
    assert config.scheduler.params.cycle_max_lr == 0.001
    assert (config.csv_monitor.enabled, config.csv_monitor.output_path) == (True, "output/ds_logs/")
    assert config.flops_profiler.top_modules == 3
    assert config.zero_optimization.offload_optimizer.device == "cpu"
    squad = parse_config(FOLDER / "deepspeed_bert_squad.json", Dialect.DEEPSPEED)
    assert squad.optimizer.params.bias_correction is False
    cifar = parse_config(FOLDER / "deepspeed_cifar.json", Dialect.DEEPSPEED)
    assert cifar.optimizer.params.betas == (0.8, 0.999)
    assert make_loss_scaler(cifar).scale == 2.0**15
    lenient = parse_config({"fp16": {"enabled": True, "hysteresis": 1, "consecutive_hysteresis": True}})
    scaler = make_loss_scaler(lenient)
    scaler.update(overflow=True)
    assert scaler.scale == 2.0**15


def test_every_key_of_deepspeed_is_known():
    keys = list(all_keys())
    known = {f"{key.section}.{name}".lstrip(".") for key in keys for name in (key.name, *key.spellings)}
    whole = tuple(f"{key.path}." for key in keys if key.fate is not None and key.fate.accepts is not None)
    listed = (Path(__file__).parent / "deepspeed_keys.txt").read_text(encoding="utf-8").splitlines()[1:]
    assert len(listed) > 300
    assert [name for name in listed if name not in known and not name.startswith(whole)] == []


def test_which_adam():
    """DeepSpeed's rule: "AdamW" decouples in any mode; "Adam" does unless the mode is False. The default weight decay
    is 0.01 in torch.optim.AdamW and 0 in DeepSpeed.
    """
    choices = itertools.product(Dialect, ("Adam", "adam", "AdamW"), (None, True, False), (False, True))
    for dialect, name, mode, torch_adam in choices:
        params = {"torch_adam": torch_adam} | ({} if mode is None else {"adam_w_mode": mode})
        optimizer = parse_config({"optimizer": {"type": name, "params": params}}, dialect).optimizer
        default_mode = dialect is Dialect.DEEPSPEED
        decoupled = name == "AdamW" or (default_mode if mode is None else mode)
        assert optimizer.type is (OptimizerType.ADAMW if decoupled else OptimizerType.ADAM)
        assert optimizer.params.weight_decay == (0.01 if torch_adam and decoupled else 0.0)


def test_batch_sizes_are_those_that_solve_the_equation():
    sizes = (None, 1, 2, 3, 4, 6, 12)
    num_refused = 0
    for ranks in (1, 2, 3):
        for train, micro, accumulation in ((a, b, c) for a in sizes for b in sizes for c in sizes):
            named = (
                ("train_batch_size", train),
                ("train_micro_batch_size_per_gpu", micro),
                ("gradient_accumulation_steps", accumulation),
            )
            config = parse_config({name: value for name, value in named if value is not None}, Dialect.DEEPSPEED)
            solutions = [
                (a * b * ranks, a, b)
                for a in range(1, 37)
                for b in range(1, 37)
                if micro in (None, a) and accumulation in (None, b) and train in (None, a * b * ranks)
            ]
            if accumulation is None and (train is None or micro is None):
                solutions = [solution for solution in solutions if solution[2] == 1]
            if train is None and micro is None:
                solutions = []
            assert len(solutions) <= 1
            if not solutions:
                num_refused += 1
                with pytest.raises(ValueError, match="train_batch_size"):
                    resolve_batch_sizes(config, ranks)
                continue
            found = resolve_batch_sizes(config, ranks)
            assert (found.train_batch_size, found.micro_batch_size, found.accumulation_steps) == solutions[0]
    assert num_refused > 100


def test_batch_sizes_that_contradict():
    both = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}
    for sizes, message in (
        ({}, "train_batch_size and train_micro_batch_size_per_gpu are both missing; give one"),
        (both | {"gradient_accumulation_steps": 3}, "is 4 x 3 x 2 = 24; give that"),
        ({"train_batch_size": 33}, "train_batch_size is 33, which 2 ranks cannot divide evenly; give a multiple of 2"),
        (
            {"train_batch_size": 32, "gradient_accumulation_steps": 3},
            "2 ranks with gradient_accumulation_steps 3 cannot divide evenly; give a multiple of 6",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            resolve_batch_sizes(parse_config(sizes, Dialect.DEEPSPEED), 2)


def test_all_problems_are_named_at_once():
    wrong = {
        "seed": 1,
        "gradient_clipp1ng": 1.0,
        "lr": 1e-4,
        "train_batch_size": 0,
        "optimizer": {"type": "Lamb", "params": {"max_coeff": 10.0}},
        "scheduler": {"type": "WarmupLr", "params": {}},
        "fp16": {"enabled": "true", "loss_scal": 0},
        "zero_optimization": {"stage": 4, "offload_param": {"device": "disk"}, "zero_quantized_gradients": True},
    }
    with pytest.raises(ValueError) as raised:
        parse_config(wrong, Dialect.HOST)
    first, *lines = str(raised.value).splitlines()
    assert first == f"the configuration has {len(lines)} problems:"
    beginnings = [
        "unknown key seed: docs/config.md has them all",
        "unknown key gradient_clipp1ng: did you mean gradient_clipping?",
        "unknown key lr: did you mean optimizer.params.lr?",
        "train_batch_size is 0; it must be at least 1",
        "optimizer.type is 'Lamb'; PatrickStar has Adam, AdamW, Lion and SGD: use AdamW",
        "scheduler.type is 'WarmupLr'; did you mean 'WarmupLR'?",
        "fp16.enabled is 'true'; it is a switch, give True or False",
        "unknown key fp16.loss_scal: did you mean fp16.loss_scale?",
        "zero_optimization.stage is 4; it must be at most 3",
        'zero_optimization.offload_param.device is \'disk\'; give "none", "cpu" or "nvme"',
        "zero_optimization.zero_quantized_gradients is True; quantized gradients change the numbers",
    ]
    assert len(lines) == len(beginnings)
    for beginning in beginnings:
        assert [line for line in lines if line.strip().startswith(beginning)], beginning


def test_unknown_keys_beside_those_of_deepspeed_are_only_warned_of(caplog):
    meant = {
        "gradient_clipp1ng": "gradient_clipping",
        "optimiser": "optimizer",
        "train_micro_batch_size": "train_micro_batch_size_per_gpu",
        "lr": "optimizer.params.lr",
        "total_num_steps": "scheduler.params.total_num_steps",
        "offload_optimizer": "zero_optimization.offload_optimizer",
    }
    anything = "seed", "device", "path", "tokenizer", "hidden_size", "steps_per_checkpoint", "max_grad_norm"
    config = {**dict.fromkeys((*meant, *anything), 1), "gradient_clipping": 0.5, "_comment": ""}
    assert parse_config(config, Dialect.DEEPSPEED).gradient_clipping == 0.5
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    said = [f"{name} (did you mean {key}?)" for name, key in meant.items()]
    assert record.getMessage() == f"unknown keys without effect, as in DeepSpeed: {', '.join([*said, *anything])}"
    for inner in ({"zero_optimization": {"stag": 1}}, {"bf16": {"enable": True}}):
        with pytest.raises(ValueError, match="unknown key"):
            parse_config(inner, Dialect.DEEPSPEED)


def test_parameters_on_a_disk_send_optimizer_states_there():
    on_disk = {"device": "nvme", "nvme_path": "/params"}
    for offload, path in (
        ({"offload_param": on_disk}, "/params"),
        ({"offload_param": on_disk, "offload_optimizer": {"device": "cpu"}}, "/params"),
        ({"offload_param": on_disk, "offload_optimizer": {"device": "nvme", "nvme_path": "/states"}}, "/states"),
        ({"offload_param": {**on_disk, "device": "cpu"}}, None),
    ):
        assert parse_config({"zero_optimization": offload}, Dialect.DEEPSPEED).disk_memory.path == path
    with pytest.raises(
        ValueError, match="is '/x' and zero_optimization.offload_param.nvme_path is '/params'; give one"
    ):
        parse_config({"disk_memory": {"path": "/x"}, "zero_optimization": {"offload_param": on_disk}})


def test_conflicts():
    for config, message in (
        ({"bf16": {"enabled": True}, "communication_data_type": "fp16"}, 'is "fp16", but gradients travel in the comp'),
        ({"bf16": {"enabled": True}, "data_types": {"param_dtype": "fp16"}}, 'data_types.param_dtype is "fp16", but'),
        ({"fp16": {"enabled": True}, "bfloat16": {"enabled": True}}, "fp16.enabled and bf16.enabled are both True"),
        ({"bf16": {}, "bfloat16": {}}, "bf16 and bfloat16 of the configuration are one key; give one of them"),
        ({"optimizer": {"speculation": "commit"}}, "set gradient_clipping to 0 and leave fp16 out"),
        ({"compression_training": {"layer_reduction": {"enabled": True}}}, "compression_training is {'layer_red"),
        ({"optimizer": {"params": {"hurry": 1}}}, "unknown key optimizer.params.hurry: docs/config.md has"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "but nvme_path is missing; give a folder"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, 'offload_param.device is "nvme", but nvme_path'),
        ({"disk_memory": {"size": "1TiB"}}, "disk_memory.size is 1024 GiB, but disk_memory.path is missing"),
        ({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1}}}, "params.cycle_max_lr is missing"),
        ({"scheduler": {"params": {}}}, "scheduler.type is missing"),
    ):
        with pytest.raises(ValueError) as raised:
            parse_config(config, Dialect.DEEPSPEED)
        assert message in str(raised.value)


def test_older_ways_and_comments():
    parsed = parse_config({"_comment": "on 8 GPUs", "zero_optimization": True, "fp16": None})
    assert parsed.zero_optimization.stage == 1
    assert parse_config({"zero_optimization": {"sub_group_size": 5e6}}).default_chunk_size == 5_000_000
    usual = parse_config(None).default_chunk_size
    for tiny in (0, 10, 999_999):
        assert parse_config({"zero_optimization": {"sub_group_size": tiny}}).default_chunk_size == usual
    torch_schedule = {"scheduler": {"type": "StepLR", "params": {"step_size": 3}}}
    assert parse_config(torch_schedule, Dialect.DEEPSPEED).scheduler.params.model_dump() == {"step_size": 3}


def test_files(tmp_path, monkeypatch):
    file = tmp_path / "config.json"
    file.write_text('{"gradient_clipping": 0.25}')
    assert parse_config(file).gradient_clipping == parse_config(str(file)).gradient_clipping == 0.25
    for name in ("hjson", "json5"):  # not installed
        monkeypatch.setitem(sys.modules, name, None)
    for text, message in (
        ('{"bf16": {"enabled": true, "enabled": false}}', "enabled is given twice"),
        ('{"bf16": {"enabled": true},}', "is not JSON: .*; take out comments and trailing commas, or pip"),
        ("[1]", "config is a list"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            parse_config(file)
    stand_in = types.SimpleNamespace(loads=lambda text, object_pairs_hook: {"gradient_clipping": len(text)})
    monkeypatch.setitem(sys.modules, "hjson", stand_in)
    file.write_text("{# comment")
    assert parse_config(file).gradient_clipping == 10
    with pytest.raises(ValueError, match=r"no.json', which cannot be read"):
        parse_config(tmp_path / "no.json")
