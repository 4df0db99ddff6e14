"""The core of PatrickStar: chunks, transfers, planner, hybrid Adam, loss scaling (csrc/bind).

Addresses are integers: ``tensor.data_ptr()``, or ``storage._cdata`` for a storage, or ``stream.cuda_stream``. Chunks
and parameters are their indices in the layout. ``tools/make_stub.py --check`` compares this file with
the module.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, final

from torch.autograd.graph import Node
from typing_extensions import Buffer

class StateError(RuntimeError):
    """The call is right, the moment is not."""

class MemoryBudgetError(RuntimeError):
    """Something does not fit a memory budget."""

class DiskError(RuntimeError):
    """A disk that holds optimizer states is full, fails, or gives back other bytes than were written."""

class SystemError(RuntimeError):
    """The operating system, the CUDA driver or NCCL refused."""

class RankMismatch(StateError):
    """Ranks of a group make different calls at the same time, or add up gradients of different chunks. Raised on all of
    them; it names what each does.
    """

class RankFailure(RuntimeError):
    """Another rank of a group died, left by an exception, or did not take part in time."""

class _Enum:
    __members__: ClassVar[dict[str, Any]]
    def __init__(self, value: int) -> None: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

@final
class DType(_Enum):
    """Element type of a chunk's arrays."""

    FLOAT32: ClassVar[DType]
    BFLOAT16: ClassVar[DType]
    FLOAT16: ClassVar[DType]

@final
class StateType(_Enum):
    """Element type of an optimizer state."""

    FLOAT32: ClassVar[StateType]
    LOWER_HALF: ClassVar[StateType]
    BFLOAT16: ClassVar[StateType]
    SIGNED8: ClassVar[StateType]
    UNSIGNED8: ClassVar[StateType]
    NONE: ClassVar[StateType]

@final
class MomentumRule(_Enum):
    """The optimizers of one moment (csrc/optim/kernels.h)."""

    LION: ClassVar[MomentumRule]
    SGD: ClassVar[MomentumRule]
    NESTEROV: ClassVar[MomentumRule]

@final
class GradientPlace(_Enum):
    """Where a gradient waits for the step (csrc/chunk/layout.h)."""

    OF_PARAM: ClassVar[GradientPlace]
    OWN: ClassVar[GradientPlace]

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

@final
class ArrayKind(_Enum):
    """The arrays of a chunk."""

    PARAM: ClassVar[ArrayKind]
    GRAD: ClassVar[ArrayKind]
    GRAD_SUM: ClassVar[ArrayKind]
    PARAM_SHARD: ClassVar[ArrayKind]
    GRAD_SHARD: ClassVar[ArrayKind]
    MASTER: ClassVar[ArrayKind]
    MOMENTUM: ClassVar[ArrayKind]
    VARIANCE: ClassVar[ArrayKind]
    QUANTIZED: ClassVar[ArrayKind]

@final
class QuantType(_Enum):
    """How the values of a frozen parameter are stored."""

    NONE: ClassVar[QuantType]
    NF4: ClassVar[QuantType]
    INT8: ClassVar[QuantType]

@final
class Vacate(_Enum):
    """What leaves the device to make room."""

    VALUES: ClassVar[Vacate]
    EVERYTHING: ClassVar[Vacate]

@final
class Mechanism(_Enum):
    """Mechanisms that a measurement can leave out (csrc/common/ablation.h)."""

    WHOLE_UPDATES_AHEAD: ClassVar[Mechanism]
    PARAMETERS_FIRST: ClassVar[Mechanism]
    SETTLED_VALUES: ClassVar[Mechanism]
    WAITING_UPDATES: ClassVar[Mechanism]
    ORDER_OF_NEED: ClassVar[Mechanism]
    HOMES_IN_TURN: ClassVar[Mechanism]
    VISITS: ClassVar[Mechanism]
    FRAGMENTS: ClassVar[Mechanism]
    RARE_SIZES: ClassVar[Mechanism]
    EXACT_SLOTS: ClassVar[Mechanism]

@final
class Tier(_Enum):
    """Where memory is."""

    HOST: ClassVar[Tier]
    DEVICE: ClassVar[Tier]
    DISK: ClassVar[Tier]

@final
class Phase(_Enum):
    """Which half of a step a moment is in."""

    FORWARD: ClassVar[Phase]
    BACKWARD: ClassVar[Phase]

@final
class AccessMode(_Enum):
    """What a moment does with an array."""

    READ: ClassVar[AccessMode]
    WRITE: ClassVar[AccessMode]
    RETIRE: ClassVar[AccessMode]

@final
class StatePlacement(_Enum):
    """Where optimizer states may be."""

    HYBRID: ClassVar[StatePlacement]
    HOST: ClassVar[StatePlacement]

@final
class Tracking(_Enum):
    """Whether a forward is part of a training step."""

    TRAINING: ClassVar[Tracking]
    UNTRACKED: ClassVar[Tracking]

@final
class Attempt(_Enum):
    """Whether a forward that runs out of device memory is made again."""

    FIRST: ClassVar[Attempt]
    AGAIN: ClassVar[Attempt]
    LAST: ClassVar[Attempt]
    ONLY: ClassVar[Attempt]

@final
class StepState(_Enum):
    """State of an engine's step (csrc/engine/step_state.h)."""

    READY: ClassVar[StepState]
    GRADIENTS: ClassVar[StepState]
    FORWARD: ClassVar[StepState]
    EVALUATION: ClassVar[StepState]
    BACKWARD: ClassVar[StepState]
    UPDATING: ClassVar[StepState]
    TORN: ClassVar[StepState]
    ENDING: ClassVar[StepState]

@final
class HoldUntil(_Enum):
    """How long a scope's parameters stay."""

    SCOPE_END: ClassVar[HoldUntil]
    NEXT_EVENT: ClassVar[HoldUntil]

@final
class WeightDecay(_Enum):
    """Adam's L2 term or AdamW's decoupled decay."""

    L2: ClassVar[WeightDecay]
    DECOUPLED: ClassVar[WeightDecay]

@final
class BiasCorrection(_Enum):
    """Whether moments are divided by 1 - beta^step before an update, or taken as they are."""

    APPLIED: ClassVar[BiasCorrection]
    NONE: ClassVar[BiasCorrection]

@final
class Track(_Enum):
    """Where a span of a trace belongs."""

    STALL: ClassVar[Track]
    UPLOAD: ClassVar[Track]
    DOWNLOAD: ClassVar[Track]
    GATHER: ClassVar[Track]
    SCATTER: ClassVar[Track]
    HOST_ADAM: ClassVar[Track]
    HOST_STATES: ClassVar[Track]
    HOST_OPEN: ClassVar[Track]
    DEVICE_ADAM: ClassVar[Track]
    DISK_READ: ClassVar[Track]
    DISK_ADAM: ClassVar[Track]
    DISK_WRITE: ClassVar[Track]
    VISIT: ClassVar[Track]

@final
class StallCause(_Enum):
    """What the compute queue waited for."""

    NONE: ClassVar[StallCause]
    UPLOAD: ClassVar[StallCause]
    DOWNLOAD: ClassVar[StallCause]
    HOST_UPDATE: ClassVar[StallCause]
    HOST_WORK: ClassVar[StallCause]
    ROOM: ClassVar[StallCause]
    NORM: ClassVar[StallCause]
    COLLECTIVE: ClassVar[StallCause]

