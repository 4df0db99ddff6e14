"""Machine rates for plans, each with its source.

Measured rates name the measurement; scaled rates name the data sheet. ``patrickstar plan --measure`` replaces what it
can measure on the machine it runs on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from patrickstar import _C
from patrickstar.planning import gpus
from patrickstar.planning.gpus import DATA_SHEETS, PRECISIONS
from patrickstar.planning.update_costs import ADAM, UpdateCost, UpdateRates
from patrickstar.sizes import show_size

_SHORT_TOKENS, _MIDDLE_TOKENS, _LONG_TOKENS = 1024, 4096, 65536


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU's rates. An operation takes the longer of its arithmetic and its memory traffic."""

    matmul_tflops: float
    """Sustained 16-bit matrix products of a transformer's sizes, 1e12 operations per second."""
    matmul_float32_tflops: float
    """Sustained float32 matrix products of such sizes, 1e12 operations per second."""
    attention_tflops: float
    """Sustained 16-bit fused attention over 1024 tokens, counted without regard to the mask."""
    middle_attention_tflops: float
    """Sustained 16-bit causal attention over 4096 tokens, counting unmasked products only. PyTorch's default kernel;
    sequence parallelism uses another (patrickstar/sequence/choice.py).
    """
    long_attention_tflops: float
    """Like :attr:`middle_attention_tflops`, over 65,536 tokens and more."""
    memory_gbps: float
    """Sustained element-wise operations, 1e9 bytes per second, reads and writes."""
    launch_seconds: float
    """Least time of an operation."""
    float8_speedup: float = 1.0
    """Rate of 8-bit matrix products by that of 16-bit ones."""

    @property
    def memory_bytes_per_second(self) -> float:
        """:attr:`memory_gbps` in bytes per second."""
        return self.memory_gbps * 1e9

    def matmul_flops(self, itemsize: int) -> float:
        """Operations per second of products of matrices whose elements have ``itemsize`` bytes."""
        if itemsize == 1:
            return self.matmul_tflops * self.float8_speedup * 1e12
        return (self.matmul_tflops if itemsize == 2 else self.matmul_float32_tflops) * 1e12

    def attention_flops(self, itemsize: int, length: int, *, causal: bool) -> float:
        """Operations per second of attention over ``length`` tokens, counted without regard to the mask. Causal kernels
        skip half of them in long sequences, few at 1024 tokens. Rates between the measured lengths are linear in the
        length's logarithm.
        """
        at_most = self.matmul_flops(itemsize)
        done = 2 if causal else 1
        short, middle, far = (
            min(tflops * 1e12, at_most)
            for tflops in (self.attention_tflops, self.middle_attention_tflops, self.long_attention_tflops)
        )
        middle, far = max(middle * done, short), max(far * done, short)
        if length <= _MIDDLE_TOKENS:
            return _between(length, _SHORT_TOKENS, short, _MIDDLE_TOKENS, middle)
        return _between(length, _MIDDLE_TOKENS, middle, _LONG_TOKENS, far)


def _between(length: int, low: int, at_low: float, high: int, at_high: float) -> float:
    """Interpolates linearly in the logarithm of ``length``; constant outside ``low`` and ``high``."""
    share = math.log(length / low) / math.log(high / low)
    return at_low + min(max(share, 0.0), 1.0) * (at_high - at_low)


