"""How fast machines are: the only place with such numbers, each with its source.

Rates that were measured say on what; rates scaled from data sheets say so. ``patrickstar plan --measure``
takes what it can from the machine it runs on.
"""

from __future__ import annotations

import dataclasses

import torch

from patrickstar import _C
from patrickstar.planning.measuring import measure_host_adam_gparams, measure_link_gbps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """What operations cost on a GPU: the longer of its arithmetic and its memory traffic."""

    matmul_tflops: float
    """Sustained by 16-bit matrix products of a transformer's sizes, 1e12 operations per second."""
    matmul_float32_tflops: float
    """Sustained by float32 matrix products of such sizes, 1e12 operations per second."""
    attention_tflops: float
    """Sustained by 16-bit fused attention, counted as if nothing were masked."""
    memory_gbps: float
    """Sustained by element-wise operations, 1e9 bytes per second, reads and writes."""
    launch_seconds: float
    """Least time of an operation."""

    @property
    def memory_bytes_per_second(self) -> float:
        """:attr:`memory_gbps` in bytes per second."""
        return self.memory_gbps * 1e9

    def matmul_flops(self, dtype: torch.dtype) -> float:
        """Operations per second of matrix products."""
        return (self.matmul_tflops if dtype.itemsize == 2 else self.matmul_float32_tflops) * 1e12

    def attention_flops(self, dtype: torch.dtype) -> float:
        """Operations per second of attention."""
        return min(self.attention_tflops * 1e12, self.matmul_flops(dtype))


# Through host memory per updated parameter: gradient 2, states 12 in and 12 out, parameter 2 (csrc/optim/kernels.h).
ADAM_HOST_BYTES = 28


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """A GPU and its part of a host: cores come with GPUs, the host's memory is shared (cluster.py)."""

    name: str
    source: str
    """Where the numbers come from."""
    gpu: Gpu
    gpu_bytes: int
    """Size of the GPU's memory in bytes."""
    upload_gbps: float
    """Host to device, both directions busy, 1e9 bytes per second."""
    download_gbps: float
    """Device to host, both directions busy."""
    transfer_latency_seconds: float
    """Added to the time of the bytes in each transfer between host and device."""
    host_adam_gparams: float
    """Updates on the host with the threads that one GPU has (15 on 16 cores), 1e9 parameters per second."""
    device_adam_gparams: float
    """Adam updates on the GPU, 1e9 parameters per second."""
    socket_memory_gbps: float
    """Of the memory of one socket of the host, reads and writes together."""
    gpus_per_socket: int
    """GPUs of a node that share the memory bandwidth of one socket."""
    nvlink_gather_gbps: float
    """Of gathers within a node: bytes from other GPUs per second at each GPU ("bus bandwidth")."""
    nvlink_scatter_gbps: float
    """Of scatters within a node, likewise."""
    several_gpus_slowdown: float
    """Time of the GPU's kernels where several GPUs train together, over their time where one does."""
    synchronize_seconds: float
    """From the end of backward until the launching thread goes on."""
    launch_ahead_seconds: float
    """Of work that the launching thread queues before it waits."""

    def rates(self) -> _C.Rates:
        """These figures as the simulator takes them (csrc/plan/simulator.h); collectives take no time."""
        rates = _C.Rates()
        rates.upload_gbps = self.upload_gbps
        rates.download_gbps = self.download_gbps
        rates.transfer_latency_seconds = self.transfer_latency_seconds
        rates.host_adam_params_per_second = self.host_adam_gparams * 1e9
        rates.device_adam_params_per_second = self.device_adam_gparams * 1e9
        rates.synchronize_seconds = self.synchronize_seconds
        rates.launch_ahead_seconds = self.launch_ahead_seconds
        return rates


H200 = Machine(
    name="h200",
    source="one H200 and 16 Xeon cores: link, Adam and matrix products measured, other rates fitted (docs/design.md)",
    gpu=Gpu(
        matmul_tflops=710.0,
        matmul_float32_tflops=50.0,
        attention_tflops=420.0,
        memory_gbps=3900.0,
        launch_seconds=4e-6,
    ),
    gpu_bytes=139 * 2**30,
    upload_gbps=50.8,
    download_gbps=50.8,
    transfer_latency_seconds=10e-6,
    host_adam_gparams=5.2,
    device_adam_gparams=123.0,
    # Four GPUs of one socket, both directions: 26.6 GB/s each way for each, where one alone has 50.8.
    socket_memory_gbps=213.0,
    gpus_per_socket=4,
    # Four GPUs, NCCL, shards of 64 MiB.
    nvlink_gather_gbps=305.0,
    nvlink_scatter_gbps=299.0,
    # Fitted to the kernels of three runs on four GPUs with everything resident (4.31, 10.5 and 21 B: 1.04, 1.04, 1.08).
    # It holds what is not told apart: collectives beside kernels, the machine, larger products than those of one GPU's
    # fit. 4.31 B on one and on four GPUs of that machine: 1.03.
    several_gpus_slowdown=1.05,
    synchronize_seconds=4e-3,
    launch_ahead_seconds=0.1,
)

# Same host as the H200's; the GPU's rates scaled by its data sheet (memory 3.35 against 4.8 TB/s; same arithmetic).
H100 = dataclasses.replace(
    H200,
    name="h100",
    source="an H200's measured rates with the memory bandwidth of the H100's data sheet; not measured",
    gpu=dataclasses.replace(H200.gpu, memory_gbps=H200.gpu.memory_gbps * 3.35 / 4.8),
    gpu_bytes=79 * 2**30,
    device_adam_gparams=H200.device_adam_gparams * 3.35 / 4.8,
)
# PCIe 4 and NVLink 3 instead of 5 and 4: half and two thirds of the links; arithmetic 312 against 989 TFLOPS, memory
# 2.0 against 4.8 TB/s.
A100 = dataclasses.replace(
    H200,
    name="a100",
    source="an H200's measured rates scaled by data sheets (arithmetic, memory, PCIe 4, NVLink 3); not measured",
    gpu=Gpu(
        matmul_tflops=H200.gpu.matmul_tflops * 312 / 989,
        matmul_float32_tflops=19.5 * 0.9,
        attention_tflops=H200.gpu.attention_tflops * 312 / 989,
        memory_gbps=H200.gpu.memory_gbps * 2.0 / 4.8,
        launch_seconds=H200.gpu.launch_seconds,
    ),
    gpu_bytes=79 * 2**30,
    upload_gbps=H200.upload_gbps / 2,
    download_gbps=H200.download_gbps / 2,
    device_adam_gparams=H200.device_adam_gparams * 2.0 / 4.8,
    nvlink_gather_gbps=H200.nvlink_gather_gbps * 2 / 3,
    nvlink_scatter_gbps=H200.nvlink_scatter_gbps * 2 / 3,
)

MACHINES = {machine.name: machine for machine in (H200, H100, A100)}


def measured(machine: Machine) -> Machine:
    """``machine`` with what can be measured here in its place: updates on the host, and with a GPU the link and its
    updates. Takes about a second, and 0.5 GB of host memory.
    """
    what = ["host Adam"]
    values = {"host_adam_gparams": measure_host_adam_gparams()}
    if torch.cuda.is_available():
        what.append("link")
        values["upload_gbps"], values["download_gbps"] = measure_link_gbps()
    return dataclasses.replace(
        machine, source=f"{' and '.join(what)} measured on this machine; the rest: {machine.source}", **values
    )