@final
class SpanOwner(_Enum):
    """Whose work a span is."""

    THIS_STEP: ClassVar[SpanOwner]
    STEP_BEFORE: ClassVar[SpanOwner]

@final
class StepOutcome(_Enum):
    """How a step ended."""

    APPLIED: ClassVar[StepOutcome]
    SKIPPED: ClassVar[StepOutcome]

UNLIMITED: int
"""The limit of a budget without one, in bytes."""
CUDA_SLACK_RATIO: float
"""Of a device limit, what PyTorch's allocator needs on CUDA to round and to fragment."""
PREDICTION_TOLERANCE: float
"""Steps whose predictions differ by less, of their length, are as short as each other."""

def build_info() -> dict[str, Any]:
    """What this module was compiled with: ``compiler``, ``cplusplus``, ``torch``, and ``cuda`` and ``nccl`` or None."""

def num_available_cpus() -> int:
    """Processors this process may run on."""

def allowed_cpus() -> list[int]:
    """The calling thread's affinity mask, ascending."""

def parse_cpu_list(text: str) -> list[int]:
    """CPUs of the kernel's notation, ``"0-3,8,10-11"``, up to the first thing that is none."""

def format_cpu_list(cpus: Sequence[int]) -> str:
    """CPUs in the kernel's notation."""

class CpuTopology:
    """The CPUs that a process may use."""

    @property
    def cpus(self) -> list[tuple[int, int, int]]:
        """(id, core, NUMA node), by ascending id; a core is named by its lowest CPU."""

    @property
    def quota_cpus(self) -> float:
        """CPUs that the cgroup grants time of; infinite without a quota."""

def read_cpu_topology(cpus: Sequence[int], root: str = "") -> CpuTopology:
    """What ``/sys`` and ``/proc`` below ``root`` say about these CPUs."""

@final
class Affinity(_Enum):
    """Whether worker threads have a CPU of their own."""

    PINNED: ClassVar[Affinity]
    FREE: ClassVar[Affinity]

@final
class LaunchingCore(_Enum):
    """What becomes of the core of the thread that launches the device's work."""

    RESERVED: ClassVar[LaunchingCore]
    SHARED: ClassVar[LaunchingCore]

class HostThreadOptions:
    """Which threads compute on the host; all fields have defaults."""

    num_threads: int
    """Including the thread that calls the pool; 0: one for each CPU."""
    affinity: Affinity
    launching_core: LaunchingCore
    sharing_index: int
    """Which of the processes that may use the same CPUs this is."""
    num_sharing: int
    """How many they are."""
    def __init__(self) -> None: ...

class HostThreads:
    """Threads that compute on the host."""

    @property
    def num_threads(self) -> int: ...
    @property
    def worker_cpus(self) -> list[int]:
        """Of the workers in order, one each; workers beyond them are free."""

    @property
    def nodes(self) -> list[int]:
        """NUMA nodes on which the threads may run, ascending."""

def choose_host_threads(topology: CpuTopology, options: HostThreadOptions) -> HostThreads:
    """How many threads compute, and on which CPUs. Raises ValueError for impossible options."""

class Priority(_Enum):
    """Which loops the workers of a pool help first."""

    URGENT: ClassVar[Priority]
    BACKGROUND: ClassVar[Priority]

class ThreadPool:
    """Threads that share the work of loops; the calling thread is one of them, and never pinned."""

    def __init__(self, num_threads: int, worker_cpus: Sequence[int] = []) -> None: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def num_urgent(self) -> int:
        """Urgent loops that run now."""
    @property
    def pinned_cpus(self) -> list[int]:
        """Where workers are pinned indeed."""
    def parallel_for(
        self, size: int, grain: int, fn: Callable[[int, int], object], priority: Priority = Priority.URGENT
    ) -> None:
        """Calls ``fn(begin, end)`` on disjoint ranges that cover [0, size). For tests."""

class HostEvent:
    """The end of some work on a host thread."""

    def __init__(self) -> None: ...
    def complete(self) -> None: ...
    def wait(self) -> None:
        """Raises what the work has failed with."""
    def settle(self) -> None: ...
    @property
    def is_over(self) -> bool: ...

class WorkQueue:
    """A queue of tasks with a thread of its own. For tests."""

    def __init__(self) -> None: ...
    def submit(
        self, failure: str = "", name: str = "", after: HostEvent | None = None, rank: int | None = None
    ) -> HostEvent:
        """A task that waits for `after` and then fails with SystemError, or notes its name.

        With a `rank` it is one of those that run in the order of need, and is ready when `after` is over.
        """

    @property
    def names(self) -> list[str]:
        """Of tasks that are over, in the order in which they ran."""

def crc32c(data: Buffer, crc: int = 0) -> int:
    """CRC-32C of the bytes of a contiguous buffer, after those of checksum ``crc`` (common/crc32c.h)."""

def crc32c_portable(data: Buffer, crc: int = 0) -> int:
    """The same by tables, on any processor."""

def nodes_to_interleave(nodes: Sequence[int]) -> list[int]:
    """``nodes`` when there are several that the system lets this process choose among, else none."""

def interleave_pages(data: int, num_bytes: int, nodes: Sequence[int]) -> bool:
    """Spreads untouched pages from address ``data`` on over NUMA nodes; whether the system agreed."""

def leave_out(mechanisms: Sequence[Mechanism]) -> None:
    """Engines built from now on work without these, and with all others."""

def state_bytes(type: StateType, numel: int) -> int:
    """Bytes of an optimizer state of so many elements, scales of blocks included."""

def check_transition(from_: str, to: str, /) -> None:
    """Raises StateError when a parameter may not go from one state to the other."""

def shared_budgets(cuda_device: int) -> tuple[int, int] | None:
    """(device bytes, host bytes) of the engines that are open on a device; None: none is."""

def working_set_bytes(layout: Layout, module_params: Sequence[Sequence[int]]) -> int:
    """Least device memory for payloads: the largest module's chunks and their gradients'."""

def make_plan(
    moments: list[dict[str, Any]],
    costs: Mapping[tuple[int, ArrayKind], tuple[int, int, int, int, bool]],
    *,
    limit_bytes: int,
    least_tide_bytes: int = 0,
    fixed_bytes: int = 0,
    prefetch_bytes: int = 0,
    idle_bytes: Sequence[int] = [],
    gradient_room_bytes: int = 9223372036854775807,
    visit_costs: Sequence[tuple[int, int, int]] = [],
) -> dict[str, Any]:
    """The plan for a timeline.

    ``moments``: ``{"phase", "accesses": [(chunk, kind, mode)], "tide_peak_bytes"}`` each; ``costs``:
    ``{(chunk, kind): (num_bytes, fetch_bytes, evict_bytes, retire_bytes, survives_step)}``; ``idle_bytes``: by moment,
    what slots that wait for another moment take, or empty.
    """

@final
class Backwards(_Enum):
    """How many backwards a step is known to have (csrc/plan/placement.h)."""

    ONE: ClassVar[Backwards]
    """Or not known."""
    SEVERAL: ClassVar[Backwards]
    """Whose gradients accumulate."""

