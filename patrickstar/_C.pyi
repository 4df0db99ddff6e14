"""The core of PatrickStar: chunks, transfers, planner, hybrid Adam, loss scaling (csrc/bind).

Addresses are integers: ``tensor.data_ptr()``, or ``storage._cdata`` for a storage, or ``stream.cuda_stream``. Chunks
and parameters are their indices in the layout. ``tools/make_stub.py --check`` compares this file with the
module.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar, final

from torch.autograd.graph import Node
from typing_extensions import Buffer

class StateError(RuntimeError):
    """A valid call at the wrong time."""

class MemoryBudgetError(RuntimeError):
    """A memory budget is too small."""

class DiskError(RuntimeError):
    """A disk for optimizer states is full, fails, or returns corrupted bytes."""

class SystemError(RuntimeError):
    """The operating system, the CUDA driver or NCCL returned an error."""

class RankMismatch(StateError):
    """Ranks of a group make different calls at the same time, or accumulate gradients of different chunks.
    Raised on all ranks; names each rank's call.
    """

class RankFailure(RuntimeError):
    """Another rank of a group died, raised an exception, or timed out."""

class DType(Enum):
    """Element type of a chunk's arrays."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2

class StateType(Enum):
    """Element type of an optimizer state."""

    FLOAT32 = 0
    LOWER_HALF = 1
    BFLOAT16 = 2
    SIGNED8 = 3
    UNSIGNED8 = 4
    NONE = 5

class MomentumRule(Enum):
    """Optimizers with momentum and no variance (csrc/optim/kernels.h)."""

    LION = 0
    SGD = 1
    NESTEROV = 2

class GradientPlace(Enum):
    """Where a gradient waits for the step (csrc/chunk/layout.h)."""

    OF_PARAM = 0
    OWN = 1

class StateFormat:
    """The types of a parameter's optimizer states (csrc/chunk/layout.h)."""

    def __init__(
        self,
        master: StateType = StateType.FLOAT32,
        momentum: StateType = StateType.FLOAT32,
        variance: StateType = StateType.FLOAT32,
        gradient: GradientPlace = GradientPlace.OF_PARAM,
    ) -> None: ...
    @property
    def master(self) -> StateType: ...
    @property
    def momentum(self) -> StateType: ...
    @property
    def variance(self) -> StateType: ...
    @property
    def gradient(self) -> GradientPlace: ...

class ArrayKind(Enum):
    """The arrays of a chunk."""

    PARAM = 0
    GRAD = 1
    GRAD_SUM = 2
    PARAM_SHARD = 6
    GRAD_SHARD = 7
    MASTER = 3
    MOMENTUM = 4
    VARIANCE = 5
    QUANTIZED = 8

class QuantType(Enum):
    """How the values of a frozen parameter are stored."""

    NONE = 0
    NF4 = 1
    INT8 = 2

class EvictionScope(Enum):
    """Chunk buffers to evict from the device."""

    VALUES = 0
    EVERYTHING = 1

class Mechanism(Enum):
    """Mechanisms that an ablation can switch off (csrc/common/ablation.h)."""

    WHOLE_UPDATES_AHEAD = 0
    TWO_PHASE_UPDATES = 1
    SCALE_INDEPENDENT_VALUES = 2
    DEFERRED_UPDATES = 3
    ORDER_OF_NEED = 4
    RESTING_TIERS_IN_TURN = 5
    ROUND_TRIPS = 6
    RARE_SIZES = 7
    EXACT_DEVICE_BUFFERS = 8

class Tier(Enum):
    """Memory tier."""

    HOST = 0
    DEVICE = 1
    DISK = 2

class Phase(Enum):
    """Half of a step."""

    FORWARD = 0
    BACKWARD = 1

class ArrayUseMode(Enum):
    """How an access uses an array."""

    READ = 0
    WRITE = 1
    FINALISE = 2

class StatePlacement(Enum):
    """Tiers allowed for optimizer states."""

    HYBRID = 0
    HOST = 1

class Tracking(Enum):
    """A forward inside or outside a training step."""

    TRAINING = 0
    UNTRACKED = 1

class Attempt(Enum):
    """Retry rule of a forward that runs out of device memory."""

    FIRST = 0
    AGAIN = 1
    LAST = 2
    ONLY = 3

class StepState(Enum):
    """State of an engine's step (csrc/engine/step_state.h)."""

    READY = 0
    GRADIENTS = 1
    FORWARD = 2
    EVALUATION = 3
    BACKWARD = 4
    UPDATING = 5
    TORN = 6
    ENDING = 7

class HoldUntil(Enum):
    """When a scope's parameters are released."""

    SCOPE_END = 0
    NEXT_EVENT = 1

class WeightDecay(Enum):
    """Adam's L2 term or AdamW's decoupled decay."""

    L2 = 0
    DECOUPLED = 1

class BiasCorrection(Enum):
    """Adam's moments are divided by 1 - beta^step before an update (APPLIED), or not."""

    APPLIED = 0
    NONE = 1

class Track(Enum):
    """Track of a span in a trace."""

    STALL = 0
    UPLOAD = 1
    DOWNLOAD = 2
    GATHER = 3
    SCATTER = 4
    HOST_ADAM = 5
    HOST_STATES = 6
    HOST_OPEN = 7
    DEVICE_ADAM = 8
    DISK_READ = 9
    DISK_ADAM = 10
    DISK_WRITE = 11
    ROUND_TRIP = 12

class StallCause(Enum):
    """Cause of a stall of the compute queue."""

    NONE = 0
    UPLOAD = 1
    DOWNLOAD = 2
    HOST_UPDATE = 3
    HOST_WORK = 4
    ROOM = 5
    NORM = 6
    COLLECTIVE = 7

class SpanOwner(Enum):
    """The step that a span belongs to."""

    THIS_STEP = 0
    STEP_BEFORE = 1

class StepOutcome(Enum):
    """How a step ended."""

    APPLIED = 0
    SKIPPED = 1

UNLIMITED: int
"""Limit of an unlimited budget, in bytes."""
CUDA_SLACK_RATIO: float
"""Share of a device limit that PyTorch's CUDA allocator needs for rounding and fragmentation."""
PREDICTION_TOLERANCE: float
"""Relative difference below which two predicted steps count as equal."""

def build_info() -> dict[str, Any]:
    """Versions this module was compiled with: ``compiler``, ``cplusplus``; ``cuda`` and ``nccl``, or None. ``torch``:
    version that the attached shim was compiled with, or None.
    """

def attach_torch(path: str) -> None:
    """Loads the shim at ``path``, which must match the imported PyTorch. Raises StateError if another one is
    attached.
    """

def num_available_cpus() -> int:
    """Processors this process may run on."""

def allowed_cpus() -> list[int]:
    """The calling thread's affinity mask, ascending."""

def parse_cpu_list(text: str) -> list[int]:
    """Parses the kernel's CPU list notation, ``"0-3,8,10-11"``, up to the first unparsable part."""

def format_cpu_list(cpus: Sequence[int]) -> str:
    """Formats CPUs in the kernel's list notation."""

class CpuTopology:
    """The CPUs that a process may use."""

    @property
    def cpus(self) -> list[tuple[int, int, int]]:
        """(id, core, NUMA node), by ascending id; a core is named by its lowest CPU."""

    @property
    def quota_cpus(self) -> float:
        """CPU quota of the cgroup; infinite without one."""

def read_cpu_topology(cpus: Sequence[int], root: str = "") -> CpuTopology:
    """Reads these CPUs' topology from ``/sys`` and ``/proc`` below ``root``."""

class Affinity(Enum):
    """Pinning of worker threads."""

    PINNED = 0
    FREE = 1

class LaunchingCore(Enum):
    """Use of the core on which the launching thread runs."""

    RESERVED = 0
    SHARED = 1

class HostThreadOptions:
    """Options of the host's compute threads; all fields have defaults."""

    num_threads: int
    """Including the thread that calls the pool; 0: one for each CPU."""
    affinity: Affinity
    launching_core: LaunchingCore
    sharing_index: int
    """Index of this process among those that may use the same CPUs."""
    num_sharing: int
    """Number of these processes."""
    def __init__(self) -> None: ...

class ThreadPriority(Enum):
    """Priority of a thread; for good, since only a privileged process may raise one."""

    USUAL = 0
    BELOW_LAUNCHES = 1

class HostThreads:
    """Threads that compute on the host."""

    @property
    def num_threads(self) -> int: ...
    @property
    def worker_cpus(self) -> list[int]:
        """One CPU per worker, in order; further workers are not pinned."""

    @property
    def nodes(self) -> list[int]:
        """NUMA nodes on which the threads may run, ascending."""

    @property
    def priority(self) -> ThreadPriority: ...

