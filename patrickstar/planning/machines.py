"""How fast machines are: the only place with such numbers, each with its source.

Rates that were measured say on what; rates scaled from data sheets say so. ``patrickstar plan --measure``
takes what it can from the machine it runs on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch

from patrickstar import _C
from patrickstar.planning.measuring import engine_threads, measure_host_adam_gparams, measure_link_gbps
from patrickstar.planning.update_costs import ADAM, UpdateCost, UpdateRates
from patrickstar.sizes import show_size

_SHORT_TOKENS, _MIDDLE_TOKENS, _LONG_TOKENS = 1024, 4096, 65536


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """What operations cost on a GPU: the longer of its arithmetic and its memory traffic."""

    matmul_tflops: float
    """Sustained by 16-bit matrix products of a transformer's sizes, 1e12 operations per second."""
    matmul_float32_tflops: float
    """Sustained by float32 matrix products of such sizes, 1e12 operations per second."""
    attention_tflops: float
    """Sustained by 16-bit fused attention over 1024 tokens, counted as if nothing were masked."""
    middle_attention_tflops: float
    """Sustained by it over 4096 tokens, of what causal attention does not mask: by the kernel that PyTorch chooses by
    itself, which is not that of sequences that ranks share (patrickstar/sequence/choice.py).
    """
    long_attention_tflops: float
    """The same over 65,536 tokens and more."""
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

    def attention_flops(self, dtype: torch.dtype, length: int, *, causal: bool) -> float:
        """Operations per second of attention to ``length`` tokens, counted as if nothing were masked. In long sequences
        half of a causal kernel's are not done; in those of 1024 tokens most are. Between the lengths whose rates are
        known they are linear in the length's logarithm.
        """
        at_most = self.matmul_flops(dtype)
        done = 2 if causal else 1
        short, middle, far = (
            min(tflops * 1e12, at_most)
            for tflops in (self.attention_tflops, self.middle_attention_tflops, self.long_attention_tflops)
        )
        rates = (short, max(middle * done, short), max(far * done, short))
        return float(np.interp(math.log(length), np.log((_SHORT_TOKENS, _MIDDLE_TOKENS, _LONG_TOKENS)), rates))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """A GPU and its part of a host: cores come with GPUs, the host's memory is shared (cluster.py)."""

    name: str
    source: str
    """Where the numbers come from."""
    gpu: Gpu
    gpu_bytes: int
    """Size of the GPU's memory in bytes."""
    compute_dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)
    """The dtypes whose matrix products it has at these rates."""
    upload_gbps: float
    """Host to device, both directions busy, 1e9 bytes per second."""
    download_gbps: float
    """Device to host, both directions busy."""
    transfer_latency_seconds: float
    """Added to the time of the bytes in each transfer between host and device."""
    host_adam_gparams: float
    """Adam on float32 states on the host with the threads that one GPU has, 1e9 parameters per second. Others' updates
    take as much of its memory bandwidth, or what :attr:`host_threads` can compute.
    """
    host_threads: int
    """That update, for each GPU: one for each core but the one that launches kernels."""
    param_pass: float = 16 / 28
    """Of an update on the host in one pass, what the pass over parameters alone takes ([Note: parameters first],
    csrc/engine/update_jobs.h): by the bytes that each moves, unless it was measured.
    """
    states_pass: float = 26 / 28
    """What the pass over states behind it takes, likewise."""
    device_adam_gparams: float
    """Adam on float32 states on the GPU, 1e9 parameters per second; others' updates take as much of its bandwidth."""
    socket_memory_gbps: float
    """Of the memory of one socket of the host, reads and writes together."""
    gpus_per_socket: int
    """GPUs of a node that share the memory bandwidth of one socket."""
    nvlink_gather_gbps: float
    """Of gathers within a node: bytes from other GPUs per second at each GPU ("bus bandwidth")."""
    nvlink_scatter_gbps: float
    """Of scatters within a node, likewise."""
    disk_gbps: float
    """Of a node's disk for optimizer states, reads and writes each while both happen, 1e9 bytes per second."""
    several_gpus_slowdown: float
    """Time of the GPU's kernels where several GPUs train together, over their time where one does."""
    synchronize_seconds: float
    """From the end of backward until the launching thread goes on."""
    launch_ahead_seconds: float
    """Of work that the launching thread queues before it waits."""

    def host_params_per_second(self, cost: UpdateCost) -> float:
        """Updates of such a cost on the host: by its memory or by its cores, whichever take longer. Cores are those
        whose updates were measured, or as much faster as :attr:`host_adam_gparams` shows them to be.
        """
        adam = self.host_adam_gparams * 1e9
        core_seconds = min(ADAM.core_seconds, self.host_threads / adam) * cost.core_seconds / ADAM.core_seconds
        return min(adam * ADAM.traffic_bytes / cost.traffic_bytes, self.host_threads / core_seconds)

    def device_params_per_second(self, cost: UpdateCost) -> float:
        """Updates of such a cost on the GPU, by its memory."""
        return self.device_adam_gparams * 1e9 * ADAM.traffic_bytes / cost.traffic_bytes

    def update_rates(
        self, on_host: Sequence[tuple[int, UpdateCost]] = (), on_device: Sequence[tuple[int, UpdateCost]] = ()
    ) -> UpdateRates:
        """While on each side so many parameters of such costs are updated; of none: as Adam on float32 states."""
        host, device = on_host or ((1, ADAM),), on_device or ((1, ADAM),)
        numel = sum(count for count, _ in host)
        return UpdateRates(
            host_params_per_second=numel / sum(count / self.host_params_per_second(cost) for count, cost in host),
            device_params_per_second=sum(count for count, _ in device)
            / sum(count / self.device_params_per_second(cost) for count, cost in device),
            host_bytes=sum(count * cost.traffic_bytes for count, cost in host) / numel,
        )

    def rates(self, updates: UpdateRates | None = None) -> _C.Rates:
        """These figures as the simulator takes them (csrc/plan/simulator.h); collectives take no time. ``updates``: of
        what is updated; None: Adam on float32 states.
        """
        updates = updates or self.update_rates()
        rates = _C.Rates()
        rates.upload_gbps = self.upload_gbps
        rates.download_gbps = self.download_gbps
        rates.transfer_latency_seconds = self.transfer_latency_seconds
        rates.host_adam_params_per_second = updates.host_params_per_second
        rates.param_pass, rates.states_pass = self.param_pass, self.states_pass
        rates.device_adam_params_per_second = updates.device_params_per_second
        rates.synchronize_seconds = self.synchronize_seconds
        rates.launch_ahead_seconds = self.launch_ahead_seconds
        rates.device_memory_gbps = self.gpu.memory_gbps
        rates.disk_read_gbps = rates.disk_write_gbps = self.disk_gbps
        return rates