class DeviceBudget:
    """How much of a device there is to plan with (csrc/plan/placement.h)."""

    limit_bytes: int
    follows_tide: bool
    prefetches_far: bool
    margin_use_ratio: float
    keeps_gradients: bool
    backwards: Backwards
    gradient_tide_bytes: int
    host_limit_bytes: int
    gradient_room_bytes: int
    def __init__(self) -> None: ...

def gradient_room_bytes(layout: Layout, homes: Sequence[Tier], host_limit_bytes: int) -> int:
    """What chunks with these homes leave of the host to gradients that have memory there only until their update;
    UNLIMITED where all have a place.
    """

def visit_costs(layout: Layout) -> list[tuple[int, int, int]]:
    """By chunk, the bytes that go up and down where its states visit the device for an update."""

def chunks_that_move_in(layout: Layout, count: int, states_on_device: Sequence[bool]) -> list[int]:
    """Of the first ``count`` chunks, those whose states move to the device beside those that are there."""

def puts_values_in_place(layout: Layout) -> bool:
    """Whether new values of any chunk take the old ones' place."""

def reserved_gradient_bytes(layout: Layout) -> int:
    """Of host memory, what updates ahead of the step leave to gradients that come down."""

def initial_placement(
    layout: Layout,
    host_limit_bytes: int,
    device_room_bytes: int,
    backwards: Backwards = Backwards.ONE,
    disk_limit_bytes: int = 0,
) -> tuple[list[Tier], int, int]:
    """By chunk, where its states are before the tide is known, and the bytes that takes on the host and on the disk."""

def later_homes(
    layout: Layout,
    first_homes: Sequence[Tier],
    states_on_device: Sequence[bool],
    host_limit_bytes: int,
    backwards: Backwards = Backwards.ONE,
) -> list[Tier]:
    """By chunk, where its states are once the tide is known: what left the host makes room there for states on the
    disk.
    """

def bytes_on_host(layout: Layout, homes: Sequence[Tier], backwards: Backwards = Backwards.ONE) -> int:
    """Bytes of the host that chunks with these homes take, but for what states on the disk pass through."""

def disk_set_bytes(layout: Layout, homes: Sequence[Tier]) -> int:
    """Of host memory, what states on their way from the disk and back pass through."""

@final
class Ahead(_Enum):
    """How much of a chunk's update is made ahead of the step."""

    NOTHING: ClassVar[Ahead]
    PARAM: ClassVar[Ahead]
    """The new parameters; the states follow behind the step."""
    EVERYTHING: ClassVar[Ahead]

def choose_ahead(layout: Layout, homes: Sequence[Tier], room_bytes: int) -> list[Ahead]:
    """By chunk, how much of its update so much of the host allows to be made ahead of the step."""

def host_peak_bytes(
    layout: Layout,
    first_homes: Sequence[Tier],
    states_on_device: Sequence[bool],
    host_limit_bytes: int,
    updates_ahead: bool,
    backwards: Backwards = Backwards.ONE,
) -> int:
    """The most that a rank will have mapped of the host (csrc/plan/host_demand.h)."""

def leaving_gradient_bytes(
    layout: Layout, moments: list[dict[str, Any]], states_on_device: Sequence[bool], budget: DeviceBudget
) -> int:
    """Of gradients that wait on the device for the norm, what has no room there and waits on the host."""

@final
class UseCall(_Enum):
    """A call by which a hook of a module reports uses of parameters (csrc/plan/played_uses.h)."""

    OPEN_SCOPE: ClassVar[UseCall]
    CLOSE_SCOPE: ClassVar[UseCall]
    TOUCH: ClassVar[UseCall]
    END_FORWARD: ClassVar[UseCall]
    ENTER_BACKWARD: ClassVar[UseCall]
    FOLD: ClassVar[UseCall]

def play_uses(
    layout: Layout,
    states_on_device: Sequence[bool],
    uses: Sequence[tuple[UseCall, Sequence[int], HoldUntil | None, int, int]],
) -> tuple[list[dict[str, Any]], list[int], int]:
    """The moments that an engine would record of these uses, each a call, its parameters, until when a scope holds
    them, and the ticks of a use whose backward begins.

    By use the moment after it (-1: none), and the most bytes that the chunks of a moment hold beside what it asks for.
    """

def num_device_state_chunks(layout: Layout, moments: list[dict[str, Any]], budget: DeviceBudget) -> int:
    """How many chunks, from the first on, have their states on the device once the tide is known."""

def pose_problem(
    layout: Layout, moments: list[dict[str, Any]], states_on_device: Sequence[bool], budget: DeviceBudget
) -> dict[str, Any]:
    """The planner's problem for a timeline: the arguments of ``make_plan``."""

@final
class Recipe(_Enum):
    """A way in which a chunk is updated (csrc/plan/recipe.h)."""

    NEVER: ClassVar[Recipe]
    HOST_PROMISED: ClassVar[Recipe]
    """In backward and for good."""
    VISIT: ClassVar[Recipe]
    """On the device, for which states come from the host."""
    HOST_AHEAD: ClassVar[Recipe]
    """In backward; undone where the step is another one."""
    HOST_TWO_PASSES_AHEAD: ClassVar[Recipe]
    """New values in backward, states behind them."""
    HOST_TWO_PASSES: ClassVar[Recipe]
    HOST: ClassVar[Recipe]
    DISK_PROMISED: ClassVar[Recipe]
    DISK: ClassVar[Recipe]
    DEVICE_PROMISED: ClassVar[Recipe]
    DEVICE: ClassVar[Recipe]
    @property
    def states(self) -> Tier:
        """Home of the chunk's optimizer states."""
    @property
    def starts_in_backward(self) -> bool:
        """True where it begins before the norm of all gradients is known."""

@final
class Lane(_Enum):
    """The queue or worker that is busy with an instruction (csrc/plan/ops.h)."""

    LAUNCH: ClassVar[Lane]
    COMPUTE: ClassVar[Lane]
    UPLOAD: ClassVar[Lane]
    DOWNLOAD: ClassVar[Lane]
    GATHER: ClassVar[Lane]
    SCATTER: ClassVar[Lane]
    HOST: ClassVar[Lane]
    DISK_READ: ClassVar[Lane]
    DISK_HOST: ClassVar[Lane]
    DISK_WRITE: ClassVar[Lane]
    VISIT: ClassVar[Lane]

@final
class UpdateStart(_Enum):
    """When updates on the host may start at the earliest."""

    AFTER_NORM: ClassVar[UpdateStart]
    SPECULATIVE: ClassVar[UpdateStart]
    """In backward, as far as there is memory for new values; undone where the step is another one."""
    COMMITTED: ClassVar[UpdateStart]
    """In backward and for good."""

@final
class ExpectedScale(_Enum):
    """The scale of gradients that speculative updates are made for."""

    EXACT: ClassVar[ExpectedScale]
    """One number: clipping does not act."""
    BETWEEN: ClassVar[ExpectedScale]
    """One of several, since it does."""

def earliest_recipe(
    trainable: bool,
    dtype: DType,
    states: Tier,
    start: UpdateStart,
    ahead: Ahead = Ahead.NOTHING,
    scale: ExpectedScale = ExpectedScale.EXACT,
) -> Recipe:
    """The recipe that begins earliest of those that there is memory for."""

class Rates:
    """How fast a machine is (csrc/plan/simulator.h)."""

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

