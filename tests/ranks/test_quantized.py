from typing import Any

import torch
import torch.distributed as dist

from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.distributed import run_ranks
from tests.engine.test_quantized import CASE, TOWER, Tower, frozen_llama, linear_names, plain_model
from tests.models import Case, token_batch
from tests.quant.formulas import dequantized
from tests.ranks.runs import Task, rank_and_size, train_tasks
from tests.training import make_config


def wide_tower() -> Tower:
    return Tower(num_layers=2, width=192)


WIDE = Case(wide_tower, TOWER.batch)
"""Ranks' shares end within a weight, and within a block of its scales."""


def same_on_all(tasks: list[Task]) -> list[dict[str, Any]]:
    by_rank = run_ranks(2, train_tasks, tasks, timeout_seconds=300)
    for one, other in zip(*by_rank, strict=True):
        assert_same_bits(one["state"], other["state"])
    return by_rank[0]


def test_two_ranks():
    nf4, int8 = ({"quantization": {"type": kind}} for kind in ("nf4", "int8"))
    small = {"device_memory": "1MB", "default_chunk_size": 16384}
    runs = same_on_all(
        [
            Task(CASE, "bf16", options=nf4),
            Task(CASE, "bf16", options={**nf4, **small}),
            Task(CASE, "bf16", on_host=True, options={**nf4, "default_chunk_size": 8192}),
            Task(WIDE, "bf16", steps=1, options=nf4),
            Task(WIDE, "bf16", steps=1, options=int8),
        ]
    )
    for run in runs[1:3]:
        assert run["losses"] == runs[0]["losses"]
        assert_same_bits(run["state"], runs[0]["state"])
    plain = plain_model("nf4", torch.bfloat16).state_dict()
    for name in linear_names(frozen_llama()):
        assert_same_bits(runs[0]["state"][name].to(torch.bfloat16), plain[name], name)
    torch.manual_seed(0)
    tower = wide_tower()
    for kind, run in zip(("nf4", "int8"), runs[3:], strict=True):
        for name, weight in tower.layers.named_parameters():
            expected = dequantized(weight.detach(), kind, torch.bfloat16)
            assert_same_bits(run["state"][f"layers.{name}"].to(torch.bfloat16), expected, name)


def resume(folder: str) -> list[str]:
    dist.init_process_group("gloo")
    outcomes = []
    for seed, folder_is_there in ((0, False), (0, True), (7, True)):
        torch.manual_seed(seed)
        engine, optimizer = initialize_engine(frozen_llama, 0, make_config("bf16", quantization={"type": "nf4"}))
        with engine:
            if folder_is_there:
                try:
                    engine.load_checkpoint(folder)
                    outcomes.append("loaded")
                except Exception as error:
                    outcomes.append(str(error))
                continue
            engine.backward(engine(**token_batch(torch.Generator().manual_seed(1))).loss)
            optimizer.step()
            engine.save_checkpoint(folder)
    dist.destroy_process_group()
    return outcomes


def refusals() -> list[str]:
    dist.init_process_group("gloo")
    texts = []
    for seed, options in ((rank_and_size()[0], {}), (0, {"tensor_parallel": {"columns": 2}})):
        torch.manual_seed(seed)
        model = frozen_llama()
        try:
            initialize_engine(lambda model=model: model, 0, make_config(quantization={}, **options))
            texts.append("opened")
        except Exception as error:
            texts.append(str(error))
    return texts


def test_what_needs_whole_values(tmp_path):
    loaded, refused = zip(*run_ranks(2, resume, str(tmp_path), timeout_seconds=300), strict=True)
    assert set(loaded) == {"loaded"}
    assert any("is quantised, and the checkpoint has other values" in text for text in refused)
    others, sharded = zip(*run_ranks(2, refusals, timeout_seconds=300), strict=True)
    assert any("load the same weights on every rank" in text for text in others), others
    assert all("quantization is not supported with tensor_parallel" in text for text in sharded), sharded
    assert "opened" not in others