def choose_host_threads(topology: CpuTopology, options: HostThreadOptions) -> HostThreads:
    """Chooses number and CPUs of the compute threads. Raises ValueError for impossible options."""

class Priority(Enum):
    """Workers of a pool take urgent loops first."""

    URGENT = 0
    BACKGROUND = 1

class ThreadPool:
    """Threads that share the work of loops; the calling thread is one of them, and never pinned."""

    def __init__(
        self,
        num_threads: int,
        worker_cpus: Sequence[int] = [],
        priority: ThreadPriority = ThreadPriority.USUAL,
    ) -> None: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def num_urgent(self) -> int:
        """Number of running urgent loops."""
    @property
    def pinned_cpus(self) -> list[int]:
        """CPUs on which workers were actually pinned."""
    def parallel_for(
        self, size: int, grain: int, fn: Callable[[int, int], object], priority: Priority = Priority.URGENT
    ) -> None:
        """Calls ``fn(begin, end)`` on disjoint ranges that cover [0, size). For tests."""

class HostEvent:
    """Completion of host work."""

    def __init__(self) -> None: ...
    def complete(self) -> None: ...
    def wait(self) -> None:
        """Re-raises the work's error."""
    def settle(self) -> None: ...
    @property
    def is_over(self) -> bool: ...

class WorkQueue:
    """A queue of tasks with a thread of its own. For tests."""

    def __init__(self) -> None: ...
    def submit(
        self, failure: str = "", name: str = "", after: HostEvent | None = None, rank: int | None = None
    ) -> HostEvent:
        """A task that waits for ``after``, then raises SystemError(``failure``) or records ``name``.

        With a ``rank``, ready tasks run in the order of their ranks; the task is ready when ``after`` is over.
        """

    @property
    def names(self) -> list[str]:
        """Names of finished tasks, in the order in which they ran."""

def crc32c(data: Buffer, crc: int = 0) -> int:
    """CRC-32C of the bytes of a contiguous buffer, after those of checksum ``crc`` (common/crc32c.h)."""

def joined_crc32c(first: int, second: int, second_bytes: int) -> int:
    """CRC-32C of bytes that are followed by ``second_bytes`` others, from both checksums (common/crc32c.h)."""

def crc32c_portable(data: Buffer, crc: int = 0) -> int:
    """``crc32c`` by table lookup, on any processor."""

def nodes_to_interleave(nodes: Sequence[int]) -> list[int]:
    """``nodes``, if there are several and this process may choose among them; else none."""

def interleave_pages(data: int, num_bytes: int, nodes: Sequence[int]) -> bool:
    """Spreads untouched pages at address ``data`` over NUMA nodes. False if the system refused."""

def leave_out(mechanisms: Sequence[Mechanism]) -> None:
    """Switches these mechanisms off in engines built from now on, and all others on."""

def state_bytes(type: StateType, numel: int) -> int:
    """Bytes of an optimizer state of ``numel`` elements, block scales included."""

def check_transition(from_: str, to: str, /) -> None:
    """Raises StateError for a forbidden transition of a parameter."""

def shared_budgets(cuda_device: int) -> tuple[int, int] | None:
    """Budgets (device bytes, host bytes) of the engines open on a device; None if there are none."""

def working_set_bytes(layout: Layout, module_params: Sequence[Sequence[int]]) -> int:
    """Least device memory for chunk buffers: the largest module's chunks and a gradient."""

class PlanProblem:
    """A timeline, the costs of its arrays and limits of memory (csrc/plan/planner.h).

    Args:
        accesses: ``{"phase", "uses": [(chunk, kind, mode)], "activation_peak_bytes"}`` each.
        costs: ``{(chunk, kind): (num_bytes, fetch_bytes, evict_bytes, finalise_bytes, survives_step)}``.
        idle_bytes: by access, device buffers that idle for another access; or empty.
        round_trip_costs: by chunk, fields of RoundTripCost; or empty.
    """

    def __init__(
        self,
        accesses: list[dict[str, Any]],
        costs: Mapping[tuple[int, ArrayKind], tuple[int, int, int, int, bool]],
        *,
        limit_bytes: int,
        least_activation_bytes: int = 0,
        fixed_bytes: int = 0,
        prefetch_bytes: int = 0,
        idle_bytes: Sequence[int] = [],
        gradient_room_bytes: int = 9223372036854775807,
        round_trip_costs: Sequence[tuple[int, int, int]] = [],
    ) -> None: ...

def make_plan(problem: PlanProblem) -> dict[str, Any]:
    """Plans a timeline."""

class Backwards(Enum):
    """Number of backwards per step (csrc/plan/chunk_bytes.h)."""

    ONE = 0
    """Or unknown."""
    SEVERAL = 1
    """Gradients accumulate."""

class DeviceBudget:
    """Device memory available to the planner (csrc/plan/placement.h)."""

    limit_bytes: int
    follows_activations: bool
    prefetches_far: bool
    margin_use_ratio: float
    keeps_gradients: bool
    backwards: Backwards
    gradient_activation_bytes: int
    host_limit_bytes: int
    gradient_room_bytes: int
    def __init__(self) -> None: ...

def gradient_room_bytes(layout: Layout, resting_tiers: Sequence[Tier], host_limit_bytes: int) -> int:
    """Host bytes that these resting tiers leave to gradients without a fixed place; UNLIMITED if all have one."""

def round_trip_costs(layout: Layout) -> list[tuple[int, int, int]]:
    """By chunk, bytes of a GPU round-trip update: up, down, and the part of up that is skipped if the device has the
    compute value.
    """

def chunks_that_move_in(layout: Layout, count: int, states_on_device: Sequence[bool]) -> list[int]:
    """Chunks among the first ``count`` whose states move to the device, beside the states there."""

def puts_values_in_place(layout: Layout) -> bool:
    """True if speculative updates of any chunk are in place."""

def reserved_gradient_bytes(layout: Layout) -> int:
    """Host bytes that speculative updates leave to downloading gradients."""

def initial_placement(
    layout: Layout,
    host_limit_bytes: int,
    device_room_bytes: int,
    backwards: Backwards = Backwards.ONE,
    disk_limit_bytes: int = 0,
) -> tuple[list[Tier], int, int]:
    """Resting tiers by chunk before activation memory is known, host bytes, disk bytes. More host bytes than the limit:
    all tiers together are too small.
    """

def later_resting_tiers(
    layout: Layout,
    first_resting_tiers: Sequence[Tier],
    states_on_device: Sequence[bool],
    host_limit_bytes: int,
    backwards: Backwards = Backwards.ONE,
) -> list[Tier]:
    """Resting tiers by chunk once activation memory is known. Disk states move to the host as far as it has room."""

def bytes_on_host(layout: Layout, resting_tiers: Sequence[Tier], backwards: Backwards = Backwards.ONE) -> int:
    """Host bytes of chunks with these resting tiers, without the buffer sets of the disk."""

def disk_set_bytes(layout: Layout, resting_tiers: Sequence[Tier]) -> int:
    """Host bytes of the buffer sets through which disk states pass."""

class Ahead(Enum):
    """Part of a chunk's update that runs before the norm is known."""

    NOTHING = 0
    PARAM = 1
    """New parameters; states follow after the norm."""
    EVERYTHING = 2

def choose_ahead(layout: Layout, resting_tiers: Sequence[Tier], room_bytes: int) -> list[Ahead]:
    """By chunk, the part of its update that ``room_bytes`` of host memory allow before the norm."""

def host_peak_bytes(
    layout: Layout,
    first_resting_tiers: Sequence[Tier],
    states_on_device: Sequence[bool],
    host_limit_bytes: int,
    updates_ahead: bool,
    backwards: Backwards = Backwards.ONE,
) -> int:
    """Peak host memory that a rank maps (csrc/plan/host_demand.h)."""

def leaving_gradient_bytes(
    layout: Layout, accesses: list[dict[str, Any]], states_on_device: Sequence[bool], budget: DeviceBudget
) -> int:
    """Bytes of gradients that wait for the norm on the host, for lack of device memory."""

class UseCall(Enum):
    """A call that reports parameter uses (csrc/plan/played_uses.h)."""

    OPEN_SCOPE = 0
    CLOSE_SCOPE = 1
    TOUCH = 2
    END_FORWARD = 3
    ENTER_BACKWARD = 4
    ACCUMULATE = 5

