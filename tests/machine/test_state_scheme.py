"""The choice between new parameters beside the old ones and in place of them."""

import functools

import pytest
import torch
from torch import nn

from patrickstar import _C
from patrickstar.config import OptimizerConfig
from patrickstar.machine.state_scheme import choose_layout
from patrickstar.module.layouts import make_layout
from patrickstar.module.preprocess import plan_params

GIB = 2**30


@functools.cache
def params():
    """14.8 B parameters: 207 GB with exact states, as Qwen2.5-14B."""
    with torch.device("meta"):
        layers = nn.Sequential(*(nn.Linear(8192, 8192, bias=False) for _ in range(220)))
    return plan_params(layers, torch.bfloat16, use_cpu_embedding=False)


def has_values_in_place(device_gib, host_gib):
    layout = choose_layout(
        lambda scheme: make_layout(params(), 64 * 2**20, scheme=scheme),
        OptimizerConfig(),
        updates_begin_early=True,
        device_bytes=device_gib * GIB,
        host_bytes=host_gib * GIB,
    )
    return _C.puts_values_in_place(layout)


@pytest.mark.parametrize(
    ("device_gib", "host_gib", "in_place"),
    [(138, 126, True), (138, 180, False), (78, 160, True), (78, 200, False), (0, 250, False)],
)
def test_new_parameters_replace_old_ones_where_both_find_no_room(device_gib, host_gib, in_place):
    assert has_values_in_place(device_gib, host_gib) is in_place


def test_more_host_memory_ends_it_once():
    chosen = [has_values_in_place(138, host_gib) for host_gib in range(64, 260, 4)]
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] and not chosen[-1]
