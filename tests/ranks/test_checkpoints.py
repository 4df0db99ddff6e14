from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from patrickstar import _C
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.distributed import RanksFailedError, run_ranks
from tests.models import MODELS, Case, gpt2, token_batch
from tests.ranks.runs import Task, rank_and_size, rows, train
from tests.ranks.test_training import assert_same_state
from tests.training import make_config


def train_part(
    folder: str | None,
    begin: int,
    end: int,
    save_to: str | None,
    precision: str = "bf16",
    states: str = "fp32",
    optimizer: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    case = MODELS["gpt2"]
    torch.manual_seed(0)
    clipping = 0.0 if "speculation" in (optimizer or {}) else 1.0
    config = make_config(precision, gradient_clipping=clipping, **options)
    config["optimizer"] = {**(optimizer or config["optimizer"]), "states": states}
    engine, own = initialize_engine(case.build, 0, config)
    with engine:
        engine.train()
        if folder is not None:
            engine.load_checkpoint(folder)
        loaded = engine.state_dict()
        generator = torch.Generator().manual_seed(1)
        losses = []
        for step in range(end):
            batch = rows(case.batch(generator))
            if step < begin:
                continue
            own.zero_grad()
            loss = case.loss(engine(**batch))
            engine.backward(loss)
            losses.append(loss.item())
            own.step()
        if save_to is not None:
            engine.save_checkpoint(save_to, client_state={"step": end})
            engine.export_weights(Path(save_to, "weights"))
        states_of_params = own.state_dict()["state"]
        values = {f"{index} {key}": value for index, entry in states_of_params.items() for key, value in entry.items()}
        assert len(values) >= 2 * len(own.param_groups[0]["params"])
        return {"losses": losses, "loaded": loaded, "state": engine.state_dict(), "states": values}


def part_on_small_device(folder: str, begin: int, end: int, save_to: str | None) -> dict[str, Any]:
    return train_part(folder, begin, end, save_to, device_memory="1MB", default_chunk_size=16384)


def test_two_ranks_go_on_where_they_were(tmp_path):
    straight = run_ranks(2, train_part, None, 0, 6, None)
    first = run_ranks(2, train_part, None, 0, 3, str(tmp_path))
    then = run_ranks(2, part_on_small_device, str(tmp_path), 3, 6, None)
    for rank in range(2):
        assert straight[rank]["losses"] == first[rank]["losses"] + then[rank]["losses"]
        assert_same_state(straight[rank]["state"], then[rank]["state"])
        assert_same_state(straight[rank]["states"], then[rank]["states"])


def test_another_number_of_ranks(tmp_path):
    folders = [str(tmp_path / name) for name in ("one", "two", "four")]
    one = run_ranks(1, train_part, None, 0, 3, folders[0])[0]
    two = run_ranks(2, train_part, folders[0], 0, 0, folders[1])
    four = run_ranks(4, train_part, folders[1], 0, 0, folders[2])
    again = run_ranks(1, train_part, folders[2], 0, 0, None)[0]
    for result in (*two, *four, again):
        assert_same_state(one["state"], result["loaded"])
        assert_same_state(one["states"], result["states"])
    assert rank_and_size() == (0, 1)
    for folder in folders:
        weights = load_file(Path(folder, "weights", "model.safetensors"))
        assert weights
        for name, value in weights.items():
            assert_same_bits(value, one["state"][name].to(value.dtype), name)


COMMITTED = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}, "speculation": "commit"}