def simulate(
    moments: list[dict[str, Any]],
    costs: Mapping[tuple[int, ArrayKind], tuple[int, int, int, int, bool]],
    plan: dict[str, Any],
    rates: Rates,
    *,
    compute_seconds: Sequence[float],
    updates: Sequence[Recipe],
    numels: Sequence[int],
    limit_bytes: int,
    least_tide_bytes: int = 0,
    fixed_bytes: int = 0,
    num_ranks: int = 1,
    activations: Sequence[Sequence[int]] = [],
    disk_bytes: Sequence[int] = [],
    dequantized_bytes: Sequence[int] = [],
    gradient_room_bytes: int = 9223372036854775807,
    visit_costs: Sequence[tuple[int, int, int]] = [],
    chunk_ranks: Sequence[int] = [],
) -> dict[str, Any]:
    """The steady step that a plan gives on a machine: seconds, busy seconds of each queue, ``stall_seconds`` by cause,
    bytes. ``activations``: by moment, the bytes of them that leave the device, that come back, and of these that the
    moment needs; empty: none. ``chunk_ranks``: of each chunk, how many of the ranks share it; empty: all.
    """

def play_program(
    moments: list[dict[str, Any]],
    costs: Mapping[tuple[int, ArrayKind], tuple[int, int, int, int, bool]],
    plan: dict[str, Any],
    rates: Rates,
    *,
    compute_seconds: Sequence[float],
    updates: Sequence[Recipe],
    numels: Sequence[int],
    limit_bytes: int,
    least_tide_bytes: int = 0,
    fixed_bytes: int = 0,
    num_ranks: int = 1,
    activations: Sequence[Sequence[int]] = [],
    disk_bytes: Sequence[int] = [],
    dequantized_bytes: Sequence[int] = [],
    gradient_room_bytes: int = 9223372036854775807,
    visit_costs: Sequence[tuple[int, int, int]] = [],
    chunk_ranks: Sequence[int] = [],
) -> list[dict[str, Any]]:
    """The instructions of the step that ``simulate`` gives, in the order in which they are issued.

    Each is ``{"op": str, "lane": Lane, "moment": int | None, "chunk": int | None, "kind": ArrayKind | None, "amount",
    "begin_seconds", "seconds"}``; amounts are bytes, or parameters of updates.
    """

def choose_plan(
    moments: list[dict[str, Any]],
    costs: Mapping[tuple[int, ArrayKind], tuple[int, int, int, int, bool]],
    rates: Rates,
    *,
    compute_seconds: Sequence[float],
    updates: Sequence[Recipe],
    numels: Sequence[int],
    limit_bytes: int,
    least_tide_bytes: int = 0,
    fixed_bytes: int = 0,
    prefetch_bytes: int = 0,
    num_ranks: int = 1,
    activations: Sequence[Sequence[int]] = [],
    disk_bytes: Sequence[int] = [],
    dequantized_bytes: Sequence[int] = [],
    idle_bytes: Sequence[int] = [],
    gradient_room_bytes: int = 9223372036854775807,
    visit_costs: Sequence[tuple[int, int, int]] = [],
    visitor_bytes: int = 0,
) -> dict[str, Any]:
    """The plan of the least predicted step, over how much room prefetches get and which updates begin in backward, or
    are made on the device.

    ``plan`` as ``make_plan`` gives it, the ``prefetch_bytes`` that it was made for, ``predicted`` as ``simulate`` gives
    it, and ``updates`` by chunk: those given, of which some wait for the norm or visit the device.
    """

def choose_step(
    layout: Layout,
    moments: list[dict[str, Any]],
    states_on_device: Sequence[bool],
    budget: DeviceBudget,
    rates: Rates,
    *,
    compute_seconds: Sequence[float],
    updates: Sequence[Recipe],
    start: UpdateStart,
    activations: Sequence[Sequence[int]] = [],
    dequantized_bytes: Sequence[int] = [],
) -> dict[str, Any]:
    """``choose_plan`` for a layout, as an engine chooses that has measured these times: its result, and ``problem``.
    Chunks visit the device where updates are committed in backward.
    """

def set_interrupt_delivery(function: Callable[[], object]) -> None:
    """What hooks of modules and gradients call while an interrupt is waiting; it may raise."""

def set_interrupt_waiting(waiting: bool) -> None:
    """Whether one is."""

def example_messages(num_chunks: int) -> dict[str, bytes]:
    """One message of each kind that ranks send each other in a step, by kind."""

def read_message(kind: str, message: bytes, num_chunks: int) -> None:
    """Reads it as a rank does. Raises StateError for what is no message of that kind."""