def play_uses(
    layout: Layout,
    states_on_device: Sequence[bool],
    uses: Sequence[tuple[UseCall, Sequence[int], HoldUntil | None, int, int]],
) -> tuple[list[dict[str, Any]], list[int], int]:
    """The timeline that an engine would record of these uses.

    Args:
        uses: (call, parameters, hold of a scope, begin and end tick of the use whose backward begins) each.

    Returns:
        The timeline, by use the current access after it (-1: none), and the most bytes held at an access beside its
        own parameters.
    """

def num_device_state_chunks(layout: Layout, accesses: list[dict[str, Any]], budget: DeviceBudget) -> int:
    """Number of chunks, from the first on, with states on the device once activation memory is known."""

def merged_timelines(a: list[dict[str, Any]], b: list[dict[str, Any]], num_chunks: int) -> list[dict[str, Any]]:
    """The accesses of both in one timeline, after an exchange of one of them (plan/timeline_merge.h)."""

def pose_problem(
    layout: Layout, accesses: list[dict[str, Any]], states_on_device: Sequence[bool], budget: DeviceBudget
) -> dict[str, Any]:
    """The planner's problem for a timeline: the arguments of ``PlanProblem``."""

class Recipe(Enum):
    """Way to update a chunk (csrc/plan/recipe.h)."""

    NEVER = 0
    HOST_COMMITTED = 1
    """Optimizer-in-backward."""
    ROUND_TRIP = 2
    """GPU round trip of states that rest on the host."""
    HOST_AHEAD = 3
    """Speculative, in backward; rolled back if clipping changes the update."""
    HOST_TWO_PASSES_AHEAD = 4
    """Two phases: new parameters in backward, states after the norm."""
    HOST_TWO_PASSES = 5
    HOST = 6
    DISK_COMMITTED = 7
    DISK = 8
    DEVICE_COMMITTED = 9
    DEVICE = 10
    @property
    def states(self) -> Tier:
        """Resting tier of the chunk's optimizer states."""
    @property
    def starts_in_backward(self) -> bool:
        """True where it begins before the norm of all gradients is known."""

class Lane(Enum):
    """The queue or worker that is busy with an instruction (csrc/plan/ops.h)."""

    LAUNCH = 0
    COMPUTE = 1
    UPLOAD = 2
    DOWNLOAD = 3
    GATHER = 4
    SCATTER = 5
    HOST = 6
    DISK_READ = 7
    DISK_HOST = 8
    DISK_WRITE = 9
    ROUND_TRIP = 10

class UpdateStart(Enum):
    """Earliest start of host updates."""

    AFTER_NORM = 0
    SPECULATIVE = 1
    """In backward, as far as new values fit memory; rolled back if clipping changes the update."""
    COMMITTED = 2
    """Optimizer-in-backward."""

def possible_start(wanted: UpdateStart, backwards: Backwards, can_roll_back: bool) -> UpdateStart:
    """The earliest update start that a step allows."""

class ExpectedScale(Enum):
    """Gradient scale that speculative updates assume."""

    EXACT = 0
    """One value: clipping does not act."""
    BETWEEN = 1
    """A range: clipping acts."""

def cautious(rates: Rates) -> Rates:
    """Rates by which plans are compared: transfers and updates take longer."""

def earliest_recipe(
    trainable: bool,
    dtype: DType,
    states: Tier,
    start: UpdateStart,
    ahead: Ahead = Ahead.NOTHING,
    scale: ExpectedScale = ExpectedScale.EXACT,
) -> Recipe:
    """The earliest-starting recipe that fits memory."""

class Rates:
    """Rates of a machine (csrc/plan/simulator.h)."""

    upload_gbps: float
    download_gbps: float
    transfer_latency_seconds: float
    gather_gbps: float
    scatter_gbps: float
    collective_latency_seconds: float
    host_adam_params_per_second: float
    param_pass: float
    states_pass: float
    device_adam_params_per_second: float
    synchronize_seconds: float
    launch_ahead_seconds: float
    device_memory_gbps: float
    disk_read_gbps: float
    disk_write_gbps: float
    def __init__(self) -> None: ...

class StepShape:
    """Properties of a step that its plan does not have (csrc/plan/step_shape.h).

    Args:
        compute_seconds: by access.
        updates, numels, disk_bytes, dequantized_bytes: by chunk.
        activations: by access, bytes offloaded, fetched, and needed of those fetched; empty: none.
        chunk_ranks: by chunk, number of ranks that share it; empty: all.
    """

    def __init__(
        self,
        *,
        compute_seconds: Sequence[float],
        updates: Sequence[Recipe],
        numels: Sequence[int] = [],
        num_ranks: int = 1,
        activations: Sequence[Sequence[int]] = [],
        disk_bytes: Sequence[int] = [],
        dequantized_bytes: Sequence[int] = [],
        chunk_ranks: Sequence[int] = [],
    ) -> None: ...

def simulate(problem: PlanProblem, plan: dict[str, Any], rates: Rates, shape: StepShape) -> dict[str, Any]:
    """Simulates a plan's steady step.

    Returns:
        Seconds, busy seconds of each queue, ``stall_seconds`` by cause, and bytes.
    """

def play_program(problem: PlanProblem, plan: dict[str, Any], rates: Rates, shape: StepShape) -> list[dict[str, Any]]:
    """Instructions of ``simulate``'s step, in issue order.

    Each is ``{"op": str, "lane": Lane, "access": int | None, "chunk": int | None, "kind": ArrayKind | None, "amount",
    "begin_seconds", "seconds"}``; amounts are bytes, or parameters for updates.
    """

def choose_plan(problem: PlanProblem, rates: Rates, shape: StepShape, round_trip_bytes: int = 0) -> dict[str, Any]:
    """The plan with the shortest simulated step, over prefetch room, deferred updates and GPU round trips.

    Returns:
        ``plan`` as from ``make_plan``; its ``prefetch_bytes``; ``predicted`` as from ``simulate``; ``updates`` by
        chunk, the given ones with some deferred or made round trips.
    """

def choose_step(
    layout: Layout,
    accesses: list[dict[str, Any]],
    states_on_device: Sequence[bool],
    budget: DeviceBudget,
    rates: Rates,
    shape: StepShape,
    start: UpdateStart,
) -> dict[str, Any]:
    """``choose_plan`` for a layout, as by an engine with these measured times. Returns its result and ``problem``.
    The layout sets numels, ranks and bytes on the disk of ``shape``. GPU round trips are allowed with
    optimizer-in-backward only.
    """

def set_interrupt_delivery(function: Callable[[], object]) -> None:
    """Sets the function that module and gradient hooks call while an interrupt is waiting; it may raise."""

def set_interrupt_waiting(waiting: bool) -> None:
    """Sets or clears the waiting interrupt."""

def example_messages(num_chunks: int) -> dict[str, bytes]:
    """One example of each message that ranks exchange in a step, by kind."""

def read_message(kind: str, message: bytes, num_chunks: int) -> None:
    """Parses a message as a rank does. Raises StateError if it is not of that kind."""

def show_exactly(num_bytes: int) -> str:
    """The text that :func:`patrickstar.sizes.show_exactly` returns."""

def show_enough(num_bytes: int) -> str:
    """The text of :func:`patrickstar.sizes.enough_size`, then the bytes in brackets where they differ."""

def agreed_vote(votes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The values that all ranks plan with: ``can_measure``, ``has_plan``, ``updates`` by chunk, and ``rates`` (or None)
    with ``compute_seconds`` and ``activations`` by access.
    """

def undisturbed_times(earlier: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Times of ``Runtime.step_times`` after a second measurement: the faster rates and shorter times; the later ones of
    other accesses.
    """

class HostAllocations:
    """Context in which CPU tensors count as host memory, not as the simulated device's."""

    def __init__(self) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, type: object, error: object, traceback: object) -> None: ...

class DiskIo(Enum):
    """I/O interface of a disk (csrc/memory/disk_channel.h)."""

    AUTO = 0
    URING = 1
    THREADS = 2

class DiskFaults:
    """Disk faults that a test injects (csrc/memory/disk_file.h). A count of -1: never."""

    reads_before_error: int
    writes_before_error: int
    error_number: int
    reads_before_flip: int
    seconds_per_piece: float
    cuts_short: bool
    is_plain: bool
    def __init__(self) -> None: ...

class DiskFile:
    """A file as memory for arrays (csrc/memory/disk_file.h). Ranges are (address, offset in the file, bytes)."""

    def __init__(
        self,
        folder: str,
        num_bytes: int,
        io: DiskIo = DiskIo.AUTO,
        faults: DiskFaults | None = None,
        registered: Sequence[tuple[int, int]] = [],
    ) -> None: ...
    def read(self, ranges: Sequence[tuple[int, int, int]]) -> list[int]: ...
    def write(self, ranges: Sequence[tuple[int, int, int]]) -> list[int]: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def is_direct(self) -> bool: ...
    @property
    def how(self) -> str: ...