H200 = Machine(
    name="h200",
    source="one H200 and 16 Xeon cores: link, Adam and matrix products measured, other rates fitted (docs/design.md)",
    gpu=Gpu(
        matmul_tflops=710.0,
        matmul_float32_tflops=50.0,
        attention_tflops=420.0,
        middle_attention_tflops=238.5,  # fitted to 8.03 B with 4 x 4096 tokens, as the others are to 1024
        long_attention_tflops=497.0,  # fitted to 8.03 B with one sequence of 262,144; 2 % long at 65,536
        memory_gbps=3900.0,
        launch_seconds=4e-6,
    ),
    gpu_bytes=139 * 2**30,
    upload_gbps=50.8,
    download_gbps=50.8,
    transfer_latency_seconds=10e-6,
    host_adam_gparams=5.2,
    host_threads=15,
    # 0.142 and 0.168 ns per parameter, whole 0.192 (`benchmark adam` and h200-profile-llama-8b-40gib-acting.txt).
    param_pass=0.74,
    states_pass=0.88,
    device_adam_gparams=123.0,
    # Four GPUs of one socket, both directions: 26.6 GB/s each way for each, where one alone has 50.8.
    socket_memory_gbps=213.0,
    gpus_per_socket=4,
    # Four GPUs, NCCL, shards of 64 MiB.
    nvlink_gather_gbps=305.0,
    nvlink_scatter_gbps=299.0,
    # Not measured: half of what data sheets of PCIe 4 NVMe disks say of writes alone, since reads happen meanwhile.
    disk_gbps=2.0,
    # Fitted to the kernels of three runs on four GPUs with everything resident (4.31, 10.5 and 21 B: 1.04, 1.04, 1.08).
    # It holds what is not told apart: collectives beside kernels, the machine, larger products than those of one GPU's
    # fit. 4.31 B on one and on four GPUs of that machine: 1.03.
    several_gpus_slowdown=1.05,
    synchronize_seconds=4e-3,
    launch_ahead_seconds=0.1,
)

