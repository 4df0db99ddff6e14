"""Measures this machine's host memory, host updates and link within seconds, without a model."""

from __future__ import annotations

import time

import torch

from patrickstar import _C
from patrickstar.config import HostThreadsConfig
from patrickstar.machine.engine_options import host_thread_options

_REPEATS = 8


def engine_threads() -> _C.HostThreads:
    """Returns the host threads that an engine uses here by default."""
    options = host_thread_options(HostThreadsConfig(), with_gpu=torch.cuda.is_available())
    return _C.choose_host_threads(_C.read_cpu_topology(_C.allowed_cpus()), options)


def measure_host_copy_gbps(num_bytes: int = 256 * 2**20) -> float:
    """Bandwidth of PyTorch's copy of a large buffer, reads and writes together, 1e9 bytes per second."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(engine_threads().num_threads)
    try:
        source, target = (torch.zeros(num_bytes // 4) for _ in range(2))
        target.copy_(source)
        begin = time.perf_counter()
        for _ in range(_REPEATS):
            target.copy_(source)
        return _REPEATS * 2 * num_bytes / (time.perf_counter() - begin) / 1e9
    finally:
        torch.set_num_threads(num_threads)


def measure_host_adam_gparams(numel: int = 16 * 2**20) -> float:
    """Host updates with an engine's threads, 1e9 parameters per second."""
    threads = engine_threads()
    pool = _C.ThreadPool(threads.num_threads, threads.worker_cpus)
    master, momentum, variance = (torch.zeros(numel) for _ in range(3))
    grad = torch.zeros(numel, dtype=torch.bfloat16)
    states = [_C.optim.StateArray(tensor.data_ptr()) for tensor in (master, momentum, variance)]
    half = (grad.data_ptr(), _C.DType.BFLOAT16)
    arrays = _C.optim.AdamRange(*states, *half, *half, numel)
    ones = dict.fromkeys(("grad_scale", "decay", "inv_sqrt_bias_correction2", "eps", "step_size"), 1.0)
    scalars = _C.optim.AdamScalars(weight_decay=0.0, beta2=0.999, one_minus_beta1=0.1, one_minus_beta2=0.001, **ones)

    def update() -> None:
        _C.optim.update(_C.optim.isa(), arrays, scalars, pool)

    update()
    seconds = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        update()
        seconds.append(time.perf_counter() - begin)
    return numel / min(seconds) / 1e9  # other threads of the process may be busy


def measure_link_gbps(num_bytes: int = 128 * 2**20) -> tuple[float, float]:
    """Bandwidth to and from the GPU, both at once, 1e9 bytes per second. Needs a GPU."""
    host = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.empty(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    rates = []
    for _ in range(2):  # the first one warms up
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in streams]
        for up, stream, (begin, end) in zip((True, False), streams, events, strict=True):
            with torch.cuda.stream(stream):
                begin.record()
                for _ in range(_REPEATS):
                    if up:
                        device[0].copy_(host[0], non_blocking=True)
                    else:
                        host[1].copy_(device[1], non_blocking=True)
                end.record()
        torch.cuda.synchronize()
        rates = [_REPEATS * num_bytes / (begin.elapsed_time(end) / 1e3) / 1e9 for begin, end in events]
    return rates[0], rates[1]
