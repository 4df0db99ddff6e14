import pytest
import torch

from patrickstar.config import parse_config
from patrickstar.machine import budgets, host_memory
from patrickstar.machine.budgets import make_budgets

GIB = 2**30
CUDA = torch.device("cuda", 0)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    def machine(*, total=64.0, available=60.0, limit=None, taken=0.0, cached=0.0):
        group = tmp_path / "group"
        group.mkdir(exist_ok=True)
        (group / "memory.current").write_text(f"{int((taken + cached) * GIB)}\n")
        (group / "memory.stat").write_text(f"anon 1\nactive_file {int(cached * GIB)}\ninactive_file 0\n")
        monkeypatch.setattr(host_memory, "total_bytes", lambda: int(total * GIB))
        monkeypatch.setattr(host_memory, "mem_available_bytes", lambda: int(available * GIB))
        groups = [] if limit is None else [(int(limit * GIB), group)]
        monkeypatch.setattr(host_memory, "_limited_groups", lambda: groups)

    return machine


@pytest.mark.parametrize(
    ("figures", "available"),
    [
        ({}, 60),
        ({"limit": 32, "taken": 4, "cached": 20}, 28),  # cached files go when memory is wanted
        ({"limit": 32, "taken": 4, "available": 10}, 10),  # the machine has less than the group may have
        ({"limit": 128, "taken": 2, "total": 16, "available": 12}, 126),  # the machine grows as memory is touched
        ({"limit": 8, "taken": 9}, 0),
    ],
)
def test_available_host_memory(machine, figures, available):
    machine(**figures)
    assert host_memory.available_bytes() == available * GIB


def test_this_machine():
    assert 0 < host_memory.default_budget_bytes() < host_memory.available_bytes() <= host_memory.usable_bytes()


def test_the_hosts_budget(machine):
    machine(total=200, available=120)
    reserve = 10 * GIB  # 5 %
    cpu = torch.device("cpu")
    assert make_budgets(parse_config({}), cpu).host_bytes == 110 * GIB == 120 * GIB - reserve
    further = 120 * GIB // 50  # of each further rank, 2 %
    assert make_budgets(parse_config({}), cpu, num_local_ranks=4).host_bytes == (110 * GIB - 3 * further) // 4
    ratio = {"client": {"mem_tracer": {"overall_cpu_mem_ratio": 0.5}}}
    assert make_budgets(parse_config(ratio), cpu).host_bytes == 100 * GIB
    assert make_budgets(parse_config({**ratio, "host_memory": "3GiB"}), cpu).host_bytes == 3 * GIB
    machine(total=1000, available=900)
    assert make_budgets(parse_config({}), cpu, num_local_ranks=2).host_bytes == (850 - 4) * GIB // 2


def test_the_gpus_budget(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (90 * GIB, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 4 * GIB)
    assert make_budgets(parse_config({}), CUDA).device_bytes == 93 * GIB
    several = make_budgets(parse_config({}), CUDA, num_local_ranks=2).device_bytes
    assert several == 93 * GIB - budgets._COLLECTIVES_RESERVE_BYTES
    sharing = make_budgets(parse_config({}), CUDA, num_local_ranks=4, num_device_ranks=2).device_bytes
    assert sharing == (90 // 2 + 4 - 1) * GIB  # through the host: without NCCL's buffers
    ratio = {"client": {"mem_tracer": {"overall_gpu_mem_ratio": 0.5}}}
    assert make_budgets(parse_config(ratio), CUDA).device_bytes == 50 * GIB
    assert make_budgets(parse_config(ratio), CUDA, num_local_ranks=4, num_device_ranks=2).device_bytes == 25 * GIB
    assert make_budgets(parse_config({"device_memory": "24GiB"}), CUDA).device_bytes == 24 * GIB
    assert budgets.device_reserve_bytes(20 * GIB, by_nccl=False) == 20 * GIB // 50  # less on a small one