class DiskOptions:
    """A disk for optimizer states (csrc/engine/disk_states.h)."""

    folder: str
    limit_bytes: int
    """0: no disk."""
    io: DiskIo
    def __init__(self) -> None: ...

class DeviceBufferFit(Enum):
    """Device buffers that serve a request: larger ones too, or exact ones."""

    LOOSE = 0
    EXACT = 1

class DeviceBufferPool:
    """Pool of device buffers (memory/device_buffer_pool.h), for tests: addresses without memory."""

    def __init__(self, limit_bytes: int, max_waste_ratio: float) -> None: ...
    def acquire(self, num_bytes: int, fit: DeviceBufferFit = DeviceBufferFit.LOOSE) -> int:
        """The buffer's address; 0: no room."""
    def release(self, address: int) -> None: ...
    def trim(self, num_bytes: int) -> int: ...
    @property
    def num_allocations(self) -> int: ...
    @property
    def used_bytes(self) -> int: ...
    @property
    def idle_bytes(self) -> int: ...

class HostArena:
    """Host memory for chunk buffers, not pinned."""

    def __init__(
        self, limit_bytes: int, prepares: bool = False, nodes: Sequence[int] = [], num_failures: int = 0
    ) -> None: ...
    def reserve(self, sizes: Sequence[int], /) -> None: ...
    def prepare_ahead(self) -> None: ...
    def release_reserved(self) -> None: ...
    def keep_regions(self, kept: KeptRegions, /) -> None: ...
    def reuse_regions(self, kept: KeptRegions, /) -> None: ...
    def release_reused(self) -> None: ...
    def allocate(self, num_bytes: int, /) -> int: ...
    def allocate_prepared(self, num_bytes: int, /) -> int: ...
    def free(self, data: int, /) -> None: ...
    def trim(self) -> None: ...
    @property
    def is_preparing(self) -> bool: ...
    @property
    def used_bytes(self) -> int: ...
    @property
    def mapped_bytes(self) -> int: ...
    @property
    def peak_mapped_bytes(self) -> int: ...
    @property
    def unreserved_bytes(self) -> int: ...

class HostMapping:
    """Untouched host memory of huge pages, freed with the object."""

    def __init__(self, num_bytes: int) -> None: ...
    @property
    def address(self) -> int: ...

