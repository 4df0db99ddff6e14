import pytest
import torch
from torch import nn

from patrickstar import torch_scope
from patrickstar.elastic import Membership, serve_rendezvous
from patrickstar.runtime import initialize_engine
from tests.distributed import run_ranks
from tests.elastic.runs import GLOBAL_BATCH, joining_steps, state_of, train
from tests.training import make_config, make_host_config

ON_HOST = make_host_config("fp32")["optimizer"]
"""Nothing stays on devices, so shards travel in files."""
ALONE = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}


def alone(number):
    return ALONE | {"LOCAL_RANK": str(number % max(torch.cuda.device_count(), 1))}


def run(plan, folder, precision, optimizer=None, environment=alone):
    store = serve_rendezvous("127.0.0.1", 0)
    return run_ranks(
        len(joining_steps(plan)),
        train,
        f"127.0.0.1:{store.port}",
        plan,
        str(folder),
        precision,
        optimizer,
        environment=environment,
        timeout_seconds=150,
    )


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def check(plan, folder, precision, loss_tolerance, own_folders=".", optimizer=None, environment=alone):
    processes = run(plan, folder / own_folders, precision, optimizer, environment)
    straight = run([1] * len(plan), folder / own_folders, precision, optimizer, environment)[0]
    for step in range(len(plan)):
        seen = [sample for process in processes for sample in process["seen"].get(step, [])]
        assert sorted(seen) == sorted(straight["seen"][step])
        assert len(set(seen)) == GLOBAL_BATCH
        losses = [loss for process in processes for loss in process["losses"].get(step, [])]
        means = [torch.tensor(some).mean() for some in (losses, straight["losses"][step])]
        torch.testing.assert_close(*means, rtol=loss_tolerance, atol=loss_tolerance)
    for step in range(1, len(plan)):
        before = [process["before"][step] for process in processes if step in process["before"]]
        after = [process["after"][step] for process in processes if step in process["after"]]
        if plan[step] != plan[step - 1]:
            assert len(after) == plan[step]
            assert len(before) == plan[step - 1]
        for state, _ in after:
            assert_same(before[0][0], state)
        for process in processes:
            if step in process["before"] and step in process["after"]:
                assert torch.equal(process["before"][step][1], process["after"][step][1])
    last = [resized for process in processes for resized in process["resized"][-1:]]
    assert sum(resized.membership is Membership.LEFT for resized in last) == len(processes) - plan[-1]
    assert sum(resized.received_bytes for resized in last if resized.membership is Membership.RANK) > 0
    assert not [path for path in folder.rglob("*") if path.is_file()]
    return processes


def test_one_two_four_three_and_one_rank(tmp_path):
    check([1, 2, 4, 3, 1], tmp_path, "fp32", 1e-4)


def test_processes_without_a_common_folder_fetch_what_they_need(tmp_path):
    for number in range(3):
        (tmp_path / str(number)).mkdir()
    check([1, 2, 3, 1], tmp_path, "fp32", 1e-4, own_folders="{}", optimizer=ON_HOST)


def test_states_on_the_host_go_through_files(tmp_path):
    check([1, 2, 3, 1], tmp_path, "fp32", 1e-4, optimizer=ON_HOST)


def test_one_two_and_one_rank_with_one_moment(tmp_path):
    check([1, 2, 2, 1], tmp_path, "fp32", 1e-4, optimizer={"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}})


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_one_two_three_and_one_rank_in_16_bits(precision, tmp_path):
    check([1, 1, 2, 2, 3, 3, 1, 1], tmp_path, precision, 0.1)


def build():
    torch.manual_seed(0)
    with torch_scope():
        managed = nn.Linear(16, 16)
    frozen = nn.Linear(16, 16).requires_grad_(False)
    unfrozen = nn.Linear(16, 16).requires_grad_(False)
    last = nn.Linear(8, 16)
    last.weight = nn.Parameter(torch.randn(8, 16).T)  # another memory order
    first = nn.Sequential(managed, frozen, nn.BatchNorm1d(16), unfrozen, nn.Linear(16, 8), last)
    first.register_buffer("seen", torch.zeros(3))
    return first


@pytest.mark.parametrize("options", [("fp32", {}), ("fp16", {}), ("bf16", {"speculation": "commit"})], ids=str)
def test_a_run_with_resizes_is_one_without(options, tmp_path):
    precision, optimizer_options = options

    def train(resizes):
        config = make_config(precision, default_chunk_size=16384)
        config["optimizer"] |= optimizer_options
        engine, optimizer = initialize_engine(build, 0, config)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        params = list(engine.module.parameters())
        generator = torch.Generator().manual_seed(1)
        with engine:
            for step in range(6):
                optimizer.zero_grad()
                engine.backward(engine(torch.randn(8, 16, generator=generator)).float().square().mean())
                optimizer.step()
                schedule.step()
                if step == 1:
                    engine.module[3].requires_grad_(True)
                if step in resizes:
                    before = state_of(engine, optimizer)
                    engine.resize(1, folder=str(tmp_path))
                    assert_same(before, state_of(engine, optimizer))
                    assert all(one is other for one, other in zip(params, engine.module.parameters(), strict=True))
            found = state_of(engine, optimizer)
        return found, dict(engine.module.state_dict())

    straight, resized = train(()), train((1, 3))
    assert_same(straight[0], resized[0])
    assert_same(straight[1], resized[1])