# Of the H200's data sheet: what others' are compared with.
_SHEET_TFLOPS, _SHEET_GBPS, _SHEET_NVLINK_GBPS = 989.0, 4800.0, 900.0
_OF_PCIE_5 = {3: 0.25, 4: 0.5, 5: 1.0}
_OF_FLOAT32 = 0.75  # of the data sheet's rate without tensor cores, as of the H200's 67 TFLOPS


def _of_data_sheet(
    name: str,
    *,
    tflops: float,
    float32_tflops: float,
    gbps: float,
    gib: float,
    pcie: int,
    nvlink_gbps: float = 0.0,
    compute_dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32),
) -> Machine:
    """An H200's host with another GPU, whose rates are the H200's times what data sheets say: dense 16-bit matrix
    products that are summed in float32, memory, NVLink (both directions; 0: collectives go over PCIe), PCIe.
    """
    arithmetic, memory, pcie_share = tflops / _SHEET_TFLOPS, gbps / _SHEET_GBPS, _OF_PCIE_5[pcie]
    link = H200.upload_gbps * pcie_share
    nvlink = nvlink_gbps / _SHEET_NVLINK_GBPS
    return dataclasses.replace(
        H200,
        name=name,
        source=f"an H200's measured rates scaled by data sheets ({tflops:g} TFLOPS, {gbps:g} GB/s, PCIe {pcie}, "
        f"{f'NVLink {nvlink_gbps:g} GB/s' if nvlink_gbps else 'no NVLink'}); not measured",
        gpu=Gpu(
            matmul_tflops=H200.gpu.matmul_tflops * arithmetic,
            matmul_float32_tflops=float32_tflops * _OF_FLOAT32,
            attention_tflops=H200.gpu.attention_tflops * arithmetic,
            middle_attention_tflops=H200.gpu.middle_attention_tflops * arithmetic,
            long_attention_tflops=H200.gpu.long_attention_tflops * arithmetic,
            memory_gbps=H200.gpu.memory_gbps * memory,
            launch_seconds=H200.gpu.launch_seconds,
        ),
        compute_dtypes=compute_dtypes,
        gpu_bytes=int(gib * 2**30),
        upload_gbps=link,
        download_gbps=link,
        device_adam_gparams=H200.device_adam_gparams * memory,
        nvlink_gather_gbps=H200.nvlink_gather_gbps * nvlink if nvlink else link,
        nvlink_scatter_gbps=H200.nvlink_scatter_gbps * nvlink if nvlink else link,
    )


_NO_BF16 = (torch.float16, torch.float32)
# From the makers' data sheets, none measured: TFLOPS of dense bf16 (V100: fp16) on tensor cores with float32 sums (of a
# GeForce half of what is advertised with 16-bit sums), float32 without tensor cores, memory GB/s; GiB that a process
# finds there, ECC taken off.
_DATA_SHEETS = (
    _of_data_sheet("b200", tflops=2250, float32_tflops=75, gbps=8000, gib=178, pcie=5, nvlink_gbps=1800),
    _of_data_sheet("h100", tflops=989, float32_tflops=67, gbps=3350, gib=79, pcie=5, nvlink_gbps=900),
    _of_data_sheet("a100", tflops=312, float32_tflops=19.5, gbps=2000, gib=79, pcie=4, nvlink_gbps=600),
    _of_data_sheet("a100-40", tflops=312, float32_tflops=19.5, gbps=1555, gib=39.4, pcie=4, nvlink_gbps=600),
    _of_data_sheet("l40s", tflops=362, float32_tflops=91.6, gbps=864, gib=44.4, pcie=4),
    _of_data_sheet("a10", tflops=125, float32_tflops=31.2, gbps=600, gib=22, pcie=4),
    _of_data_sheet("v100", tflops=125, float32_tflops=15.7, gbps=900, gib=31.7, pcie=3, nvlink_gbps=300,
                   compute_dtypes=_NO_BF16),
    _of_data_sheet("rtx3090", tflops=71, float32_tflops=35.6, gbps=936, gib=23.5, pcie=4),
    _of_data_sheet("rtx4090", tflops=165, float32_tflops=82.6, gbps=1008, gib=23.5, pcie=4),
    _of_data_sheet("rtx5090", tflops=209.5, float32_tflops=104.8, gbps=1792, gib=31.3, pcie=5),
)  # fmt: skip