@pytest.mark.parametrize(
    ("states", "optimizer"),
    [
        ("8bit", None),
        pytest.param("bf16", None, marks=pytest.mark.slow),
        ("8bit", {"type": "Lion", "params": {"lr": 3e-4, "weight_decay": 0.1}}),
        ("fp32", {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9, "dampening": 0.1}}),
        ("fp32", COMMITTED),
        ("8bit", COMMITTED | {"master": "stochastic"}),
    ],
)
def test_other_states_on_another_number_of_ranks(tmp_path, states, optimizer):
    two, one = str(tmp_path / "two"), str(tmp_path / "one")
    straight = run_ranks(2, train_part, None, 0, 5, None, "bf16", states, optimizer)
    run_ranks(2, train_part, None, 0, 3, two, "bf16", states, optimizer)
    alone = train_part(two, 0, 0, one, "bf16", states, optimizer)
    again = run_ranks(2, go_on_within_little, one, 3, 5, states, optimizer)
    for rank in range(2):
        assert again[rank]["losses"] == straight[rank]["losses"][3:]
        assert_same_state(again[rank]["loaded"], alone["state"])
        assert_same_state(again[rank]["state"], straight[rank]["state"])
        assert_same_state(again[rank]["states"], straight[rank]["states"])


def go_on_within_little(folder: str, begin: int, end: int, states: str, optimizer: dict[str, Any]) -> dict[str, Any]:
    budget = {"device_memory": "1MB", "default_chunk_size": 16384}
    return train_part(folder, begin, end, None, "bf16", states, optimizer, **budget)


OPTIONS = {"default_chunk_size": 8192, "gradient_clipping": 0.5}


def deep_gpt2():
    return gpt2(hidden=32, layers=12)


def train_with_and_without(folder):
    dist.init_process_group("gloo")
    case = Case(deep_gpt2, token_batch)
    engine, _ = initialize_engine(case.build, 0, Task(case, "bf16", options=OPTIONS).config())
    with engine:
        layout = engine._session.layout
        _, everything, _ = _C.initial_placement(layout, _C.UNLIMITED, 0)
        _, least, _ = _C.initial_placement(layout, 0, 0, _C.Backwards.ONE, _C.UNLIMITED)
    options = {"host_memory": least + (everything - least) // 4, "disk_memory": {"path": folder, "size": "1GiB"}}
    tasks = [Task(case, "bf16", options={**OPTIONS, **more}, on_host=True) for more in ({}, options)]
    results = [train(task) for task in tasks]
    dist.barrier()
    dist.destroy_process_group()
    return results


def test_two_ranks(tmp_path):
    for without, with_disk in run_ranks(2, train_with_and_without, str(tmp_path)):
        assert with_disk["losses"] == without["losses"]
        assert with_disk["norms"] == without["norms"]
        assert_same_bits(with_disk["state"], without["state"])
        assert 0 < with_disk["report"]["num_disk_chunks"] <= with_disk["report"]["num_chunks"]
        assert with_disk["report"]["disk_read_bytes"] > 0
        assert without["report"]["num_disk_chunks"] == 0


def fail_on_one_rank(folder):
    dist.init_process_group("gloo")
    case = Case(deep_gpt2, token_batch)
    options = {**OPTIONS, "host_memory": 1, "disk_memory": {"path": folder, "size": "1GiB"}, "rank_timeout_seconds": 60}
    engine, _ = initialize_engine(case.build, 0, Task(case, "bf16", options=OPTIONS).config())
    with engine:
        _, least, _ = _C.initial_placement(engine._session.layout, 0, 0, _C.Backwards.ONE, _C.UNLIMITED)
    options["host_memory"] = least
    engine, optimizer = initialize_engine(case.build, 0, Task(case, "bf16", options=options, on_host=True).config())
    generator = torch.Generator().manual_seed(dist.get_rank())
    with engine:
        for step in range(4):
            if step == 2 and dist.get_rank() == 1:
                engine._session.runtime.disk_faults.reads_before_error = 0
            engine.backward(case.loss(engine(**case.batch(generator))))
            optimizer.step()


def test_one_disk_that_fails_ends_all_ranks(tmp_path):
    with pytest.raises(RanksFailedError, match="disk_memory: reading .* failed: Input/output error"):
        run_ranks(2, fail_on_one_rank, str(tmp_path))