# Times of passes with new parameters in place of old ones, relative to those beside them
# (benchmark/results/cpu-adam-in-place.txt).
_PUT_BETWEEN, _BEHIND = 1.38, 1.23


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """A GPU and its share of a host: own cores, shared host memory (cluster.py)."""

    name: str
    source: str
    """Source of the numbers."""
    gpu: Gpu
    gpu_bytes: int
    """Size of the GPU's memory in bytes."""
    precisions: tuple[str, ...] = PRECISIONS
    """Compute dtypes whose matrix products reach these rates, keys of :data:`PRECISIONS`."""
    upload_gbps: float
    """Host to device, both directions busy, 1e9 bytes per second."""
    download_gbps: float
    """Device to host, both directions busy."""
    transfer_latency_seconds: float
    """Latency of each transfer between host and device."""
    host_adam_gparams: float
    """Adam on float32 states on the host with one GPU's threads, 1e9 parameters per second. Other updates are limited
    by the same memory bandwidth or by :attr:`host_threads`.
    """
    host_threads: int
    """Update threads per GPU: one per core, without the launching core."""
    param_pass: float = 16 / 28
    """Time of phase one (parameters) of a two-phase update, relative to a whole host update. By bytes moved unless
    measured.
    """
    between_pass: float = 32 / 28
    """Time of phase one while clipping acts: values for two factors are computed, and scale-dependent ones again."""
    states_pass: float = 26 / 28
    """Time of phase two (states), likewise."""
    device_adam_gparams: float
    """Adam on float32 states on the GPU, 1e9 parameters per second; other updates use the same bandwidth."""
    socket_memory_gbps: float
    """Memory bandwidth of one socket of the host, reads and writes together."""
    gpus_per_socket: int
    """GPUs of a node that share the memory bandwidth of one socket."""
    nvlink_gather_gbps: float
    """Bus bandwidth of all-gathers within a node: bytes per second that each GPU receives from others."""
    nvlink_scatter_gbps: float
    """Bus bandwidth of reduce-scatters within a node, likewise."""
    disk_gbps: float
    """A node's disk for optimizer states: reads and writes each, while both happen, 1e9 bytes per second."""
    several_gpus_slowdown: float
    """Factor of kernel times when several GPUs train together."""
    synchronize_seconds: float
    """Time from the end of backward until the launching thread continues."""
    launch_ahead_seconds: float
    """Work that the launching thread queues before it waits."""

    def host_params_per_second(self, cost: UpdateCost) -> float:
        """Host updates per second at this cost, limited by memory or by cores. Core times are the measured ones,
        reduced if :attr:`host_adam_gparams` shows faster cores.
        """
        adam = self.host_adam_gparams * 1e9
        core_seconds = min(ADAM.core_seconds, self.host_threads / adam) * cost.core_seconds / ADAM.core_seconds
        return min(adam * ADAM.traffic_bytes / cost.traffic_bytes, self.host_threads / core_seconds)

    def device_params_per_second(self, cost: UpdateCost) -> float:
        """GPU updates per second at this cost, limited by memory."""
        return self.device_adam_gparams * 1e9 * ADAM.traffic_bytes / cost.traffic_bytes

    def update_rates(
        self, on_host: Sequence[tuple[int, UpdateCost]] = (), on_device: Sequence[tuple[int, UpdateCost]] = ()
    ) -> UpdateRates:
        """Returns average rates for (number of parameters, cost) on each side; an empty side gets Adam on float32
        states.
        """
        host, device = on_host or ((1, ADAM),), on_device or ((1, ADAM),)
        numel = sum(count for count, _ in host)
        return UpdateRates(
            host_params_per_second=numel / sum(count / self.host_params_per_second(cost) for count, cost in host),
            device_params_per_second=sum(count for count, _ in device)
            / sum(count / self.device_params_per_second(cost) for count, cost in device),
            host_bytes=sum(count * cost.traffic_bytes for count, cost in host) / numel,
        )

    def passes(self, scale: _C.ExpectedScale, layout: _C.Layout) -> tuple[float, float]:
        """Times of both phases of a two-phase update that expects ``scale``, relative to a whole update."""
        in_place = _C.puts_values_in_place(layout)
        states = self.states_pass * (_BEHIND if in_place else 1.0)
        if scale == _C.ExpectedScale.BETWEEN:
            return self.between_pass * (_PUT_BETWEEN if in_place else 1.0), states
        return self.param_pass, states

    def rates(self, updates: UpdateRates | None = None) -> _C.Rates:
        """Returns these figures as the simulator's rates (csrc/plan/simulator.h), without collectives. ``updates``:
        rates of the optimizer; None: Adam on float32 states.
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
    name=gpus.H200,
    source="one H200 and 16 Xeon cores: link, Adam and matrix products measured, other rates fitted (docs/log.md)",
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
    between_pass=1.4,  # 8.03 B whose clipping acts (h200-first-steps.txt)
    states_pass=0.88,
    device_adam_gparams=123.0,
    # Four GPUs of one socket, both directions: 26.6 GB/s each way per GPU; a single GPU has 50.8.
    socket_memory_gbps=213.0,
    gpus_per_socket=4,
    # Four GPUs, NCCL, shards of 64 MiB.
    nvlink_gather_gbps=305.0,
    nvlink_scatter_gbps=299.0,
    # Not measured: half of the data sheets' write rate of PCIe 4 NVMe disks, since reads happen meanwhile.
    disk_gbps=2.0,
    # Fitted to the kernels of three runs on four GPUs with everything resident (4.31, 10.5 and 21 B: 1.04, 1.04, 1.08).
    # Includes collectives beside kernels, differences of the machine, and products larger than in the fit of one GPU.
    # 4.31 B on one and on four GPUs of that machine: 1.03.
    several_gpus_slowdown=1.05,
    synchronize_seconds=4e-3,
    launch_ahead_seconds=0.1,
)

_SHEET = DATA_SHEETS[gpus.H200]  # the reference of the others
_OF_PCIE_5 = {3: 0.25, 4: 0.5, 5: 1.0}
_OF_FLOAT32 = 0.75  # of the data sheet's rate without tensor cores, as measured on the H200 (67 TFLOPS)


def _of_data_sheet(name: str) -> Machine:
    """An H200's host with another GPU, whose rates are the H200's, scaled by data sheets."""
    sheet = DATA_SHEETS[name]
    arithmetic, memory = sheet.tflops / _SHEET.tflops, sheet.gbps / _SHEET.gbps
    link = H200.upload_gbps * _OF_PCIE_5[sheet.pcie]
    nvlink = sheet.nvlink_gbps / _SHEET.nvlink_gbps
    return dataclasses.replace(
        H200,
        name=name,
        source=f"an H200's measured rates scaled by data sheets ({sheet.tflops:g} TFLOPS, {sheet.gbps:g} GB/s, PCIe "
        f"{sheet.pcie}, {f'NVLink {sheet.nvlink_gbps:g} GB/s' if nvlink else 'no NVLink'}); not measured",
        gpu=Gpu(
            matmul_tflops=H200.gpu.matmul_tflops * arithmetic,
            matmul_float32_tflops=sheet.float32_tflops * _OF_FLOAT32,
            attention_tflops=H200.gpu.attention_tflops * arithmetic,
            middle_attention_tflops=H200.gpu.middle_attention_tflops * arithmetic,
            long_attention_tflops=H200.gpu.long_attention_tflops * arithmetic,
            memory_gbps=H200.gpu.memory_gbps * memory,
            launch_seconds=H200.gpu.launch_seconds,
        ),
        precisions=sheet.precisions,
        gpu_bytes=int(sheet.gib * 2**30),
        upload_gbps=link,
        download_gbps=link,
        device_adam_gparams=H200.device_adam_gparams * memory,
        nvlink_gather_gbps=H200.nvlink_gather_gbps * nvlink if nvlink else link,
        nvlink_scatter_gbps=H200.nvlink_scatter_gbps * nvlink if nvlink else link,
    )


MACHINES = {name: H200 if name == gpus.H200 else _of_data_sheet(name) for name in DATA_SHEETS}


def given_gpu(
    machine: Machine,
    *,
    tflops: float | None = None,
    gbps: float | None = None,
    num_bytes: int | None = None,
    link_gbps: float | None = None,
) -> Machine:
    """Returns ``machine`` with a GPU given by numbers; None keeps a value.

    Args:
        machine: the base.
        tflops: data sheet's dense 16-bit matrix products; the sustained share is the H200's.
        gbps: data sheet's GPU memory bandwidth, 1e9 bytes per second.
        num_bytes: GPU memory size.
        link_gbps: sustained link to the host, each way.
    """
    gpu, told = machine.gpu, []
    values: dict[str, object] = {}
    if tflops is not None:
        share = tflops / _SHEET.tflops
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
        gpu = dataclasses.replace(gpu, memory_gbps=H200.gpu.memory_gbps * gbps / _SHEET.gbps)
        values["device_adam_gparams"] = H200.device_adam_gparams * gbps / _SHEET.gbps
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
    """Returns ``machine`` with another host: cores per GPU and memory bandwidth of a socket, 1e9 bytes per second; None
    keeps a value. Updates are limited by the cores or by their measured share of the bandwidth.
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
    """Returns ``machine`` with a disk of ``gbps`` 1e9 bytes per second, reads and writes each, both at once; None keeps
    it.
    """
    if gbps is None:
        return machine
    source = f"a disk of {gbps:g} GB/s as given; the rest: {machine.source}"
    return dataclasses.replace(machine, source=source, disk_gbps=gbps)


def measured(machine: Machine) -> Machine:
    """Returns ``machine`` with rates measured here: host updates, and with a GPU the link and GPU updates. Takes about
    a second and 0.5 GB of host memory.
    """
    import torch

    from patrickstar.planning import measuring

    what = ["host Adam"]
    values: dict[str, float] = {
        "host_adam_gparams": measuring.measure_host_adam_gparams(),
        "host_threads": measuring.engine_threads().num_threads,
    }
    if torch.cuda.is_available():
        what.append("link")
        values["upload_gbps"], values["download_gbps"] = measuring.measure_link_gbps()
    return dataclasses.replace(
        machine, source=f"{' and '.join(what)} measured on this machine; the rest: {machine.source}", **values
    )