class DeviceMemory:
    """Device memory outside all engines, for values on their way from an ending engine's core to the next one.

    Use it on the current stream, and release it when that work is over.

    Args:
        cuda_device: index of the GPU; -1: the simulated device, which does not count it.
        num_bytes: size.

    Raises:
        MemoryBudgetError: no room.
    """

    def __init__(self, cuda_device: int, num_bytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...

class KeptRegions:
    """Prepared host memory, kept for the next engine. The unused rest is unmapped with the object."""

    def __init__(self) -> None: ...
    @property
    def num_bytes(self) -> int: ...

class ChunkRanks:
    """Ranks of an engine that share a chunk."""

    def __init__(self) -> None:
        """All ranks of the engine."""

    @staticmethod
    def of_parts(count: int) -> ChunkRanks:
        """Ranks of the same part of a parameter; rank r has part ``r % count``."""

class Layout:
    """Chunk and offset of each parameter."""

    @staticmethod
    def pack(
        numels: Sequence[int],
        dtypes: Sequence[DType],
        trainable: Sequence[bool],
        chunk_numel: int,
        num_ranks: int = 1,
        rank: int = 0,
        states: Sequence[StateFormat] = [],
        quantization: Sequence[QuantType] = [],
        ranks: Sequence[ChunkRanks] = [],
    ) -> Layout:
        """``states``, ``quantization`` and ``ranks`` are by parameter; empty: float32, not quantised, shared by all
        ranks.
        """

    @property
    def num_chunks(self) -> int: ...
    @property
    def chunk_numel(self) -> int: ...
    @property
    def num_ranks(self) -> int: ...
    def placement(self, param: int, /) -> tuple[int, int]:
        """(chunk, offset in elements)."""

    def shard_of(self, param: int, /) -> tuple[int, int, int]:
        """Part in this rank's shard: (first element of the parameter, number of elements, offset in the shard)."""

    def train(self, chunk: int, /) -> None:
        """Makes the chunk and its parameters trainable."""

    def chunk(self, chunk: int, /) -> dict[str, Any]:
        """``numel``, ``shard_numel``, ``num_ranks``, ``dtype``, ``trainable``, ``states``, ``quantization``,
        ``leading_state``, ``params``; and bytes of this rank's shard: ``param_bytes``, ``resting_tier_bytes`` (with
        optimizer states), ``disk_bytes``, ``new_value_bytes`` (least host memory of a speculative update).
        """

class DelayOptions:
    """A simulated link, and random delays."""

    bytes_per_second: float
    latency_seconds: float
    max_random_seconds: float
    seed: int

    def __init__(self) -> None: ...

@final
class DeviceOptions:
    """Options shared by the engines of one process."""

    cuda_device: int
    """-1: the simulated device."""
    device_limit_bytes: int
    host_limit_bytes: int
    limit_rounding_bytes: int
    left_by_activations_bytes: int
    """Activation memory that the simulated device lends to gradients; for tests."""
    follows_activations: bool
    """Simulated device, for tests. True: chunk buffers get the memory left by activations at each access. False: the
    memory left at the activation peak, as on CUDA, and device buffers may exceed requests.
    """
    host_threads: HostThreadOptions
    delays: DelayOptions
    def __init__(self) -> None: ...

@final
class ResidencyOptions:
    """Placement of optimizer states on the device."""

    warmup_payload_ratio: float
    margin_use_ratio: float
    chunk_buffer_limit_bytes: int
    """Limit of on-demand fetches, for tests with little GPU memory."""
    state_placement: StatePlacement
    backwards: Backwards
    def __init__(self) -> None: ...

@final
class EngineOptions:
    """Options of a Runtime; all fields have defaults."""

    device: DeviceOptions
    residency: ResidencyOptions
    disk: DiskOptions
    ample_limit_bytes: int
    ample_extra_bytes: int
    update_start: UpdateStart
    param_shapes: list[list[int]]
    def __init__(self) -> None: ...
    def set_matrix_rule(self, function: Callable[[int, int, int, int, int], object], /) -> None:
        """Sets ``function(rows, columns, direction, momentum, master)`` as the matrix rule
        (csrc/optim/matrix_rule.h).
        """

    def set_compute_format(self, function: Callable[[list[int], DType, int], object], /) -> None:
        """Sets ``function(shape, dtype, values)`` as the compute format (csrc/optim/compute_format.h)."""

class SgdMomentum(Enum):
    """SGD's momentum rule (csrc/engine/group_options.h)."""

    HEAVY_BALL = 0
    NESTEROV = 1

class AdamOptions:
    """Options of an Adam or AdamW parameter group in one step."""

    def __init__(
        self,
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        mode: WeightDecay,
        bias_correction: BiasCorrection = BiasCorrection.APPLIED,
    ) -> None: ...

class LionOptions:
    """Options of a Lion parameter group in one step."""

    def __init__(self, *, lr: float, beta1: float, beta2: float, weight_decay: float) -> None: ...

class SgdOptions:
    """Options of a parameter group of SGD with momentum in one step."""

    def __init__(
        self,
        *,
        lr: float,
        momentum: float,
        dampening: float,
        weight_decay: float,
        mode: SgdMomentum = SgdMomentum.HEAVY_BALL,
    ) -> None: ...

class UseListener:
    """Receives parameter uses (csrc/engine/use_listener.h). Python may inherit from it."""

    def __init__(self) -> None: ...
    def open_scope(self, params: Sequence[int], until: HoldUntil, /) -> int: ...
    def close_scope(self) -> None: ...
    def tick(self) -> int: ...
    def touch(self, params: Sequence[int], /) -> int: ...
    def enter_backward(self, begin: int, end: int, params: Sequence[int], /) -> None: ...

@final
class BackwardEntry:
    """A pre-hook of an autograd node (csrc/bind/use_observer.h)."""

    def __call__(self, gradient: object) -> None: ...

@final
class UseObserver:
    """Turns parameter uses into acquire and release (csrc/bind/use_observer.h)."""

    def __init__(self, listener: UseListener, find_nodes: Callable[[Any], list[Node]]) -> None: ...
    def forget_scopes(self) -> None: ...
    def touch(self, params: Sequence[int], /) -> None: ...
    @property
    def is_between_calls(self) -> bool: ...
    def was_read(self, param: int, /) -> bool: ...
    def note_read(self, params: Sequence[int], /) -> None: ...
    def forget_reads(self) -> None: ...

@final
class ModuleHook:
    """The forward hooks of one module (csrc/bind/use_observer.h)."""

    def __init__(
        self, observer: UseObserver | None = None, params: Sequence[int] = [], until: HoldUntil = HoldUntil.SCOPE_END
    ) -> None: ...
    def before_forward(self, module: object, inputs: object) -> None: ...
    def after_forward(self, module: object, inputs: object, output: object) -> None: ...
    @property
    def params(self) -> list[int]: ...
    @property
    def touched(self) -> list[int]: ...
    @property
    def until(self) -> HoldUntil: ...
    def finish_learning(self, params: Sequence[int], /) -> None: ...

class Way(Enum):
    """How a function uses a parameter's memory (csrc/bind/torch_function.h)."""

    LOOK = 0
    READ = 1
    READ_ONCE = 2
    ALIAS = 3
    MAY_WRITE = 4

def torch_function(
    *,
    types: tuple[type, ...],
    way_of: Callable[[Callable[..., Any]], Way],
    write: Callable[..., Any],
    refuse: Callable[..., Any],
    as_view: Callable[..., Any],
) -> Callable[..., Any]:
    """Makes a ``__torch_function__`` (csrc/bind/torch_function.h)."""

@final
class GradientHook:
    """A parameter's post-accumulate hook (csrc/bind/gradient_hook.h)."""

    def __init__(
        self,
        *,
        runtime: Runtime,
        param: int,
        strides: tuple[int, ...],
        take: Callable[[Any], Any],
        rearrange: Callable[[Any, Any], Any],
    ) -> None: ...
    def __call__(self, param: object, /) -> None: ...
    @property
    def param(self) -> int: ...
    @property
    def has_accumulated(self) -> bool: ...

@final
class Collectives:
    """Communicators of an engine's ranks (csrc/engine/collectives.h)."""

    def __init__(
        self,
        gather: collective.Communicator,
        scatter: collective.Communicator,
        control: collective.ControlGroup,
        part_gather: collective.Communicator | None = None,
        part_scatter: collective.Communicator | None = None,
    ) -> None: ...
    def check_same_plan(self, fingerprint: int) -> None:
        """Raises StateError on every rank unless all fingerprints agree."""

    @property
    def num_ranks(self) -> int: ...

class Runtime(UseListener):
    """The core's façade (csrc/engine/runtime.h; calls of a step: csrc/engine/step_course.h)."""

    def __init__(
        self,
        layout: Layout,
        param_names: Sequence[str],
        module_params: Sequence[Sequence[int]],
        options: EngineOptions,
        collectives: Collectives | None = None,
        kept: KeptRegions | None = None,
    ) -> None: ...
    def keep_memory(self) -> KeptRegions: ...
    def bind_storage(self, chunk: int, storage: int, /) -> None: ...
    def seal_storage(self, chunk: int, /) -> None: ...
    def write_values(self, param: int, kind: ArrayKind, values: int, where: Tier, /) -> None: ...
    def read_values(self, param: int, kind: ArrayKind, values: int, /) -> None: ...
    def read_own_values(self, param: int, kind: ArrayKind, values: int, /) -> None: ...
    def rows_are_on_host(self, param: int) -> bool:
        """True in a forward without gradients if the device has no value (engine/value_rows.h)."""
    def copy_rows(self, param: int, rows: Sequence[int], row_numel: int, to: int, /) -> None: ...
    def stored_type(self, param: int, kind: ArrayKind) -> StateType:
        """Type of elements that ``read_stored`` reads."""

    def read_stored(self, ranges: Sequence[tuple[int, ArrayKind, int, int, int]]) -> list[int]:
        """Reads bytes of this rank's parts into memory: [(param, kind, begin, end, address)], all in bytes of
        ``stored_type``; the CRC-32C of each. An 8-bit state is its codes and then its float32 scales.
        """

    def read_ranges(
        self, ranges: Sequence[tuple[int, ArrayKind, int, int, int, int]], files: Sequence[tuple[int, int]], /
    ) -> None:
        """Reads this rank's values. Ranges are (parameter, kind, begin, end, file or -1, offset or address), files
        (descriptor, bytes).
        """

    def write_ranges(
        self, ranges: Sequence[tuple[int, ArrayKind, int, int, int, int]], files: Sequence[tuple[int, int]], /
    ) -> None: ...
    def stored_bytes(self, param: int) -> list[int]:
        """Bytes per element of each array of the parameter; empty: its arrays cannot be copied as stored."""

    def is_stored_on_device(self, param: int) -> bool: ...
    def stored_on_device(self, param: int, /) -> list[int]:
        """Addresses of this rank's part of each stored array, for the current stream."""

    def write_stored(self, param: int, ranges: Sequence[tuple[int, int, int, int, Tier]], /) -> None:
        """Writes elements of this rank's part: [(array, begin, end, address, tier)], arrays as in
        stored_on_device().
        """

    def drop_derivable(self) -> None:
        """Frees device buffers whose values can be made again from other arrays or ranks."""

    def return_cached(self) -> None:
        """Empties the allocator's cache, which counts as activation memory on CUDA."""

    def copy_on_device(self, to: int, from_: int, num_bytes: int) -> None: ...
    def leave_stored(self, chunk: int) -> None:
        """Frees all memory of a chunk whose values were copied elsewhere, before close()."""

    def set_aside(
        self, ranges: Sequence[tuple[int, ArrayKind, int, int, int, int]], /
    ) -> tuple[list[int], KeptRegions, KeptRegions]:
        """Addresses of the ranges, the memory that holds them, and all other memory."""

    def take_host_memory(self, num_bytes: int) -> int:
        """Address of memory until give_back_host_memory(), or 0 (engine/host_loans.h)."""

    def give_back_host_memory(self, address: int, /) -> None: ...
    def read_gradient(self, param: int, values: int, /) -> None: ...
    def write_gradient(self, param: int, values: int, where: Tier, /) -> None: ...
    def set_round_trips(self, chunks: Sequence[bool], piece_numel: int = 16777216) -> None:
        """For tests: by chunk, updates by GPU round trip until the next measured plan, in pieces of ``piece_numel``
        elements.
        """

    def adopt_timeline(self, accesses: list[dict[str, Any]], times: dict[str, Any] | None = None) -> None:
        """Plans the first step from an earlier run's ``timeline`` and ``step_times``."""

    def ask_for_step_so_far(self) -> None:
        """Traces the next step for :meth:`step_so_far`."""

    def step_so_far(self) -> tuple[list[dict[str, Any]], dict[str, Any], list[float]] | None:
        """Timeline, times and stalls of the running step, before its ``apply_step``. Host updates have no rate.

        None if :meth:`ask_for_step_so_far` was not called before the step. Waits for the device.
        """

    def expect_step(self, accesses: list[dict[str, Any]], times: dict[str, Any] | None = None) -> None:
        """Places states and plans the next step for this timeline, before ``apply_step``. After the first step states
        only move to the device. ``times``: estimates.
        """

    def make_states(self, chunks: Sequence[int], /) -> None:
        """Makes optimizer states of frozen chunks: all, or none if MemoryBudgetError is raised."""

    def discard_states(self, chunks: Sequence[int], /) -> None: ...
    def train(self, params: Sequence[int], /) -> None:
        """Makes frozen parameters trainable; their chunks must have states."""

    def release_chunk(self, chunk: int, /) -> None: ...
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...
    @property
    def step_state(self) -> StepState: ...
    @property
    def num_committed(self) -> int: ...
    @property
    def replays(self) -> bool:
        """True while the running step follows its plan."""

    @property
    def num_pressure_evictions(self) -> int: ...
    def begin_forward(self, tracking: Tracking, attempt: Attempt, /) -> None: ...
    def end_forward(self) -> None: ...
    def begin_backward(
        self, expected_groups: Sequence[AdamOptions | LionOptions | SgdOptions] = [], expected_grad_scale: float = 1.0
    ) -> None: ...
    def end_backward(self) -> None: ...
    def keep_joint_backward(self) -> bool:
        """True if another engine's loss gave gradients in this backward; otherwise the backward is ignored."""

    def abort_forward(self) -> None: ...
    def abort_backward(self) -> int: ...
    def undo_forward(self) -> None: ...
    def meet_ranks(self) -> None: ...
    def activation_bytes(self) -> int:
        """Current activation memory: everything on the device but chunk buffers, PyTorch's cache included."""

    def host_room_of_activations(self) -> int:
        """Host bytes still available to activation offload."""

    def take_live_activation_peak(self) -> int:
        """Peak activation memory since the last call, PyTorch's cache excluded."""

    def keep_absent_activations(self, most_bytes: int, /) -> None:
        """The next plan counts activations that this step offloaded as staying on the device, up to ``most_bytes`` of
        activation memory.
        """

    def offload_activation(self, data: int, num_bytes: int, /) -> int:
        """Starts a copy to host memory. Returns a ticket; -1 if the host has no room."""

    def is_offloaded(self, ticket: int, /) -> bool: ...
    def settle_offloading(self, ticket: int, /) -> None:
        """Waits for the copy to host memory."""

    def finish_offloading(self, ticket: int, /) -> None:
        """Waits as :meth:`settle_offloading`. The activation counts as absent: the device had no room for it."""

    def fetch_activation(self, ticket: int, to: int, /) -> None: ...
    def await_activation(self, ticket: int, /) -> None: ...
    def drop_activation(self, ticket: int, /) -> None: ...
    def evict_all_from_device(self, what: EvictionScope, /) -> None: ...
    def lend_device(self, keep_bytes: int) -> int: ...
    def take_device_back(self) -> None: ...
    def return_states(self) -> None: ...
    def sum_of_squares(self, left_out: Sequence[int] = []) -> float:
        """Sum of squares of all gradients, parameters ``left_out`` excluded."""

    def measure_parts(self) -> None:
        """From the next step on, :meth:`squares_of_parts` has a value (engine/gradient_flow.h)."""

    def squares_of_parts(self, left_out: Sequence[int] = []) -> float:
        """After :meth:`sum_of_squares`: sum over ranks of the squared norms of each rank's gradients in the first
        micro-batch; NaN if the step has none. All ranks must call it.
        """

    def apply_step(
        self, groups: Sequence[AdamOptions | LionOptions | SgdOptions], grad_scale: float, clip_ratio: float, /
    ) -> None: ...
    def skip_step(self) -> None: ...
    def drop_step(self) -> None: ...
    def clear_gradients(self) -> None: ...
    def clear_gradient(self, param: int, /) -> None: ...
    def has_gradient(self, param: int, /) -> bool: ...
    def gradients_pending(self) -> bool: ...
    def forget_plan(self) -> None: ...
    def plan_anew(self) -> None:
        """For ablations: the next step chooses its updates anew, and the following one gets a new plan."""
    def set_group(self, param: int, group: int, /) -> None: ...
    def step_count(self, param: int, /) -> int: ...
    def set_step_count(self, param: int, count: int, /) -> None: ...
    def start_trace(self) -> None:
        """Traces the next training step that begins."""

    def take_trace(self) -> dict[str, Any] | None:
        """Returns the traced step once; None before it is over. Waits for the updates that it started.

        ``outcome``, ``seconds``, ``optimizer_begin_seconds``, ``device_limit_bytes``; ``accesses``, as in ``timeline``:
        ``{"phase", "acquired": [(chunk, kind)], "launched_seconds", "begin_seconds", "seconds", "stalled_seconds",
        "compute_seconds", "activation_peak_bytes", "activation_bytes", "idle_bytes", "chunk_buffer_bytes": {kind:
        int}}``; ``spans``: ``{"track", "cause", "chunk", "kind", "num_bytes", "numel", "begin_seconds", "seconds",
        "owner", "dropped"}``; ``samples``: ``{"seconds", "activation_bytes", "idle_bytes", "chunk_buffer_bytes"}``.
        Seconds count from the step's first forward.
        """

    def start_stall_trace(self) -> None:
        """Like :meth:`start_trace`, for :meth:`take_stalls`; an independent request."""

    def take_stalls(self) -> dict[str, Any] | None:
        """Returns the traced step's stalls once: ``seconds`` of the step, ``stalled_seconds`` by ``StallCause``.
        None before it is over; waits as :meth:`take_trace` does.
        """

    def report(self) -> dict[str, Any]: ...
    def reset_report(self) -> None: ...
    def param_state(self, param: int, /) -> str: ...
    def chunk_state(self, chunk: int, /) -> str: ...
    def is_on_device(self, chunk: int, kind: ArrayKind, /) -> bool: ...
    def resting_tier(self, chunk: int, /) -> Tier:
        """Resting tier of the chunk's optimizer states."""

    @property
    def disk_faults(self) -> DiskFaults:
        """Faults that a test injects."""

    @property
    def num_accesses(self) -> int:
        """Accesses of the running step so far."""

    def next_scale(self, clip_ratio: float, /) -> ExpectedScale:
        """Gradient scale that the next step's speculative updates will assume. ``clip_ratio``: of the running step."""

    def placement_facts(self) -> tuple[DeviceBudget, int, list[Tier]]:
        """The device budget of states and chunk buffers; host bytes of this engine; resting tier of each chunk's
        states.
        """

    def timeline(self) -> list[dict[str, Any]]:
        """The last step's timeline, as ``PlanProblem`` takes it."""

    def plan(self) -> dict[str, Any]:
        """The current plan, as from ``make_plan``."""

    def plan_problem(self) -> dict[str, Any]:
        """Arguments of ``PlanProblem``, accesses aside, from which the current plan was made."""

    def step_times(self) -> dict[str, Any] | None:
        """Times of a measured step: ``rates``; ``compute_seconds`` and ``activations`` by access, as in ``simulate``;
        ``updates`` by chunk. None before a step was measured.
        """

    @property
    def num_measurements(self) -> int:
        """Steps of the present path that were measured in this run; at most 2."""

    def predicted_step(self) -> dict[str, Any] | None:
        """The current plan's predicted step, as from ``simulate``. None before a step was measured."""

class quant:
    """Leaf kernels of quantised values (a submodule). Arrays are passed as addresses."""

    NF4_VALUES: ClassVar[list[float]]
    DYNAMIC_VALUES: ClassVar[list[float]]
    @staticmethod
    def num_bytes(type: QuantType, numel: int) -> int:
        """Bytes of a quantised parameter of ``numel`` elements."""
    @staticmethod
    def layout(type: QuantType, numel: int) -> dict[str, int]:
        """Byte offset of each part in that array: codes, scales; for NF4 also block_scales and offset."""
    @staticmethod
    def quantize(isa: str, type: QuantType, values: int, numel: int, array: int, num_threads: int) -> None:
        """Quantises float32 ``values`` into ``array``, :meth:`num_bytes` of zeros.

        Raises:
            ValueError: a value is not finite, or this processor lacks ``isa``.
        """
    @staticmethod
    def dequantize(isa: str, type: QuantType, array: int, numel: int, out: int, dtype: DType, num_threads: int) -> None:
        """Dequantises ``array`` into ``out``."""
    @staticmethod
    def cuda_dequantize(type: QuantType, array: int, numel: int, out: int, dtype: DType, stream: int) -> None:
        """``dequantize`` on the device; ``stream`` is a ``cudaStream_t``. CUDA builds only."""

class experts:
    """Kernels between the grouped products of a mixture of experts (a submodule). CUDA builds only.

    Enqueued on ``stream`` of the current device. Rows are contiguous, ``width`` elements of ``dtype`` each; positions
    and tokens are int64. ``bias``: addresses of values, a row for each expert, and of each row's expert (int64), and
    the number of experts; rows of other ranks' experts take the last. Zeros for no bias.
    """

    @staticmethod
    def cuda_sum_rows(
        rows: int,
        positions: int,
        weights: int,
        bias: tuple[int, int, int],
        out: int,
        dtype: DType,
        product_dtype: DType,
        num_tokens: int,
        num_chosen: int,
        width: int,
        stream: int,
    ) -> None:
        """For each token the sum of its experts' weighted rows.

        ``positions`` and ``weights`` (float32, or 0 for weights of 1): ``[num_tokens, num_chosen]``. Rows at negative
        positions are left out. Products round to ``product_dtype``, ``dtype`` or float32, before they are summed.
        """
    @staticmethod
    def cuda_scale_rows(
        grad_out: int,
        rows: int,
        tokens: int,
        weights: int,
        bias: tuple[int, int, int],
        grad_rows: int,
        grad_weights: int,
        dtype: DType,
        num_rows: int,
        width: int,
        stream: int,
    ) -> None:
        """Backward of ``cuda_sum_rows`` with weights. ``weights`` and ``grad_weights``: float32, by row."""
    @staticmethod
    def cuda_gate(gate_up: int, out: int, dtype: DType, num_rows: int, width: int, stream: int) -> None:
        """SwiGLU of rows that hold gate and up side by side."""
    @staticmethod
    def cuda_gate_backward(
        gate_up: int, grad_out: int, grad_gate_up: int, dtype: DType, num_rows: int, width: int, stream: int
    ) -> None:
        """Backward of ``cuda_gate``."""
    @staticmethod
    def cuda_weighted_gate_backward(
        gate_up: int,
        grad_out: int,
        weights: int,
        grad_gate_up: int,
        weighted_out: int,
        grad_weights: int,
        dtype: DType,
        num_rows: int,
        width: int,
        stream: int,
    ) -> None:
        """Backward of ``cuda_gate`` by the gradient before weighting.

        ``weights`` and ``grad_weights``: float32, by row. ``weighted_out`` gets SwiGLU times ``weights``.
        """
    @staticmethod
    def cuda_clamped_gate(
        gate_up: int,
        bias: tuple[int, int, int],
        alpha: float,
        limit: float,
        out: int,
        dtype: DType,
        num_rows: int,
        width: int,
        stream: int,
    ) -> None:
        """gpt-oss's gate of rows and their bias, whose columns alternate between gate and up."""
    @staticmethod
    def cuda_clamped_gate_backward(
        gate_up: int,
        bias: tuple[int, int, int],
        alpha: float,
        limit: float,
        grad_out: int,
        grad_gate_up: int,
        dtype: DType,
        num_rows: int,
        width: int,
        stream: int,
    ) -> None:
        """Backward of ``cuda_clamped_gate``."""

class fp8:
    """Casts to 8-bit floating point (a submodule). CUDA builds only."""

    @staticmethod
    def cuda_cast(
        x: int,
        num_rows: int,
        padded_rows: int,
        num_columns: int,
        block: int,
        format: int,
        codes: int,
        scales: int,
        transposed: int,
        transposed_scales: int,
        largest: int,
        stream: int,
    ) -> None:
        """Casts bfloat16 ``x`` as :func:`patrickstar.fp8.casting.cast` does. An address of 0 leaves a result out."""

    @staticmethod
    def cuda_cast_rows(x: int, num_rows: int, num_columns: int, codes: int, scales: int, stream: int) -> None:
        """Casts the rows of bfloat16 ``x``."""

    @staticmethod
    def cuda_cast_swiglu(gate_up: int, num_rows: int, num_columns: int, codes: int, scales: int, stream: int) -> None:
        """Casts SwiGLU of rows that hold gate and up side by side. ``num_columns``: of the codes."""

    @staticmethod
    def cuda_cast_swiglu_gradient(
        gate_up: int, grad_out: int, num_rows: int, num_columns: int, codes: int, scales: int, stream: int
    ) -> None:
        """Casts the gradient of SwiGLU's argument. ``num_columns``: of the codes."""

    @staticmethod
    def cuda_cast_weighted(
        grad_out: int,
        rows: int,
        tokens: int,
        weights: int,
        grad_weights: int,
        num_rows: int,
        num_columns: int,
        codes: int,
        scales: int,
        stream: int,
    ) -> None:
        """Casts the gradient of rows whose weighted sum is taken."""

    @staticmethod
    def cuda_turn(
        x: int,
        scales: int,
        sources: int,
        ends: int,
        padded_ends: int,
        num_groups: int,
        num_tiles: int,
        num_columns: int,
        codes: int,
        code_scales: int,
        largest: int,
        stream: int,
    ) -> None:
        """Rows of groups, bfloat16 or codes, as columns of codes. ``scales`` of 0: ``x`` is bfloat16."""

class optim:
    """Leaf kernels of the optimizers and the loss scaler (a submodule).

    ``cuda_*``: CUDA builds only; enqueued on ``stream`` of the current device.
    """

    OPEN_LOG_BYTES: ClassVar[int]
    STATE_BLOCK: ClassVar[int]
    SCALE_DEPENDENT_PIECE: ClassVar[int]
    SQUARES_BLOCK: ClassVar[int]

    class LossScaler:
        """Factor that keeps float16 gradients in range. ``loss_scale`` > 0: constant; 0: dynamic."""

        def __init__(
            self,
            *,
            loss_scale: float = 0.0,
            initial_scale_power: int = 16,
            scale_window: int = 1000,
            min_scale: float = 1.0,
            hysteresis: int = 2,
            consecutive_hysteresis: bool = False,
        ) -> None: ...
        @property
        def scale(self) -> float: ...
        @property
        def is_dynamic(self) -> bool: ...
        @property
        def is_at_minimum(self) -> bool: ...
        def update(self, overflow: bool) -> None:
            """Call once per optimizer step, skipped ones included."""

        def state(self) -> dict[str, float | int]:
            """The arguments of ``set_state``."""

        def set_state(
            self, *, scale: float, iteration: int, last_overflow_iteration: int, hysteresis_left: int
        ) -> None:
            """Restores ``state``. Raises ValueError for a state that no run can reach."""

    @staticmethod
    def isa() -> str:
        """The ISA whose kernels this process uses."""

    @staticmethod
    def supported_isas() -> list[str]:
        """The ISAs this processor has, narrowest first."""

    class StateArray:
        """An optimizer state: type, address, and address of its scales (8-bit states only; csrc/common/dtype.h).

        A bare address in its place means float32.
        """

        def __init__(self, data: int, type: StateType = StateType.FLOAT32, scales: int = 0) -> None: ...

    class RandomKey:
        """Key of the random bits for stochastic rounding (csrc/optim/kernels.h)."""

        def __init__(self, a: int = 0, b: int = 0, first: int = 0) -> None: ...
        @property
        def a(self) -> int: ...
        @property
        def b(self) -> int: ...
        @property
        def first(self) -> int: ...

    @staticmethod
    def random_key(seed: int, step: int, param: int, first: int) -> optim.RandomKey:
        """Key of one step and parameter, for a range that starts at its element ``first``."""

    @staticmethod
    def expand_state(isa: str, state: optim.StateArray, out: int, numel: int) -> None:
        """Converts a state to float32."""

    @staticmethod
    def compress_state(
        isa: str, in_: int, state: optim.StateArray, numel: int, *, key: optim.RandomKey | None = None
    ) -> None:
        """Stores float32 values in the format of a state, as ``update`` stores a momentum."""

    @staticmethod
    def cuda_expand_state(type: StateType, data: int, scales: int, out: int, numel: int, stream: int) -> None:
        """Like ``expand_state``."""

    @staticmethod
    def cuda_compress_state(
        in_: int,
        type: StateType,
        out: int,
        scales: int,
        numel: int,
        stream: int,
        *,
        key: optim.RandomKey | None = None,
    ) -> None:
        """Like ``compress_state``."""

    class AdamRange:
        """Arrays of one update at raw addresses (csrc/optim/kernels.h).

        Args:
            master, momentum, variance: float32, or a StateArray. Optimizers without a variance: StateType.NONE.
            param: may be ``grad``, or 0 (no compute copy).
            key: default zeros.
            new_states: master, momentum and variance to write; the old ones stay.

        Raises:
            ValueError: null arrays, or a ``param`` over a ``grad`` of another size.
        """

        def __init__(
            self,
            master: optim.StateArray,
            momentum: optim.StateArray,
            variance: optim.StateArray,
            grad: int,
            grad_dtype: DType,
            param: int,
            param_dtype: DType,
            numel: int,
            *,
            key: optim.RandomKey | None = None,
            new_states: Sequence[optim.StateArray] | None = None,
        ) -> None: ...

    class AdamScalars:
        """Scalars of one Adam step (csrc/optim/kernels.h)."""

        def __init__(
            self,
            *,
            grad_scale: float,
            weight_decay: float,
            decay: float,
            beta2: float,
            one_minus_beta1: float,
            one_minus_beta2: float,
            inv_sqrt_bias_correction2: float,
            eps: float,
            step_size: float,
        ) -> None: ...

    class MomentumScalars:
        """Scalars of one step of Lion or SGD (csrc/optim/kernels.h); those of other rules are not read."""

        def __init__(
            self,
            rule: MomentumRule,
            *,
            grad_scale: float,
            weight_decay: float,
            decay: float,
            step_size: float,
            one_minus_beta1: float = 0.0,
            one_minus_beta2: float = 0.0,
            momentum_factor: float = 0.0,
            one_minus_dampening: float = 0.0,
        ) -> None: ...

    @staticmethod
    def update(
        isa: str,
        range: optim.AdamRange,
        scalars: optim.AdamScalars | optim.MomentumScalars,
        threads: ThreadPool | int,
    ) -> None:
        """One optimizer step. ``threads``: a pool, or a number of threads.

        Raises ValueError for an ISA this processor lacks.
        """

    @staticmethod
    def update_param(
        isa: str,
        range: optim.AdamRange,
        scalars: optim.AdamScalars | optim.MomentumScalars,
        threads: ThreadPool | int,
    ) -> None:
        """Like ``update``, but writes only ``param``, apart from ``grad``. Requires a float32 master."""

    @staticmethod
    def update_param_between(
        isa: str,
        range: optim.AdamRange,
        scalars: optim.AdamScalars | optim.MomentumScalars,
        threads: ThreadPool | int,
        logs: int,
        most_grad_scale: float,
    ) -> None:
        """Like ``update_param``, for 16-bit values that are the same for every ``grad_scale`` up to
        ``most_grad_scale``. Scale-dependent values go to ``logs``, ``OPEN_LOG_BYTES`` per ``SCALE_DEPENDENT_PIECE``
        elements.
        """

    @staticmethod
    def update_param_scale_dependent(
        isa: str,
        range: optim.AdamRange,
        scalars: optim.AdamScalars | optim.MomentumScalars,
        threads: ThreadPool | int,
        logs: int,
    ) -> None:
        """Like ``update_param``, for the values that ``update_param_between`` logged."""

    @staticmethod
    def put_values(
        isa: str,
        range: optim.AdamRange,
        scalars: optim.AdamScalars,
        threads: ThreadPool | int,
        logs: int,
        most_grad_scale: float,
        capacity: int,
    ) -> None:
        """In-place speculative update of bfloat16 params, the upper halves of split masters.

        Writes values that are the same for every ``grad_scale`` up to ``most_grad_scale``. Scale-dependent values go to
        logs of ``OPEN_LOG_BYTES`` per ``SCALE_DEPENDENT_PIECE`` elements, at most ``capacity`` values each.
        """

    @staticmethod
    def put_scale_dependent_values(
        isa: str, range: optim.AdamRange, scalars: optim.AdamScalars, threads: ThreadPool | int, logs: int
    ) -> None:
        """Writes the values that ``put_values`` logged."""

    @staticmethod
    def put_states(
        isa: str,
        range: optim.AdamRange,
        scalars: optim.AdamScalars,
        threads: ThreadPool | int,
        logs: int,
        least_grad_scale: float,
    ) -> int:
        """Phase two: updates the states. Returns the number of params that differ from the update's result."""

    @staticmethod
    def take_values_back(
        isa: str, range: optim.AdamRange, scalars: optim.AdamScalars, threads: ThreadPool | int, logs: int
    ) -> None:
        """Rolls back ``put_values``, given the same arguments."""

    @staticmethod
    def cuda_update(range: optim.AdamRange, scalars: optim.AdamScalars | optim.MomentumScalars, stream: int) -> None:
        """Like ``update``."""

    @staticmethod
    def cast_from_float(isa: str, in_: int, out: int, out_dtype: DType, numel: int, num_threads: int) -> None:
        """out[i] = round(in[i]), in float32."""

    @staticmethod
    def cast_to_float(isa: str, in_: int, in_dtype: DType, out: int, numel: int, num_threads: int) -> None:
        """out[i] = in[i], out float32."""

    @staticmethod
    def add(isa: str, sum: int, x: int, dtype: DType, numel: int, num_threads: int) -> None:
        """sum[i] = round(sum[i] + x[i]), both of ``dtype``."""

    @staticmethod
    def add_to_float(isa: str, sum: int, x: int, x_dtype: DType, numel: int, num_threads: int) -> None:
        """sum[i] += x[i], sum float32."""

    @staticmethod
    def sum_squares(isa: str, x: int, dtype: DType, numel: int, partials: int, num_threads: int) -> None:
        """partials[b] = sum of squares of block b of SQUARES_BLOCK elements; float64, one for each block begun."""

    @staticmethod
    def add_up(partials: int, first: int, count: int) -> tuple[float, float]:
        """Sum of ``count`` float64 partials from ``first`` on: (rounded sum, rounding error)."""

    @staticmethod
    def split_master(isa: str, master: int, param: int, lower: int, variance: int, numel: int) -> None:
        """Splits float32 masters into bfloat16 params, 16-bit lower halves and signs of the variance."""

    @staticmethod
    def join_master(isa: str, param: int, lower: int, variance: int, master: int, numel: int) -> None:
        """Inverse of ``split_master``."""

    @staticmethod
    def cuda_cast_from_float(in_: int, out: int, out_dtype: DType, numel: int, stream: int) -> None: ...
    @staticmethod
    def cuda_cast_to_float(in_: int, in_dtype: DType, out: int, numel: int, stream: int) -> None: ...
    @staticmethod
    def cuda_add(sum: int, x: int, dtype: DType, numel: int, stream: int) -> None: ...
    @staticmethod
    def cuda_add_to_float(sum: int, x: int, x_dtype: DType, numel: int, stream: int) -> None: ...
    @staticmethod
    def cuda_sum_squares(x: int, dtype: DType, numel: int, partials: int, stream: int) -> None: ...
    @staticmethod
    def cuda_add_up(partials: int, ranges: int, num_ranges: int, sums: int, stream: int) -> None:
        """sums[i] = add_up(partials, *ranges[i]); ranges int64, sums float64, two of each."""

class collective:
    """Groups of ranks and their collectives on whole chunks (a submodule; csrc/collective)."""

    class Communicator:
        """Flat in-place collectives and messages of a group.

        All ranks call them in the same order, from one thread at a time.
        CUDA: enqueued on PyTorch's current stream, return at once. CPU: return when done.
        """

        @property
        def rank(self) -> int: ...
        @property
        def size(self) -> int: ...
        def all_gather(self, whole: int, shard_bytes: int) -> None:
            """Fills ``whole``: shard r comes from rank r. Raises RankFailure."""

        def reduce_scatter_mean(self, whole: int, shard: int, scratch: int, shard_numel: int, dtype: DType) -> None:
            """Writes this rank's shard of the mean over ranks to ``shard``; ``scratch`` is as large as ``whole``."""

        def exchange(self, sends: Sequence[tuple[int, int, int]], receives: Sequence[tuple[int, int, int]]) -> None:
            """Exchanges messages with other ranks at once: (peer, address, bytes) each. Messages between two ranks
            match in the order of their lists. Raises RankFailure.
            """

        def abort(self) -> None:
            """Aborts running collectives after a failure; any thread."""

        def check(self) -> None:
            """Raises RankFailure when the communicator has failed; any thread."""

        def oldest_pending_seconds(self) -> float:
            """Age of the oldest unfinished collective, in seconds; any thread."""

        def close(self) -> None:
            """Frees its resources without waiting for other ranks. No collective may be running on any rank.
            Idempotent.
            """

    class ControlGroup:
        """Exchanges small values between ranks through the hosts; blocking."""

        @property
        def rank(self) -> int: ...
        @property
        def size(self) -> int: ...
        def enter(self, call: str) -> None:
            """Sets the call that this rank is in; empty: none."""

        @property
        def call(self) -> str: ...
        def exchange(self, mine: bytes, what: str = "") -> list[bytes]:
            """Returns every rank's value, by rank; lengths may differ. ``what`` and the call must agree on all ranks.
            Raises RankFailure, RankMismatch.
            """

        def distribute(self, to_each: Sequence[bytes], what: str = "") -> list[bytes]:
            """Like ``exchange``, with a separate value for each rank."""

        def abort(self) -> None:
            """Aborts running collectives after a failure; any thread."""

        def close(self) -> None:
            """Frees its resources without waiting for other ranks. Idempotent."""

    @staticmethod
    def make_single_communicator() -> collective.Communicator: ...
    @staticmethod
    def make_single_control() -> collective.ControlGroup: ...
    @staticmethod
    def make_c10d_communicator(group_name: str, members: Sequence[int] = []) -> collective.Communicator:
        """``members``: the ranks' numbers in the run for error messages, if they differ from those of the group."""

    @staticmethod
    def make_c10d_control(
        group_name: str, timeout_seconds: float, members: Sequence[int] = []
    ) -> collective.ControlGroup: ...
    @staticmethod
    def mean_of_ranks(shards: int, num_ranks: int, out: int, dtype: DType, numel: int) -> None:
        """Mean of ``num_ranks`` adjacent ranges of ``numel`` elements, in float32, added in order."""

    # CUDA builds only.
    @staticmethod
    def make_cuda_single_communicator(device: int) -> collective.Communicator: ...
    @staticmethod
    def nccl_version() -> str: ...
    @staticmethod
    def make_nccl_id() -> bytes: ...
    @staticmethod
    def make_nccl_communicator(
        id: bytes, *, rank: int, size: int, device: int, members: Sequence[int] = []
    ) -> collective.Communicator: ...
    @staticmethod
    def make_cuda_staged_communicator(
        group_name: str, *, device: int, members: Sequence[int] = []
    ) -> collective.Communicator: ...
    @staticmethod
    def cuda_mean_of_ranks(shards: int, num_ranks: int, out: int, dtype: DType, numel: int, stream: int) -> None: ...