MACHINES = {machine.name: machine for machine in (H200, *_DATA_SHEETS)}


def given_gpu(
    machine: Machine,
    *,
    tflops: float | None = None,
    gbps: float | None = None,
    num_bytes: int | None = None,
    link_gbps: float | None = None,
) -> Machine:
    """``machine`` with a GPU that is told by numbers, of which None are left as they are.

    Args:
        machine: what the numbers replace parts of.
        tflops: dense 16-bit matrix products, as a data sheet says it; sustained are as many of them as on an H200.
        gbps: the GPU's memory, as a data sheet says it, 1e9 bytes per second.
        num_bytes: size of its memory.
        link_gbps: to the host, each way, as it is sustained.
    """
    gpu, told = machine.gpu, []
    values: dict[str, object] = {}
    if tflops is not None:
        share = tflops / _SHEET_TFLOPS
        gpu = dataclasses.replace(
            gpu,
            matmul_tflops=H200.gpu.matmul_tflops * share,
            attention_tflops=H200.gpu.attention_tflops * share,
            middle_attention_tflops=H200.gpu.middle_attention_tflops * share,
            long_attention_tflops=H200.gpu.long_attention_tflops * share,
            matmul_float32_tflops=min(gpu.matmul_float32_tflops, H200.gpu.matmul_tflops * share / 2),
        )
        told.append(f"{tflops:g} TFLOPS")
    if gbps is not None:
        gpu = dataclasses.replace(gpu, memory_gbps=H200.gpu.memory_gbps * gbps / _SHEET_GBPS)
        values["device_adam_gparams"] = H200.device_adam_gparams * gbps / _SHEET_GBPS
        told.append(f"{gbps:g} GB/s")
    if num_bytes is not None:
        values["gpu_bytes"] = num_bytes
        told.append(show_size(num_bytes))
    if link_gbps is not None:
        values |= {"upload_gbps": link_gbps, "download_gbps": link_gbps}
        told.append(f"a link of {link_gbps:g} GB/s")
    if not told:
        return machine
    source = f"{', '.join(told)} as given; the rest: {machine.source}"
    return dataclasses.replace(machine, name=f"a GPU like {machine.name}", source=source, gpu=gpu, **values)


def given_host(machine: Machine, *, cores: int | None = None, gbps: float | None = None) -> Machine:
    """``machine`` with another host, None being as it is: cores for each GPU, and memory bandwidth of a socket, 1e9
    bytes per second. Updates take what the cores can do, or the share of the bandwidth that they were measured to take.
    """
    if cores is None and gbps is None:
        return machine
    told = [f"{cores} cores"] if cores is not None else []
    told += [f"{gbps:g} GB/s of host memory"] if gbps is not None else []
    bandwidth = machine.socket_memory_gbps if gbps is None else gbps
    threads = machine.host_threads if cores is None else max(cores - 1, 1)
    by_cores = threads * 1e-9 / ADAM.core_seconds
    adam = min(by_cores, H200.host_adam_gparams * bandwidth / H200.socket_memory_gbps)
    return dataclasses.replace(
        machine,
        source=f"{', '.join(told)} as given; the rest: {machine.source}",
        socket_memory_gbps=bandwidth,
        host_adam_gparams=adam,
        host_threads=threads,
        upload_gbps=min(machine.upload_gbps, bandwidth / 2),
        download_gbps=min(machine.download_gbps, bandwidth / 2),
    )


def given_disk(machine: Machine, gbps: float | None) -> Machine:
    """``machine`` with a disk that reads and writes so many 1e9 bytes per second each, both at once; None: its own."""
    if gbps is None:
        return machine
    source = f"a disk of {gbps:g} GB/s as given; the rest: {machine.source}"
    return dataclasses.replace(machine, source=source, disk_gbps=gbps)


def measured(machine: Machine) -> Machine:
    """``machine`` with what can be measured here in its place: updates on the host, and with a GPU the link and its
    updates. Takes about a second, and 0.5 GB of host memory.
    """
    what = ["host Adam"]
    values: dict[str, float] = {
        "host_adam_gparams": measure_host_adam_gparams(),
        "host_threads": engine_threads().num_threads,
    }
    if torch.cuda.is_available():
        what.append("link")
        values["upload_gbps"], values["download_gbps"] = measure_link_gbps()
    return dataclasses.replace(
        machine, source=f"{' and '.join(what)} measured on this machine; the rest: {machine.source}", **values
    )
