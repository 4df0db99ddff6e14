import dataclasses
import functools

import torch.distributed as dist

from tests.distributed import run_ranks
from tests.engine.test_offloaded_activations import (
    LENGTH,
    WIDE,
    long_batch,
    offloaded_by_step,
    offloading,
    wide_reference,
)
from tests.training import train


def test_each_rank_decides_alone():
    _, activation_memory = wide_reference()
    ample, scarce = int(1.25 * activation_memory), int(1.17 * activation_memory)
    settings = [("never", 2**40), ("auto", ample), ("auto", scarce)]
    long, short = run_ranks(2, trained, [LENGTH, LENGTH // 2], settings)
    print(long, short)
    for (losses, *_), found in ((long[0], long), (short[0], short)):
        assert all(others == losses for others, *_ in found)
    for (_, stayed, activation_levels), (_, others, same_activation_levels) in zip(long, short, strict=True):
        assert activation_levels == same_activation_levels
        assert others == [0] * len(stayed)
    never, roomy, tight = (offloaded for _, offloaded, _ in long)
    assert never == [0] * 4
    assert roomy[0] > 0 and roomy[1:] == [0] * 3  # while the plan after the first step has room for them already
    assert long[1][2][0] >= max(long[0][2])
    assert all(num_bytes > 0 for num_bytes in tight)


def trained(lengths, settings):
    dist.init_process_group("gloo")
    case = dataclasses.replace(WIDE, batch=functools.partial(long_batch, length=lengths[dist.get_rank()]))
    found = []
    for offload, device_memory in settings:
        activation_levels = []

        def look(engine, step, activation_levels=activation_levels):
            if step > 0:
                activation_levels.append(engine.plan().activation_peak_bytes)

        config = offloading(offload, device_memory=device_memory)
        run = train(case, config, steps=4, checkpointing=False, before_step=look)
        found.append(([loss.hex() for loss in run.losses], offloaded_by_step(run), activation_levels))
    dist.destroy_process_group()
    return found