def agreed_vote(votes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What ranks make of their votes on the next plan: ``can_measure``, ``has_plan``, ``updates`` by chunk, and
    ``rates`` (or None) with ``compute_seconds`` and ``activations`` by moment.
    """

class HostAllocations:
    """Context: CPU tensors made here are host memory, not memory of the simulated device."""

    def __init__(self) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, kind: object, error: object, traceback: object, /) -> None: ...

@final
class DiskIo(_Enum):
    """How bytes go to a disk and come back (csrc/memory/disk_channel.h)."""

    AUTO: ClassVar[DiskIo]
    URING: ClassVar[DiskIo]
    THREADS: ClassVar[DiskIo]

class DiskFaults:
    """What a test makes a disk do (csrc/memory/disk_file.h). A count of -1: never."""

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
    """0: there is no disk."""
    io: DiskIo
    def __init__(self) -> None: ...

@final
class SlotFit(_Enum):
    """Whether a device slot may be larger than what is asked for."""

    LOOSE: ClassVar[SlotFit]
    EXACT: ClassVar[SlotFit]

class SlotPool:
    """Device slots within a limit (memory/slot_pool.h), for tests: of memory that nobody uses."""

    def __init__(self, limit_bytes: int, max_waste_ratio: float) -> None: ...
    def acquire(self, num_bytes: int, fit: SlotFit = SlotFit.LOOSE) -> int:
        """The slot's address, 0: there is no room."""
    def release(self, address: int) -> None: ...
    def trim(self, num_bytes: int) -> int: ...
    @property
    def num_allocations(self) -> int: ...
    @property
    def used_bytes(self) -> int: ...
    @property
    def idle_bytes(self) -> int: ...

class HostArena:
    """Host memory for payloads, not pinned."""

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
    """Untouched host memory of huge pages, float32 or not; freed with this."""

    def __init__(self, num_bytes: int) -> None: ...
    @property
    def address(self) -> int: ...

class DeviceMemory:
    """Memory of a device that no engine owns, for values on their way from an engine's core that ends to the next.
    It may be used on the current stream, and let go of when that is over.

    Args:
        cuda_device: the GPU's index; -1: of the simulated device, which does not count it.
        num_bytes: its size.

    Raises:
        MemoryBudgetError: there is no room.
    """

    def __init__(self, cuda_device: int, num_bytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...

class KeptRegions:
    """Host memory of an engine for another one; what is not used is given back to the system with this."""

    def __init__(self) -> None: ...
    @property
    def num_bytes(self) -> int: ...

class ChunkRanks:
    """Ranks of an engine that share a chunk."""

    def __init__(self) -> None:
        """All of them."""

    @staticmethod
    def own() -> ChunkRanks:
        """Each rank alone."""

    @staticmethod
    def groups_of(size: int) -> ChunkRanks:
        """Each of groups of ``size`` ranks, whose numbers follow each other."""

class Layout:
    """Which chunk and offset each parameter has."""

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
        """``states``, ``quantization`` and ``ranks``: of each parameter; none are float32, not quantised, and shared by
        all ranks.
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
        """The part in this rank's shard: (first element of the parameter, number of elements, offset in the shard)."""

    def train(self, chunk: int, /) -> None:
        """The chunk and its parameters are trainable from now on."""

    def chunk(self, chunk: int, /) -> dict[str, Any]:
        """``numel``, ``shard_numel``, ``dtype``, ``trainable``, ``params``; ``num_ranks`` that share it; ``master``:
        its :class:`StateType`; of one rank's share ``param_bytes``: of the compute value, ``home_bytes``: of that and
        the optimizer states, ``new_value_bytes``: what an update on the host takes at least to begin ahead of the step.
        """

class DelayOptions:
    """A simulated link, and random delays."""

    bytes_per_second: float
    latency_seconds: float
    max_random_seconds: float
    seed: int

    def __init__(self) -> None: ...

@final
class SpeculationMode(_Enum):
    """Whether updates on the host may start before the step is decided."""

    OFF: ClassVar[SpeculationMode]
    ON: ClassVar[SpeculationMode]
    COMMIT: ClassVar[SpeculationMode]

@final
class DeviceOptions:
    """What the engines of one process share."""

    cuda_device: int
    """-1: the simulated device."""
    device_limit_bytes: int
    host_limit_bytes: int
    limit_rounding_bytes: int
    left_by_tide_bytes: int
    """What activations are taken to leave on the simulated device for gradients; for tests."""
    follows_tide: bool
    """Whether chunks there get what activations leave at every moment; False: what they leave at their highest, as on
    CUDA, and slots may be larger than what they hold; for tests."""
    host_threads: HostThreadOptions
    delays: DelayOptions
    def __init__(self) -> None: ...

@final
class ResidencyOptions:
    """Which optimizer states are on the device."""

    warmup_payload_ratio: float
    margin_use_ratio: float
    payload_limit_bytes: int
    """Of what is fetched on demand; for tests that make memory scarce on a GPU."""
    state_placement: StatePlacement
    backwards: Backwards
    def __init__(self) -> None: ...

@final
class EngineOptions:
    """What a Runtime is made with; all fields have defaults."""

    device: DeviceOptions
    residency: ResidencyOptions
    disk: DiskOptions
    ample_limit_bytes: int
    ample_extra_bytes: int
    speculation: SpeculationMode
    param_shapes: list[list[int]]
    def __init__(self) -> None: ...
    def set_matrix_rule(self, function: Callable[[int, int, int, int, int], object], /) -> None:
        """``function(rows, columns, direction, momentum, master)`` is the rule of whole matrices
        (csrc/optim/matrix_rule.h).
        """

    def set_compute_format(self, function: Callable[[list[int], DType, int], object], /) -> None:
        """``function(shape, dtype, values)`` is the compute format (csrc/optim/compute_format.h)."""

class SgdMomentum(_Enum):
    """How SGD's momentum makes an update (csrc/engine/group_options.h)."""

    HEAVY_BALL: ClassVar[SgdMomentum]
    NESTEROV: ClassVar[SgdMomentum]

class AdamOptions:
    """Of Adam and AdamW: a parameter group in one step."""

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
    """Of Lion: a parameter group in one step."""

    def __init__(self, *, lr: float, beta1: float, beta2: float, weight_decay: float) -> None: ...

class SgdOptions:
    """Of SGD with momentum: a parameter group in one step."""

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
    """Is told about uses (csrc/engine/use_listener.h). Python may inherit from it."""

    def __init__(self) -> None: ...
    def open_scope(self, params: Sequence[int], until: HoldUntil, /) -> int: ...
    def close_scope(self) -> None: ...
    def tick(self) -> int: ...
    def touch(self, params: Sequence[int], /) -> int: ...
    def enter_backward(self, begin: int, end: int, params: Sequence[int], /) -> None: ...

@final
class BackwardEntry:
    """A pre-hook of an autograd node (csrc/bind/use_observer.h)."""

    def __call__(self, gradient: object, /) -> None: ...

@final
class UseObserver:
    """Turns uses into acquire and release (csrc/bind/use_observer.h)."""

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
    def before_forward(self, module: object, args: object, /) -> None: ...
    def after_forward(self, module: object, args: object, output: object, /) -> None: ...
    @property
    def params(self) -> list[int]: ...
    @property
    def touched(self) -> list[int]: ...
    @property
    def until(self) -> HoldUntil: ...
    def finish_learning(self, params: Sequence[int], /) -> None: ...

class Way(_Enum):
    """What a function does with a parameter's memory (csrc/bind/torch_function.h)."""

    LOOK: ClassVar[Way]
    READ: ClassVar[Way]
    READ_ONCE: ClassVar[Way]
    ALIAS: ClassVar[Way]
    MAY_WRITE: ClassVar[Way]

def torch_function(
    *,
    types: tuple[type, ...],
    way_of: Callable[[Callable[..., Any]], Way],
    write: Callable[..., Any],
    refuse: Callable[..., Any],
    as_view: Callable[..., Any],
) -> Callable[..., Any]:
    """A ``__torch_function__`` (csrc/bind/torch_function.h)."""

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
    def has_folded(self) -> bool: ...

@final
class Collectives:
    """What ranks do together (runtime/collectives.h)."""

    def __init__(
        self, gather: collective.Communicator, scatter: collective.Communicator, control: collective.ControlGroup
    ) -> None: ...
    def check_same_plan(self, fingerprint: int) -> None:
        """Raises StateError on every rank unless all have the same."""

    @property
    def num_ranks(self) -> int: ...

class Runtime(UseListener):
    """The core's façade (csrc/engine/runtime.h; the course of a step: csrc/engine/step_course.h)."""

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
    def read_ranges(
        self, ranges: Sequence[tuple[int, ArrayKind, int, int, int, int]], files: Sequence[tuple[int, int]], /
    ) -> None:
        """Ranges are (parameter, kind, begin, end, file or -1, offset or address), files (descriptor, bytes)."""

    def write_ranges(
        self, ranges: Sequence[tuple[int, ArrayKind, int, int, int, int]], files: Sequence[tuple[int, int]], /
    ) -> None: ...
    def stored_bytes(self, param: int) -> list[int]:
        """Bytes of an element of each array that the parameter consists of; none: they cannot be copied as stored."""

    def is_stored_on_device(self, param: int) -> bool: ...
    def stored_on_device(self, param: int, /) -> list[int]:
        """Where this rank's part of each of these arrays is, for the current stream."""

    def write_stored(self, param: int, ranges: Sequence[tuple[int, int, int, int, Tier]], /) -> None:
        """[(array, begin, end, address, tier)]: elements of this rank's part, as stored_on_device() has them."""

    def drop_derivable(self) -> None:
        """Frees what the device has and could have again from other arrays or ranks."""

    def return_cached(self) -> None:
        """What the allocator has cached goes back to the device: on CUDA it counts as tide."""

    def copy_on_device(self, to: int, from_: int, num_bytes: int) -> None: ...
    def leave_stored(self, chunk: int) -> None:
        """Frees all that the chunk has, whose values are elsewhere; close() comes soon."""

    def set_aside(
        self, ranges: Sequence[tuple[int, ArrayKind, int, int, int, int]], /
    ) -> tuple[list[int], KeptRegions, KeptRegions]:
        """Where each range is, the memory in which they are unless it is their own address, and all other memory."""

    def read_gradient(self, param: int, values: int, /) -> None: ...
    def write_gradient(self, param: int, values: int, where: Tier, /) -> None: ...
    def set_visits(self, chunks: Sequence[bool], piece_numel: int = 16777216) -> None:
        """For tests: whose updates the device makes for the host until the next plan by time, by chunk, in pieces of
        so many elements.
        """

    def adopt_timeline(self, moments: list[dict[str, Any]], times: dict[str, Any] | None = None) -> None:
        """Plans the first step as an earlier run's: its ``timeline`` and its ``step_times``."""

    def make_states(self, chunks: Sequence[int], /) -> None:
        """Optimizer states of chunks that were frozen, all of them or (MemoryBudgetError) none."""

    def discard_states(self, chunks: Sequence[int], /) -> None: ...
    def train(self, params: Sequence[int], /) -> None:
        """Parameters that were not trained so far, in chunks that have states."""

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
        """The running step goes as planned so far."""

    @property
    def num_pressure_evictions(self) -> int: ...
    def begin_forward(self, tracking: Tracking, attempt: Attempt, /) -> None: ...
    def end_forward(self) -> None: ...
    def begin_backward(
        self, expected_groups: Sequence[AdamOptions | LionOptions | SgdOptions] = [], expected_grad_scale: float = 1.0
    ) -> None: ...
    def fold_gradient(self, param: int, data: int, /) -> None: ...
    def end_backward(self) -> None: ...
    def keep_joint_backward(self) -> bool:
        """Whether the backward of another engine's loss gave gradients; if not, it counts for nothing."""

    def abort_forward(self) -> None: ...
    def abort_backward(self) -> int: ...
    def undo_forward(self) -> None: ...
    def meet_ranks(self) -> None: ...
    def tide_bytes(self) -> int:
        """Device memory that everything but chunks takes now, with what PyTorch keeps for later allocations."""

    def host_room_of_activations(self) -> int:
        """Bytes that host memory can still take of them."""

    def take_live_tide_peak(self) -> int:
        """The highest tide in bytes since the last call, without memory that PyTorch keeps for later allocations."""

    def keep_absent_activations(self, most_bytes: int, /) -> None:
        """What the running step has had on the host will stay on the device, where the tide is ``most_bytes`` at most
        with it: the next plan counts it.
        """

    def stash_activation(self, data: int, num_bytes: int, /) -> int:
        """A ticket for bytes that are copied to host memory; -1 where that has no room."""

    def is_stashed(self, ticket: int, /) -> bool: ...
    def finish_stashing(self, ticket: int, /) -> None: ...
    def fetch_activation(self, ticket: int, to: int, /) -> None: ...
    def await_activation(self, ticket: int, /) -> None: ...
    def drop_activation(self, ticket: int, /) -> None: ...
    def vacate_device(self, what: Vacate, /) -> None: ...
    def prepare_step(self, left_out: Sequence[int] = []) -> float:
        """Sum of squares of all gradients but those of parameters ``left_out``."""

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
        """For measurements: the next step chooses its updates anew, and the one after it follows a new plan."""
    def set_group(self, param: int, group: int, /) -> None: ...
    def step_count(self, param: int, /) -> int: ...
    def set_step_count(self, param: int, count: int, /) -> None: ...
    def start_trace(self) -> None:
        """The next training step that begins is traced."""

    def take_trace(self) -> dict[str, Any] | None:
        """The traced step, once; None before it is over. Waits for the updates that it started.

        ``outcome``, ``seconds``, ``optimizer_begin_seconds``, ``device_limit_bytes``; ``moments``, as in ``timeline``:
        ``{"phase", "acquired": [(chunk, kind)], "launched_seconds", "begin_seconds", "seconds", "stalled_seconds",
        "compute_seconds", "tide_peak_bytes", "tide_bytes", "idle_bytes", "payload_bytes": {kind: int}}``; ``spans``:
        ``{"track", "cause", "chunk", "kind", "num_bytes", "numel", "begin_seconds", "seconds", "owner", "dropped"}``;
        ``samples``: ``{"seconds", "tide_bytes", "idle_bytes", "payload_bytes"}``. Seconds count from the step's first
        forward.
        """

    def start_stall_trace(self) -> None:
        """As :meth:`start_trace`, for :meth:`take_stalls`; each has its own request."""

    def take_stalls(self) -> dict[str, Any] | None:
        """What the traced step waited for, once: ``seconds`` of the step and ``stalled_seconds`` by ``StallCause``.
        None before it is over; waits as :meth:`take_trace` does.
        """

    def report(self) -> dict[str, Any]: ...
    def reset_report(self) -> None: ...
    def param_state(self, param: int, /) -> str: ...
    def chunk_state(self, chunk: int, /) -> str: ...
    def is_on_device(self, chunk: int, kind: ArrayKind, /) -> bool: ...
    def home(self, chunk: int, /) -> Tier:
        """Where the chunk's optimizer states belong between their uses."""

    @property
    def disk_faults(self) -> DiskFaults:
        """What a test makes the disk do."""

    def timeline(self) -> list[dict[str, Any]]:
        """The last step's moments, as ``make_plan`` takes them."""

    def plan(self) -> dict[str, Any]:
        """The current plan, as ``make_plan`` gives it."""

    def plan_problem(self) -> dict[str, Any]:
        """What the current plan solves: the arguments of ``make_plan`` for the last timeline."""

    def step_times(self) -> dict[str, Any] | None:
        """What a measured step takes: ``rates``; ``compute_seconds`` and ``activations`` by moment, as of ``simulate``;
        and ``updates`` by chunk. None before one was measured.
        """

    def predicted_step(self) -> dict[str, Any] | None:
        """The step that the current plan is predicted to give, as ``simulate`` says it. None without times."""

class quant:
    """The leaf kernels of quantised values (a submodule). Addresses are those of memory of the parameter's elements."""

    NF4_VALUES: ClassVar[list[float]]
    DYNAMIC_VALUES: ClassVar[list[float]]
    @staticmethod
    def num_bytes(type: QuantType, numel: int) -> int:
        """What the array of a parameter of so many elements takes."""
    @staticmethod
    def layout(type: QuantType, numel: int) -> dict[str, int]:
        """Where in that array each part begins, in bytes: codes, scales; of NF4 also block_scales and offset."""
    @staticmethod
    def quantize(isa: str, type: QuantType, values: int, numel: int, array: int, num_threads: int) -> None:
        """Float32 ``values`` into ``array``, of :meth:`num_bytes` zeros.

        Raises:
            ValueError: one is not finite, or this processor lacks ``isa``.
        """
    @staticmethod
    def dequantize(isa: str, type: QuantType, array: int, numel: int, out: int, dtype: DType, num_threads: int) -> None:
        """And back, into ``out``."""
    @staticmethod
    def cuda_dequantize(type: QuantType, array: int, numel: int, out: int, dtype: DType, stream: int) -> None:
        """The same on the device; ``stream`` is a ``cudaStream_t``. With the CUDA part alone."""

class optim:
    """Adam's leaf kernels and the loss scaler (a submodule)."""

    OPEN_LOG_BYTES: ClassVar[int]
    STATE_BLOCK: ClassVar[int]
    OPEN_PIECE: ClassVar[int]
    SQUARES_BLOCK: ClassVar[int]

    class LossScaler:
        """The factor that keeps float16 gradients in range; ``loss_scale`` above 0 is constant, 0 dynamic."""

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
            """Once per optimizer step, also a skipped one."""

        def state(self) -> dict[str, float | int]:
            """What ``set_state`` takes."""

        def set_state(
            self, *, scale: float, iteration: int, last_overflow_iteration: int, hysteresis_left: int
        ) -> None:
            """Restores ``state``. Raises ValueError when no run can lead to it."""

    @staticmethod
    def isa() -> str:
        """The ISA whose kernels this process uses."""

    @staticmethod
    def supported_isas() -> list[str]:
        """The ISAs this processor has, narrowest first."""

    class StateArray:
        """An array of an optimizer state: its type, its address, and that of its scales, which states of 8 bits have.

        Where one is asked for, an address alone is an array of float32. (csrc/common/dtype.h)
        """

        def __init__(self, data: int, type: StateType = StateType.FLOAT32, scales: int = 0) -> None: ...

    class RandomKey:
        """What random bits are made of (csrc/optim/kernels.h, random bits)."""

        def __init__(self, a: int = 0, b: int = 0, first: int = 0) -> None: ...
        @property
        def a(self) -> int: ...
        @property
        def b(self) -> int: ...
        @property
        def first(self) -> int: ...

    @staticmethod
    def random_key(seed: int, step: int, param: int, first: int) -> optim.RandomKey:
        """The key of one step and parameter, for a range that starts at its element ``first``."""

    @staticmethod
    def expand_state(isa: str, state: optim.StateArray, out: int, numel: int) -> None:
        """The values of a state, in float32."""

    @staticmethod
    def compress_state(
        isa: str, in_: int, state: optim.StateArray, numel: int, *, key: optim.RandomKey | None = None
    ) -> None:
        """Stores float32 values as ``adam`` stores a momentum."""

    @staticmethod
    def cuda_expand_state(type: StateType, data: int, scales: int, out: int, numel: int, stream: int) -> None:
        """As ``expand_state``."""

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
        """As ``compress_state``."""

    @staticmethod
    def adam(
        isa: str,
        master: optim.StateArray,
        momentum: optim.StateArray,
        variance: optim.StateArray,
        grad: int,
        grad_dtype: DType,
        param: int,
        param_dtype: DType,
        numel: int,
        threads: int | ThreadPool,
        *,
        key: optim.RandomKey | None = None,
        **kwargs: float,
    ) -> None:
        """One Adam step over ``numel`` elements at raw addresses (csrc/optim/kernels.h).

        ``master``, ``momentum`` and ``variance`` are float32 or StateArrays, ``grad`` and ``param`` of their dtypes;
        ``param`` may be ``grad``, or 0. ``threads``: a pool, or how many threads. ``key``: by default zeros.
        ``kwargs``: the fields of AdamScalars, all of them.
        Raises ValueError for null arrays, an ISA this processor lacks, or a ``param`` over a ``grad`` of another size.
        """

    @staticmethod
    def adam_param(
        isa: str,
        master: optim.StateArray,
        momentum: optim.StateArray,
        variance: optim.StateArray,
        grad: int,
        grad_dtype: DType,
        param: int,
        param_dtype: DType,
        numel: int,
        threads: int | ThreadPool,
        *,
        key: optim.RandomKey | None = None,
        **kwargs: float,
    ) -> None:
        """As ``adam``, but nothing is written but ``param``, which is apart from ``grad``."""

    @staticmethod
    def adam_param_between(
        isa: str,
        master: optim.StateArray,
        momentum: optim.StateArray,
        variance: optim.StateArray,
        grad: int,
        grad_dtype: DType,
        param: int,
        param_dtype: DType,
        numel: int,
        num_threads: int,
        most_grad_scale: float,
        logs: int,
        **kwargs: float,
    ) -> None:
        """The 16-bit values that ``adam_param`` stores for every ``grad_scale`` up to ``most_grad_scale``; what makes
        the others goes to ``logs``, of ``OPEN_LOG_BYTES`` for each ``OPEN_PIECE`` elements.
        """

    @staticmethod
    def adam_param_open(
        isa: str,
        master: optim.StateArray,
        momentum: optim.StateArray,
        variance: optim.StateArray,
        grad: int,
        grad_dtype: DType,
        param: int,
        param_dtype: DType,
        numel: int,
        num_threads: int,
        logs: int,
        **kwargs: float,
    ) -> None:
        """As ``adam_param``, of the values that ``adam_param_between`` has left to ``logs``."""

    @staticmethod
    def adam_apart(
        isa: str,
        master: optim.StateArray,
        momentum: optim.StateArray,
        variance: optim.StateArray,
        grad: int,
        grad_dtype: DType,
        param: int,
        param_dtype: DType,
        numel: int,
        num_threads: int,
        new_states: Sequence[optim.StateArray],
        *,
        key: optim.RandomKey | None = None,
        **kwargs: float,
    ) -> None:
        """As ``adam``, but the new states go to ``new_states`` (master, momentum, variance), and the old ones stay."""

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
        """The sum of `count` partials from the first on, float64: rounded, and what that rounding lost."""

    # Only in a module with the CUDA part: the same on the current device, enqueued on `stream`.
    @staticmethod
    def momentum_step(
        isa: str,
        rule: MomentumRule,
        master: optim.StateArray,
        momentum: optim.StateArray,
        grad: int,
        grad_dtype: DType,
        param: int,
        param_dtype: DType,
        numel: int,
        num_threads: int,
        *,
        key: optim.RandomKey | None = None,
        **kwargs: float,
    ) -> None:
        """One step of an optimizer of one moment, with arrays as ``adam`` takes them.

        ``kwargs``: the fields of MomentumScalars (csrc/optim/kernels.h) that ``rule`` reads, all of them.
        Raises ValueError as ``adam`` does.
        """

    @staticmethod
    def momentum_param(
        isa: str,
        rule: MomentumRule,
        master: optim.StateArray,
        momentum: optim.StateArray,
        grad: int,
        grad_dtype: DType,
        param: int,
        param_dtype: DType,
        numel: int,
        num_threads: int,
        *,
        key: optim.RandomKey | None = None,
        **kwargs: float,
    ) -> None:
        """As ``momentum_step``, but nothing is written but ``param``, which is apart from ``grad``; the master is of
        float32.
        """

    @staticmethod
    def momentum_apart(
        isa: str,
        rule: MomentumRule,
        master: optim.StateArray,
        momentum: optim.StateArray,
        grad: int,
        grad_dtype: DType,
        param: int,
        param_dtype: DType,
        numel: int,
        num_threads: int,
        new_states: Sequence[optim.StateArray],
        *,
        key: optim.RandomKey | None = None,
        **kwargs: float,
    ) -> None:
        """As ``momentum_step``, but the new master and momentum go to ``new_states``, and the old ones stay."""

    @staticmethod
    def momentum_param_between(
        isa: str,
        rule: MomentumRule,
        master: optim.StateArray,
        momentum: optim.StateArray,
        grad: int,
        grad_dtype: DType,
        param: int,
        param_dtype: DType,
        numel: int,
        num_threads: int,
        most_grad_scale: float,
        logs: int,
        **kwargs: float,
    ) -> None:
        """The 16-bit values that ``momentum_param`` stores for every ``grad_scale`` up to ``most_grad_scale``, as
        ``adam_param_between``.
        """

    @staticmethod
    def momentum_param_open(
        isa: str,
        rule: MomentumRule,
        master: optim.StateArray,
        momentum: optim.StateArray,
        grad: int,
        grad_dtype: DType,
        param: int,
        param_dtype: DType,
        numel: int,
        num_threads: int,
        logs: int,
        **kwargs: float,
    ) -> None:
        """As ``momentum_param``, of the values that ``momentum_param_between`` has left to ``logs``."""

    @staticmethod
    def cuda_momentum_step(
        rule: MomentumRule,
        master: optim.StateArray,
        momentum: optim.StateArray,
        grad: int,
        grad_dtype: DType,
        param: int,
        param_dtype: DType,
        numel: int,
        stream: int,
        *,
        key: optim.RandomKey | None = None,
        **kwargs: float,
    ) -> None:
        """As ``momentum_step``."""

    @staticmethod
    def adam_split(
        isa: str,
        lower: int,
        momentum: int,
        variance: int,
        grad: int,
        grad_dtype: DType,
        param: int,
        numel: int,
        num_threads: int,
        **kwargs: float,
    ) -> None:
        """As ``adam``, of masters that are split into a bfloat16 ``param``, 16-bit ``lower`` halves and signs of the
        variance.
        """

    @staticmethod
    def adam_put_values(
        isa: str,
        lower: int,
        momentum: optim.StateArray,
        variance: optim.StateArray,
        grad: int,
        param: int,
        numel: int,
        num_threads: int,
        logs: int,
        most_grad_scale: float,
        capacity: int,
        **kwargs: float,
    ) -> None:
        """Puts in place of bfloat16 params, the upper halves of split masters, what ``adam`` makes of them for every
        ``grad_scale`` up to ``most_grad_scale``; what is open goes to logs of ``OPEN_LOG_BYTES`` for each
        ``OPEN_PIECE`` elements, up to ``capacity`` values of each.
        """

    @staticmethod
    def adam_put_open_values(
        isa: str,
        lower: int,
        momentum: optim.StateArray,
        variance: optim.StateArray,
        grad: int,
        param: int,
        numel: int,
        num_threads: int,
        logs: int,
        *,
        key: optim.RandomKey | None = None,
        **kwargs: float,
    ) -> None:
        """Those that ``adam_put_values`` has left to ``logs``."""

    @staticmethod
    def adam_put_states(
        isa: str,
        lower: int,
        momentum: optim.StateArray,
        variance: optim.StateArray,
        grad: int,
        param: int,
        numel: int,
        num_threads: int,
        logs: int,
        least_grad_scale: float,
        *,
        key: optim.RandomKey | None = None,
        **kwargs: float,
    ) -> int:
        """Updates the states behind them. Returns how many params are not those that the update makes."""

    @staticmethod
    def adam_take_values_back(
        isa: str,
        lower: int,
        momentum: optim.StateArray,
        variance: optim.StateArray,
        grad: int,
        param: int,
        numel: int,
        num_threads: int,
        logs: int,
        **kwargs: float,
    ) -> None:
        """Undoes ``adam_put_values`` with the same arguments."""

    @staticmethod
    def split_master(isa: str, master: int, param: int, lower: int, variance: int, numel: int) -> None:
        """Splits float32 masters into bfloat16 params, 16-bit lower halves and signs of the variance."""

    @staticmethod
    def join_master(isa: str, param: int, lower: int, variance: int, master: int, numel: int) -> None:
        """What ``split_master`` split."""

    @staticmethod
    def cuda_adam_split(
        lower: int,
        momentum: int,
        variance: int,
        grad: int,
        grad_dtype: DType,
        param: int,
        numel: int,
        stream: int,
        **kwargs: float,
    ) -> None:
        """As ``adam_split``."""

    @staticmethod
    def cuda_adam(
        master: optim.StateArray,
        momentum: optim.StateArray,
        variance: optim.StateArray,
        grad: int,
        grad_dtype: DType,
        param: int,
        param_dtype: DType,
        numel: int,
        stream: int,
        *,
        key: optim.RandomKey | None = None,
        **kwargs: float,
    ) -> None:
        """As ``adam``."""

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
        """A group of ranks: flat collectives in place, and messages. All ranks call them in the same order, from one
        thread at a time.

        CUDA: enqueued on PyTorch's current stream, return at once. CPU: return when done.
        """

        @property
        def rank(self) -> int: ...
        @property
        def size(self) -> int: ...
        def all_gather(self, whole: int, shard_bytes: int) -> None:
            """Shard r of ``whole`` comes from rank r. Raises RankFailure."""

        def reduce_scatter_mean(self, whole: int, shard: int, scratch: int, shard_numel: int, dtype: DType) -> None:
            """Own shard of the mean over ranks into ``shard``; ``scratch`` is as large as ``whole``."""

        def exchange(self, sends: Sequence[tuple[int, int, int]], receives: Sequence[tuple[int, int, int]]) -> None:
            """Messages to and from other ranks, all at once: (peer, address, bytes) each. What two ranks send each
            other is matched in the order of their lists. Raises RankFailure.
            """

        def abort(self) -> None:
            """Stops what is running, for failures; any thread."""

        def check(self) -> None:
            """Raises RankFailure when the communicator has failed; any thread."""

        def oldest_pending_seconds(self) -> float:
            """For how long the oldest unfinished collective has been enqueued or running; any thread."""

        def close(self) -> None:
            """Frees what it holds, when nothing of it runs on any rank; waits for no other rank. Idempotent."""

    class ControlGroup:
        """Small values over the hosts, for agreement between ranks; blocking."""

        @property
        def rank(self) -> int: ...
        @property
        def size(self) -> int: ...
        def enter(self, call: str) -> None:
            """The call that this rank is in from now on; empty: none."""

        @property
        def call(self) -> str: ...
        def exchange(self, mine: bytes, what: str = "") -> list[bytes]:
            """Everybody's value by rank, of any lengths. ``what`` and the call must be the same on all ranks. Raises
            RankFailure, RankMismatch.
            """

        def distribute(self, to_each: Sequence[bytes], what: str = "") -> list[bytes]:
            """As ``exchange``, with another value for each rank; what comes from each."""

        def abort(self) -> None:
            """Stops what is running, for failures; any thread."""

        def close(self) -> None:
            """Frees what it holds; waits for no other rank. Idempotent."""

    @staticmethod
    def make_single_communicator() -> collective.Communicator: ...
    @staticmethod
    def make_single_control() -> collective.ControlGroup: ...
    @staticmethod
    def make_c10d_communicator(group_name: str, members: Sequence[int] = []) -> collective.Communicator:
        """``members``: the ranks' numbers in the run, for errors, where they are not those of the group."""

    @staticmethod
    def make_c10d_control(
        group_name: str, timeout_seconds: float, members: Sequence[int] = []
    ) -> collective.ControlGroup: ...
    @staticmethod
    def mean_of_ranks(shards: int, num_ranks: int, out: int, dtype: DType, numel: int) -> None:
        """The mean of ``num_ranks`` ranges of ``numel`` elements that lie end to end, in float32, in their order."""

    # Only in a module with the CUDA part.
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
