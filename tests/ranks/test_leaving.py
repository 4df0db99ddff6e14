import dataclasses
import functools

import torch.distributed as dist

from tests.distributed import run_ranks
from tests.engine.test_stashed_activations import LENGTH, WIDE, long_batch, stashed_by_step, stashing, wide_reference
from tests.training import train


def test_each_rank_decides_alone():
    _, tide = wide_reference()
    ample, scarce = int(1.25 * tide), int(1.17 * tide)
    settings = [("never", 2**40), ("auto", ample), ("auto", scarce)]
    long, short = run_ranks(2, trained, [LENGTH, LENGTH // 2], settings)
    print(long, short)
    for (losses, *_), found in ((long[0], long), (short[0], short)):
        assert all(others == losses for others, *_ in found)
    for (_, stayed, tides), (_, others, same_tides) in zip(long, short, strict=True):
        assert tides == same_tides
        assert others == [0] * len(stayed)
    never, roomy, tight = (stashed for _, stashed, _ in long)
    assert never == [0] * 4
    assert roomy[0] > 0 and roomy[1:] == [0] * 3  # while the plan after the first step has room for them already
    assert long[1][2][0] >= max(long[0][2])
    assert all(num_bytes > 0 for num_bytes in tight)


def trained(lengths, settings):
    dist.init_process_group("gloo")
    case = dataclasses.replace(WIDE, batch=functools.partial(long_batch, length=lengths[dist.get_rank()]))
    found = []
    for offload, device_memory in settings:
        tides = []

        def look(engine, step, tides=tides):
            if step > 0:
                tides.append(engine.plan().tide_peak_bytes)

        config = stashing(offload, device_memory=device_memory)
        run = train(case, config, steps=4, checkpointing=False, before_step=look)
        found.append(([loss.hex() for loss in run.losses], stashed_by_step(run), tides))
    dist.destroy_process_group()
    return found
