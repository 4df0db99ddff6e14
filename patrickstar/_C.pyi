def build_info() -> dict:
    """What this module was compiled with: compiler, cplusplus, torch, and cuda and nccl or None."""
    ...
class StateError(RuntimeError):
    ...
class MemoryBudgetError(RuntimeError):
    ...
class SystemError(RuntimeError):
    ...
class DiskError(RuntimeError):
    ...
class RankMismatch(StateError):
    ...
class RankFailure(RuntimeError):
    ...
class DType:
    """Element type of a chunk's arrays."""
    ...

    def __init__(self, value: int) -> None:
        ...

    @property
    def name(self) -> str:
        ...
    __members__: ClassVar[dict]

    @property
    def value(self) -> int:
        ...

    def __int__(self, /) -> int:
        ...

    def __index__(self, /) -> int:
        ...
    FLOAT32: ClassVar[DType]
    BFLOAT16: ClassVar[DType]
    FLOAT16: ClassVar[DType]
class StateType:
    """Element type of an optimizer state (common/dtype.h)."""
    ...

    def __init__(self, value: int) -> None:
        ...

    @property
    def name(self) -> str:
        ...
    __members__: ClassVar[dict]

    @property
    def value(self) -> int:
        ...

    def __int__(self, /) -> int:
        ...

    def __index__(self, /) -> int:
        ...
    FLOAT32: ClassVar[StateType]
    LOWER_HALF: ClassVar[StateType]
    BFLOAT16: ClassVar[StateType]
    SIGNED8: ClassVar[StateType]
    UNSIGNED8: ClassVar[StateType]
    NONE: ClassVar[StateType]
class GradientPlace:
    """Where a gradient waits for the step (chunk/layout.h)."""
    ...

    def __init__(self, value: int) -> None:
        ...

    @property
    def name(self) -> str:
        ...
    __members__: ClassVar[dict]

    @property
    def value(self) -> int:
        ...

    def __int__(self, /) -> int:
        ...

    def __index__(self, /) -> int:
        ...
    OF_PARAM: ClassVar[GradientPlace]
    OWN: ClassVar[GradientPlace]
class StateFormat:
    """The types of a parameter's optimizer states (chunk/layout.h)."""
    ...

    def __init__(self, master: StateType=StateType.FLOAT32, momentum: StateType=StateType.FLOAT32, variance: StateType=StateType.FLOAT32, gradient: GradientPlace=GradientPlace.OF_PARAM) -> None:
        ...

    @property
    def master(self) -> StateType:
        ...

    @property
    def momentum(self) -> StateType:
        ...

    @property
    def variance(self) -> StateType:
        ...

    @property
    def gradient(self) -> GradientPlace:
        ...
class ArrayKind:
    """The arrays of a chunk (common/types.h)."""
    ...

    def __init__(self, value: int) -> None:
        ...

    @property
    def name(self) -> str:
        ...
    __members__: ClassVar[dict]

    @property
    def value(self) -> int:
        ...

    def __int__(self, /) -> int:
        ...

    def __index__(self, /) -> int:
        ...
    PARAM: ClassVar[ArrayKind]
    GRAD: ClassVar[ArrayKind]
    GRAD_SUM: ClassVar[ArrayKind]
    PARAM_SHARD: ClassVar[ArrayKind]
    GRAD_SHARD: ClassVar[ArrayKind]
    MASTER: ClassVar[ArrayKind]
    MOMENTUM: ClassVar[ArrayKind]
    VARIANCE: ClassVar[ArrayKind]
    QUANTIZED: ClassVar[ArrayKind]
class QuantType:
    """How the values of a frozen parameter are stored (common/quantized.h)."""
    ...

    def __init__(self, value: int) -> None:
        ...

    @property
    def name(self) -> str:
        ...
    __members__: ClassVar[dict]

    @property
    def value(self) -> int:
        ...

    def __int__(self, /) -> int:
        ...

    def __index__(self, /) -> int:
        ...
    NONE: ClassVar[QuantType]
    NF4: ClassVar[QuantType]
    INT8: ClassVar[QuantType]
class Tier:
    """Where memory is."""
    ...

    def __init__(self, value: int) -> None:
        ...

    @property
    def name(self) -> str:
        ...
    __members__: ClassVar[dict]

    @property
    def value(self) -> int:
        ...

    def __int__(self, /) -> int:
        ...

    def __index__(self, /) -> int:
        ...
    HOST: ClassVar[Tier]
    DEVICE: ClassVar[Tier]
    DISK: ClassVar[Tier]
def check_transition(arg0: str, arg1: str, /) -> None:
    """Throws StateError when chunk/chunk_store.h has no such move."""
    ...
def num_available_cpus() -> int:
    """Processors this process may run on."""
    ...
def allowed_cpus() -> list[int]:
    """The calling thread's affinity mask, ascending."""
    ...
def parse_cpu_list(text: str) -> list[int]:
    """CPUs of the kernel's notation, "0-3,8,10-11"."""
    ...
def format_cpu_list(cpus: Sequence[int]) -> str:
    """CPUs in the kernel's notation."""
    ...
def read_cpu_topology(cpus: Sequence[int], root: str='') -> CpuTopology:
    """What /sys and /proc below root say about these CPUs (common/cpu_topology.h)."""
    ...
class CpuTopology:
    """The CPUs that a process may use (common/cpu_topology.h)."""
    ...

    @property
    def cpus(self) -> list:
        ...

    @property
    def quota_cpus(self) -> float:
        ...
class Affinity:
    ...

    def __init__(self, value: int) -> None:
        ...

    @property
    def name(self) -> str:
        ...
    __members__: ClassVar[dict]

    @property
    def value(self) -> int:
        ...

    def __int__(self, /) -> int:
        ...

    def __index__(self, /) -> int:
        ...
    PINNED: ClassVar[Affinity]
    FREE: ClassVar[Affinity]
class LaunchingCore:
    ...

    def __init__(self, value: int) -> None:
        ...

    @property
    def name(self) -> str:
        ...
    __members__: ClassVar[dict]

    @property
    def value(self) -> int:
        ...

    def __int__(self, /) -> int:
        ...

    def __index__(self, /) -> int:
        ...
    RESERVED: ClassVar[LaunchingCore]
    SHARED: ClassVar[LaunchingCore]
class HostThreadOptions:
    """Which threads compute (common/host_threads.h)."""
    ...

    def __init__(self) -> None:
        ...
    num_threads: int
    affinity: Affinity
    launching_core: LaunchingCore
    sharing_index: int
    num_sharing: int
class HostThreads:
    """Threads, where they are pinned, and their NUMA nodes."""
    ...

    @property
    def num_threads(self) -> int:
        ...

    @property
    def worker_cpus(self) -> list[int]:
        ...

    @property
    def nodes(self) -> list[int]:
        ...
def choose_host_threads(topology: CpuTopology, options: HostThreadOptions) -> HostThreads:
    """How many threads compute, and on which CPUs (common/host_threads.h)."""
    ...
class Priority:
    """Which loops workers help first (common/thread_pool.h)."""
    ...

    def __init__(self, value: int) -> None:
        ...

    @property
    def name(self) -> str:
        ...
    __members__: ClassVar[dict]

    @property
    def value(self) -> int:
        ...

    def __int__(self, /) -> int:
        ...

    def __index__(self, /) -> int:
        ...
    URGENT: ClassVar[Priority]
    BACKGROUND: ClassVar[Priority]
class ThreadPool:
    """Threads that share the work of loops (common/thread_pool.h)."""
    ...

    def __init__(self, num_threads: int, worker_cpus: Sequence[int]=[]) -> None:
        ...

    @property
    def num_threads(self) -> int:
        ...

    @property
    def num_urgent(self) -> int:
        ...

    @property
    def pinned_cpus(self) -> list[int]:
        ...

    def parallel_for(self, size: int, grain: int, fn: Callable, priority: Priority=Priority.URGENT) -> None:
        """Calls fn(begin, end) on disjoint ranges that cover [0, size)."""
        ...
class HostEvent:
    """The end of some work (common/event.h)."""
    ...

    def wait(self) -> None:
        """Raises what the work has failed with."""
        ...

    def settle(self) -> None:
        ...

    @property
    def is_over(self) -> bool:
        ...
class WorkQueue:
    """A queue of tasks with a thread of its own (common/work_queue.h)."""
    ...

    def __init__(self) -> None:
        ...

    def submit(self, failure: str='') -> HostEvent:
        ...
def crc32c(data: Buffer, crc: int=0) -> int:
    """CRC-32C of the bytes of a contiguous buffer, after those of checksum crc (common/crc32c.h)."""
    ...
def crc32c_portable(data: Buffer, crc: int=0) -> int:
    """The same by tables, on any processor."""
    ...
class MomentumRule:
    """The optimizers of one moment (optim/kernels.h)."""
    ...

    def __init__(self, value: int) -> None:
        ...

    @property
    def name(self) -> str:
        ...
    __members__: ClassVar[dict]

    @property
    def value(self) -> int:
        ...

    def __int__(self, /) -> int:
        ...

    def __index__(self, /) -> int:
        ...
    LION: ClassVar[MomentumRule]
    SGD: ClassVar[MomentumRule]
    NESTEROV: ClassVar[MomentumRule]
class optim:
    """Adam's leaf kernels and the loss scaler."""
    ...
    SQUARES_BLOCK: ClassVar[int]
    OPEN_PIECE: ClassVar[int]
    OPEN_LOG_BYTES: ClassVar[int]

    @staticmethod
    def isa() -> str:
        """The ISA whose kernels this process uses."""
        ...

    @staticmethod
    def supported_isas() -> list[str]:
        """The ISAs this processor has, narrowest first."""
        ...
    STATE_BLOCK: ClassVar[int]

    class StateArray:
        """An array of an optimizer state: its type, its address, and that of its scales, which states of 8 bits have (common/dtype.h). An address alone is one of float32."""
        ...

        def __init__(self, data: int, type: StateType=StateType.FLOAT32, scales: int=0) -> None:
            ...

    class RandomKey:
        """What random bits are made of (optim/kernels.h, random bits)."""
        ...

        def __init__(self, a: int=0, b: int=0, first: int=0) -> None:
            ...

        @property
        def a(self) -> int:
            ...

        @property
        def b(self) -> int:
            ...

        @property
        def first(self) -> int:
            ...

    @staticmethod
    def random_key(seed: int, step: int, param: int, first: int) -> optim.RandomKey:
        """The key of one step and parameter, for a range that starts at its element first."""
        ...

    @staticmethod
    def expand_state(isa: str, state: optim.StateArray, out: int, numel: int) -> None:
        """The values of a state, in float32."""
        ...

    @staticmethod
    def compress_state(isa: str, in_: int, state: optim.StateArray, numel: int, *, key: optim.RandomKey | None | None=None) -> None:
        """Stores float32 values as adam stores a momentum."""
        ...

    @staticmethod
    def adam(isa: str, master: optim.StateArray, momentum: optim.StateArray, variance: optim.StateArray, grad: int, grad_dtype: DType, param: int, param_dtype: DType, numel: int, threads: ThreadPool | int, *, key: optim.RandomKey | None | None=None, **kwargs) -> None:
        """One Adam step over numel elements at raw addresses (optim/kernels.h): master, momentum, variance float32 or a StateArray each, grad and param of their dtypes; param may be grad, or 0. threads: a ThreadPool, or a number of threads. Keyword arguments: the fields of AdamScalars, all of them. Raises ValueError for null arrays, an ISA this processor lacks, or a param over a grad of another size."""
        ...

    @staticmethod
    def adam_param(isa: str, master: optim.StateArray, momentum: optim.StateArray, variance: optim.StateArray, grad: int, grad_dtype: DType, param: int, param_dtype: DType, numel: int, threads: ThreadPool | int, *, key: optim.RandomKey | None | None=None, **kwargs) -> None:
        """As adam, but nothing is written but param, which is apart from grad; the master is of float32."""
        ...

    @staticmethod
    def adam_apart(isa: str, master: optim.StateArray, momentum: optim.StateArray, variance: optim.StateArray, grad: int, grad_dtype: DType, param: int, param_dtype: DType, numel: int, num_threads: int, new_states: Sequence[optim.StateArray], *, key: optim.RandomKey | None | None=None, **kwargs) -> None:
        """As adam, but the new master, momentum and variance go to new_states and the old ones stay as they are."""
        ...

    @staticmethod
    def cast_from_float(isa: str, in_: int, out: int, out_dtype: DType, numel: int, num_threads: int) -> None:
        """out[i] = round(in[i]), in float32."""
        ...

    @staticmethod
    def cast_to_float(isa: str, in_: int, in_dtype: DType, out: int, numel: int, num_threads: int) -> None:
        """out[i] = in[i], out float32."""
        ...

    @staticmethod
    def momentum_step(isa: str, rule: MomentumRule, master: optim.StateArray, momentum: optim.StateArray, grad: int, grad_dtype: DType, param: int, param_dtype: DType, numel: int, num_threads: int, *, key: optim.RandomKey | None | None=None, **kwargs) -> None:
        """One step of an optimizer of one moment, with arrays as adam takes them. Keyword arguments: the fields of MomentumScalars that the rule reads, all of them. Raises ValueError as adam does."""
        ...

    @staticmethod
    def momentum_param(isa: str, rule: MomentumRule, master: optim.StateArray, momentum: optim.StateArray, grad: int, grad_dtype: DType, param: int, param_dtype: DType, numel: int, num_threads: int, *, key: optim.RandomKey | None | None=None, **kwargs) -> None:
        """As momentum_step, but nothing is written but param, which is apart from grad; the master is of float32."""
        ...

    @staticmethod
    def momentum_apart(isa: str, rule: MomentumRule, master: optim.StateArray, momentum: optim.StateArray, grad: int, grad_dtype: DType, param: int, param_dtype: DType, numel: int, num_threads: int, new_states: Sequence[optim.StateArray], *, key: optim.RandomKey | None | None=None, **kwargs) -> None:
        """As momentum_step, but the new master and momentum go to new_states and the old ones stay as they are."""
        ...

    @staticmethod
    def momentum_param_between(isa: str, rule: MomentumRule, master: optim.StateArray, momentum: optim.StateArray, grad: int, grad_dtype: DType, param: int, param_dtype: DType, numel: int, num_threads: int, most_grad_scale: float, logs: int, **kwargs) -> None:
        """The 16-bit values that momentum_param stores for every grad_scale up to most_grad_scale, as adam_param_between."""
        ...

    @staticmethod
    def momentum_param_open(isa: str, rule: MomentumRule, master: optim.StateArray, momentum: optim.StateArray, grad: int, grad_dtype: DType, param: int, param_dtype: DType, numel: int, num_threads: int, logs: int, **kwargs) -> None:
        """As momentum_param, of the values that momentum_param_between has left to logs."""
        ...

    @staticmethod
    def add(isa: str, sum: int, x: int, dtype: DType, numel: int, num_threads: int) -> None:
        """sum[i] = round(sum[i] + x[i]), both of dtype."""
        ...

    @staticmethod
    def add_to_float(isa: str, sum: int, x: int, x_dtype: DType, numel: int, num_threads: int) -> None:
        """sum[i] += x[i], sum float32."""
        ...

    @staticmethod
    def sum_squares(isa: str, x: int, dtype: DType, numel: int, partials: int, num_threads: int) -> None:
        """partials[b] = sum of squares of block b of SQUARES_BLOCK elements; partials float64, one per block begun."""
        ...

    @staticmethod
    def adam_param_between(isa: str, master: optim.StateArray, momentum: optim.StateArray, variance: optim.StateArray, grad: int, grad_dtype: DType, param: int, param_dtype: DType, numel: int, num_threads: int, most_grad_scale: float, logs: int, **kwargs) -> None:
        """The 16-bit values that adam_param stores for every grad_scale up to most_grad_scale; what makes the others goes to logs of OPEN_LOG_BYTES for each OPEN_PIECE elements (optim/kernels.h, settled values)."""
        ...

    @staticmethod
    def adam_param_open(isa: str, master: optim.StateArray, momentum: optim.StateArray, variance: optim.StateArray, grad: int, grad_dtype: DType, param: int, param_dtype: DType, numel: int, num_threads: int, logs: int, **kwargs) -> None:
        """As adam_param, of the values that adam_param_between has left to logs."""
        ...

    @staticmethod
    def adam_split(isa: str, lower: int, momentum: int, variance: int, grad: int, grad_dtype: DType, param: int, numel: int, num_threads: int, **kwargs) -> None:
        """As adam, of masters that are split into a bfloat16 param, its 16-bit lower halves and signs of the variance (optim/kernels.h)."""
        ...

    @staticmethod
    def split_master(isa: str, master: int, param: int, lower: int, variance: int, numel: int) -> None:
        """Splits float32 masters into bfloat16 params, 16-bit lower halves and signs of the variance."""
        ...

    @staticmethod
    def join_master(isa: str, param: int, lower: int, variance: int, master: int, numel: int) -> None:
        """What split_master split."""
        ...

    class LossScaler:
        """The factor that keeps float16 gradients in range (optim/loss_scaler.h). loss_scale > 0: constant; 0: dynamic, after DeepSpeed's rule. Raises ValueError for options out of range."""
        ...

        def __init__(self, *, loss_scale: float=0.0, initial_scale_power: int=16, scale_window: int=1000, min_scale: float=1.0, hysteresis: int=2, consecutive_hysteresis: bool=False) -> None:
            ...

        @property
        def scale(self) -> float:
            ...

        @property
        def is_dynamic(self) -> bool:
            ...

        @property
        def is_at_minimum(self) -> bool:
            ...

        def update(self, overflow: bool) -> None:
            """Once per optimizer step, also a skipped one."""
            ...

        def state(self) -> dict:
            """What set_state() takes: a dict of numbers."""
            ...

        def set_state(self, *, scale: float, iteration: int, last_overflow_iteration: int, hysteresis_left: int) -> None:
            """Restores state(). Raises ValueError when no run can lead to it."""
            ...
class quant:
    """The leaf kernels of quantised values (quant/kernels.h)."""
    ...
    NF4_VALUES: ClassVar[list]
    DYNAMIC_VALUES: ClassVar[list]

    @staticmethod
    def num_bytes(type: QuantType, numel: int) -> int:
        """What the array of a parameter of so many elements takes."""
        ...

    @staticmethod
    def layout(type: QuantType, numel: int) -> dict:
        """Where in that array each part begins, in bytes."""
        ...

    @staticmethod
    def quantize(isa: str, type: QuantType, values: int, numel: int, array: int, num_threads: int) -> None:
        """Float32 `values` into `array`, of num_bytes() zeros. Raises ValueError where one is not finite."""
        ...

    @staticmethod
    def dequantize(isa: str, type: QuantType, array: int, numel: int, out: int, dtype: DType, num_threads: int) -> None:
        """And back, into `out`."""
        ...
class Phase:
    ...

    def __init__(self, value: int) -> None:
        ...

    @property
    def name(self) -> str:
        ...
    __members__: ClassVar[dict]

    @property
    def value(self) -> int:
        ...

    def __int__(self, /) -> int:
        ...

    def __index__(self, /) -> int:
        ...
    FORWARD: ClassVar[Phase]
    BACKWARD: ClassVar[Phase]
class AccessMode:
    ...

    def __init__(self, value: int) -> None:
        ...

    @property
    def name(self) -> str:
        ...
    __members__: ClassVar[dict]

    @property
    def value(self) -> int:
        ...

    def __int__(self, /) -> int:
        ...

    def __index__(self, /) -> int:
        ...
    READ: ClassVar[AccessMode]
    WRITE: ClassVar[AccessMode]
    RETIRE: ClassVar[AccessMode]
def make_plan(moments: list, costs: Mapping[tuple[int, ArrayKind], tuple[int, int, int, int, bool]], *, limit_bytes: int, least_tide_bytes: int=0, fixed_bytes: int=0, prefetch_bytes: int=0) -> dict:
    """Plan for a timeline. costs: {(chunk, kind): (num_bytes, fetch_bytes, evict_bytes, retire_bytes, survives_step)}."""
    ...
CUDA_SLACK_RATIO: float
class Backwards:
    """How many backwards a step is known to have (plan/placement.h)."""
    ...

    def __init__(self, value: int) -> None:
        ...

    @property
    def name(self) -> str:
        ...
    __members__: ClassVar[dict]

    @property
    def value(self) -> int:
        ...

    def __int__(self, /) -> int:
        ...

    def __index__(self, /) -> int:
        ...
    ONE: ClassVar[Backwards]
    SEVERAL: ClassVar[Backwards]
class DeviceBudget:
    """How much of a device there is to plan with (plan/placement.h)."""
    ...

    def __init__(self) -> None:
        ...
    limit_bytes: int
    follows_tide: bool
    prefetches_far: bool
    margin_use_ratio: float
    keeps_gradients: bool
    backwards: Backwards
    host_limit_bytes: int
def reserved_gradient_bytes(layout: Layout) -> int:
    """Of host memory, what updates ahead of the step leave to gradients that come down."""
    ...
def initial_placement(layout: Layout, host_limit_bytes: int, device_room_bytes: int, backwards: Backwards=Backwards.ONE, disk_limit_bytes: int=0) -> tuple[list[Tier], int, int]:
    """By chunk, where its states are before the tide is known, and the bytes that this takes on the host, more than its limit where all together are too small, and on the disk (plan/placement.h)."""
    ...
def home_from_disk(layout: Layout, homes: Sequence[Tier], room_bytes: int) -> list[int]:
    """The chunks whose states come from the disk to the host when it has so much room (plan/placement.h)."""
    ...
def disk_set_bytes(layout: Layout, homes: Sequence[Tier]) -> int:
    """Of host memory, what states on their way from the disk and back pass through (plan/placement.h)."""
    ...
def host_peak_bytes(layout: Layout, first_homes: Sequence[Tier], states_on_device: Sequence[bool], host_limit_bytes: int, updates_ahead: bool, backwards: Backwards=Backwards.ONE) -> int:
    """The most that a rank will have mapped of the host (plan/host_demand.h), by where each chunk's states were before the tide was known, and whether they are on the device now."""
    ...
def num_device_state_chunks(layout: Layout, moments: list, budget: DeviceBudget) -> int:
    """How many chunks, from the first on, have their states on the device (plan/placement.h)."""
    ...
def pose_problem(layout: Layout, moments: list, states_on_device: Sequence[bool], budget: DeviceBudget) -> dict:
    """The planner's problem for a timeline: the arguments of make_plan (plan/placement.h)."""
    ...
class UpdateAt:
    """Where and when a chunk is updated (plan/simulator.h)."""
    ...

    def __init__(self, value: int) -> None:
        ...

    @property
    def name(self) -> str:
        ...
    __members__: ClassVar[dict]

    @property
    def value(self) -> int:
        ...

    def __int__(self, /) -> int:
        ...

    def __index__(self, /) -> int:
        ...
    NEVER: ClassVar[UpdateAt]
    HOST_AT_RETIRE: ClassVar[UpdateAt]
    HOST_PARAM_FIRST: ClassVar[UpdateAt]
    HOST_AFTER_NORM: ClassVar[UpdateAt]
    DISK_AT_RETIRE: ClassVar[UpdateAt]
    DISK_AFTER_NORM: ClassVar[UpdateAt]
    DEVICE_AFTER_NORM: ClassVar[UpdateAt]
class Rates:
    """How fast a machine is (plan/simulator.h)."""
    ...

    def __init__(self) -> None:
        ...
    upload_gbps: float
    download_gbps: float
    transfer_latency_seconds: float
    gather_gbps: float
    scatter_gbps: float
    collective_latency_seconds: float
    host_adam_params_per_second: float
    device_adam_params_per_second: float
    disk_read_gbps: float
    disk_write_gbps: float
    synchronize_seconds: float
    launch_ahead_seconds: float
def simulate(moments: list, costs: Mapping[tuple[int, ArrayKind], tuple[int, int, int, int, bool]], plan: dict, rates: Rates, *, compute_seconds: Sequence[float], updates: Sequence[UpdateAt], numels: Sequence[int], limit_bytes: int, least_tide_bytes: int=0, fixed_bytes: int=0, num_ranks: int=1, activations: Sequence[Sequence[int]]=[], disk_bytes: Sequence[int]=[]) -> dict:
    """The steady step that a plan gives on a machine (plan/simulator.h). compute_seconds: by moment; updates, numels and disk_bytes: by chunk."""
    ...
def choose_plan(moments: list, costs: Mapping[tuple[int, ArrayKind], tuple[int, int, int, int, bool]], rates: Rates, *, compute_seconds: Sequence[float], updates: Sequence[UpdateAt], numels: Sequence[int], limit_bytes: int, least_tide_bytes: int=0, fixed_bytes: int=0, prefetch_bytes: int=0, num_ranks: int=1, activations: Sequence[Sequence[int]]=[], disk_bytes: Sequence[int]=[]) -> dict:
    """The plan of the least predicted step, over how much room prefetches get (plan/plan_choice.h)."""
    ...
def agreed_vote(votes: Sequence[dict]) -> dict:
    """What ranks make of their votes on the next plan, sent and received (plan/plan_vote.h)."""
    ...
def example_messages(num_chunks: int) -> dict[str, bytes]:
    """One message of each kind, by kind."""
    ...
def read_message(kind: str, message: bytes, num_chunks: int) -> None:
    """Reads it as a rank does. Raises StateError for what is no message of that kind."""
    ...
class collective:
    """Groups of ranks and their collectives."""
    ...

    class Communicator:
        """A group of ranks and its collectives on whole chunks (collective/communicator.h)."""
        ...

        @property
        def rank(self) -> int:
            ...

        @property
        def size(self) -> int:
            ...

        def all_gather(self, whole: int, shard_bytes: int) -> None:
            ...

        def reduce_scatter_mean(self, whole: int, shard: int, scratch: int, shard_numel: int, dtype: DType) -> None:
            ...

        def exchange(self, sends: Sequence[tuple[int, int, int]], receives: Sequence[tuple[int, int, int]]) -> None:
            """Messages to and from other ranks: (peer, address, bytes) each."""
            ...

        def abort(self) -> None:
            """Stops what is running, for failures; any thread."""
            ...

        def check(self) -> None:
            """Raises RankFailure when the communicator has failed."""
            ...

        def oldest_pending_seconds(self) -> float:
            ...

        def close(self) -> None:
            """Frees what it holds; waits for no other rank."""
            ...

    class ControlGroup:
        """Small values over the hosts, for agreement between ranks."""
        ...

        @property
        def rank(self) -> int:
            ...

        @property
        def size(self) -> int:
            ...

        def exchange(self, mine: bytes, what: str='') -> list:
            """Everybody's value by rank. Raises RankFailure, RankMismatch."""
            ...

        def distribute(self, to_each: Sequence[bytes], what: str='') -> list:
            """A value for each rank; what comes from each. Raises as exchange."""
            ...

        def enter(self, call: str) -> None:
            """The call that this rank is in from now on; empty: none."""
            ...

        @property
        def call(self) -> str:
            ...

        def abort(self) -> None:
            """Stops what is running, for failures; any thread."""
            ...

        def close(self) -> None:
            """Frees what it holds; waits for no other rank."""
            ...

    @staticmethod
    def make_single_communicator() -> collective.Communicator:
        ...

    @staticmethod
    def make_single_control() -> collective.ControlGroup:
        ...

    @staticmethod
    def make_c10d_communicator(group_name: str, members: Sequence[int]=[]) -> collective.Communicator:
        ...

    @staticmethod
    def make_c10d_control(group_name: str, timeout_seconds: float, members: Sequence[int]=[]) -> collective.ControlGroup:
        ...

    @staticmethod
    def mean_of_ranks(shards: int, num_ranks: int, out: int, dtype: DType, numel: int) -> None:
        ...
def nodes_to_interleave(nodes: Sequence[int]) -> list[int]:
    """The nodes, when there are several that the system lets this process choose among (memory/interleave.h)."""
    ...
def interleave_pages(data: int, num_bytes: int, nodes: Sequence[int]) -> bool:
    """Spreads untouched pages from address data on over NUMA nodes; whether the system agreed."""
    ...
class HostAllocations:
    """Context: CPU tensors made here are host memory, not memory of the simulated device."""
    ...

    def __init__(self) -> None:
        ...

    def __enter__(self) -> None:
        ...

    def __exit__(self, arg0: object, arg1: object, arg2: object, /) -> None:
        ...
class HostMapping:
    """Untouched host memory of huge pages (memory/host_mapping.h)."""
    ...

    def __init__(self, num_bytes: int) -> None:
        ...

    @property
    def address(self) -> int:
        ...
class DeviceMemory:
    """Memory of a device that no engine owns, for values on their way from
an engine's core that ends to the next one's. It may be used on the current stream, and let go of when that is over.

Args:
    cuda_device: the GPU's index; -1: of the simulated device, which does not count it.
    num_bytes: its size.

Raises:
    MemoryBudgetError: there is no room."""
    ...

    def __init__(self, cuda_device: int, num_bytes: int) -> None:
        ...

    @property
    def address(self) -> int:
        ...

    @property
    def num_bytes(self) -> int:
        ...
class KeptRegions:
    """Host memory from engine to engine (memory/host_arena.h)."""
    ...

    def __init__(self) -> None:
        ...

    @property
    def num_bytes(self) -> int:
        ...
class HostArena:
    """Host memory for payloads (memory/host_arena.h)."""
    ...

    def __init__(self, limit_bytes: int, prepares: bool=False, nodes: Sequence[int]=[], num_failures: int=0) -> None:
        ...

    def reserve(self, arg0: Sequence[int], /) -> None:
        ...

    def prepare_ahead(self) -> None:
        ...

    def keep_regions(self, arg0: KeptRegions, /) -> None:
        ...

    def reuse_regions(self, arg0: KeptRegions, /) -> None:
        ...

    def release_reused(self) -> None:
        ...

    def release_reserved(self) -> None:
        ...

    def allocate(self, arg0: int, /) -> int:
        ...

    def free(self, arg0: int, /) -> None:
        ...

    def trim(self) -> None:
        ...

    def allocate_prepared(self, arg0: int, /) -> int:
        ...

    @property
    def is_preparing(self) -> bool:
        ...

    @property
    def unreserved_bytes(self) -> int:
        ...

    @property
    def used_bytes(self) -> int:
        ...

    @property
    def mapped_bytes(self) -> int:
        ...

    @property
    def peak_mapped_bytes(self) -> int:
        ...
class DiskIo:
    """How bytes go to a disk and come back (memory/disk_channel.h)."""
    ...

    def __init__(self, value: int) -> None:
        ...

    @property
    def name(self) -> str:
        ...
    __members__: ClassVar[dict]

    @property
    def value(self) -> int:
        ...

    def __int__(self, /) -> int:
        ...

    def __index__(self, /) -> int:
        ...
    AUTO: ClassVar[DiskIo]
    URING: ClassVar[DiskIo]
    THREADS: ClassVar[DiskIo]
class DiskFaults:
    """What a test makes a disk do (memory/disk_file.h)."""
    ...

    def __init__(self) -> None:
        ...
    reads_before_error: int
    writes_before_error: int
    error_number: int
    reads_before_flip: int
    seconds_per_piece: float
    cuts_short: bool
    is_plain: bool
class DiskFile:
    """A file as memory for arrays (memory/disk_file.h)."""
    ...

    def __init__(self, folder: str, num_bytes: int, io: DiskIo=DiskIo.AUTO, faults: DiskFaults | None=None, registered: Sequence[tuple[int, int]]=[]) -> None:
        ...

    def read(self, ranges: Sequence[tuple[int, int, int]]) -> list[int]:
        ...

    def write(self, ranges: Sequence[tuple[int, int, int]]) -> list[int]:
        ...

    @property
    def num_bytes(self) -> int:
        ...

    @property
    def is_direct(self) -> bool:
        ...

    @property
    def how(self) -> str:
        ...
class DiskOptions:
    """A disk for optimizer states (engine/disk_states.h)."""
    ...

    def __init__(self) -> None:
        ...
    folder: str
    limit_bytes: int
    io: DiskIo
class Track:
    """Where a span of a trace belongs (common/tracing.h)."""
    ...

    def __init__(self, value: int) -> None:
        ...

    @property
    def name(self) -> str:
        ...
    __members__: ClassVar[dict]

    @property
    def value(self) -> int:
        ...

    def __int__(self, /) -> int:
        ...

    def __index__(self, /) -> int:
        ...
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
class StallCause:
    """What the compute queue waited for (common/tracing.h)."""
    ...

    def __init__(self, value: int) -> None:
        ...

    @property
    def name(self) -> str:
        ...
    __members__: ClassVar[dict]

    @property
    def value(self) -> int:
        ...

    def __int__(self, /) -> int:
        ...

    def __index__(self, /) -> int:
        ...
    NONE: ClassVar[StallCause]
    UPLOAD: ClassVar[StallCause]
    DOWNLOAD: ClassVar[StallCause]
    HOST_UPDATE: ClassVar[StallCause]
    HOST_WORK: ClassVar[StallCause]
    ROOM: ClassVar[StallCause]
    NORM: ClassVar[StallCause]
    COLLECTIVE: ClassVar[StallCause]
class SpanOwner:
    """Whose work a span is (trace/step_tracer.h)."""
    ...

    def __init__(self, value: int) -> None:
        ...

    @property
    def name(self) -> str:
        ...
    __members__: ClassVar[dict]

    @property
    def value(self) -> int:
        ...

    def __int__(self, /) -> int:
        ...

    def __index__(self, /) -> int:
        ...
    THIS_STEP: ClassVar[SpanOwner]
    STEP_BEFORE: ClassVar[SpanOwner]
class StepOutcome:
    """How a step ended (trace/step_tracer.h)."""
    ...

    def __init__(self, value: int) -> None:
        ...

    @property
    def name(self) -> str:
        ...
    __members__: ClassVar[dict]

    @property
    def value(self) -> int:
        ...

    def __int__(self, /) -> int:
        ...

    def __index__(self, /) -> int:
        ...
    APPLIED: ClassVar[StepOutcome]
    SKIPPED: ClassVar[StepOutcome]
class HoldUntil:
    ...

    def __init__(self, value: int) -> None:
        ...

    @property
    def name(self) -> str:
        ...
    __members__: ClassVar[dict]

    @property
    def value(self) -> int:
        ...

    def __int__(self, /) -> int:
        ...

    def __index__(self, /) -> int:
        ...
    SCOPE_END: ClassVar[HoldUntil]
    NEXT_EVENT: ClassVar[HoldUntil]
class UseListener:
    """Is told about uses (engine/use_listener.h)."""
    ...

    def __init__(self) -> None:
        ...

    def open_scope(self, arg0: Sequence[int], arg1: HoldUntil, /) -> int:
        ...

    def close_scope(self) -> None:
        ...

    def tick(self) -> int:
        ...

    def touch(self, arg0: Sequence[int], /) -> int:
        ...

    def enter_backward(self, arg0: int, arg1: int, arg2: Sequence[int], /) -> None:
        ...
class BackwardEntry:
    """A pre-hook of an autograd node (bind/use_observer.h)."""
    ...

    def __call__(self, arg0: object, /) -> None:
        ...
class UseObserver:
    """See bind/use_observer.h."""
    ...

    def __init__(self, listener: object, find_nodes: object) -> None:
        ...

    def forget_scopes(self) -> None:
        ...

    def touch(self, arg0: Sequence[int], /) -> None:
        ...
class Way:
    """What a function does with a parameter's memory."""
    ...

    def __init__(self, value: int) -> None:
        ...

    @property
    def name(self) -> str:
        ...
    __members__: ClassVar[dict]

    @property
    def value(self) -> int:
        ...

    def __int__(self, /) -> int:
        ...

    def __index__(self, /) -> int:
        ...
    LOOK: ClassVar[Way]
    READ: ClassVar[Way]
    READ_ONCE: ClassVar[Way]
    ALIAS: ClassVar[Way]
    MAY_WRITE: ClassVar[Way]
def torch_function(*, types: tuple, way_of: object, write: object, refuse: object, as_view: object) -> Callable:
    """A __torch_function__ (bind/torch_function.h)."""
    ...
class ModuleHook:
    """The forward hooks of one module (bind/use_observer.h)."""
    ...

    def __init__(self, observer: UseObserver | None=None, params: Sequence[int]=[], until: HoldUntil=HoldUntil.SCOPE_END) -> None:
        ...

    def before_forward(self, arg0: object, arg1: object, /) -> None:
        ...

    def after_forward(self, arg0: object, arg1: object, arg2: object, /) -> None:
        ...

    @property
    def params(self) -> list[int]:
        ...

    @property
    def touched(self) -> list[int]:
        ...

    @property
    def until(self) -> HoldUntil:
        ...

    def finish_learning(self, arg0: Sequence[int], /) -> None:
        ...
class Layout:
    """Which chunk and offset each parameter has (chunk/layout.h)."""
    ...

    @staticmethod
    def pack(numels: Sequence[int], dtypes: Sequence[DType], trainable: Sequence[bool], chunk_numel: int, num_ranks: int=1, rank: int=0, states: Sequence[StateFormat]=[], quantization: Sequence[QuantType]=[]) -> Layout:
        ...

    @property
    def num_chunks(self) -> int:
        ...

    @property
    def chunk_numel(self) -> int:
        ...

    @property
    def num_ranks(self) -> int:
        ...

    def placement(self, arg0: int, /) -> tuple[int, int]:
        ...

    def shard_of(self, arg0: int, /) -> tuple[int, int, int]:
        ...

    def train(self, arg0: int, /) -> None:
        ...

    def chunk(self, arg0: int, /) -> dict:
        ...
class StatePlacement:
    ...

    def __init__(self, value: int) -> None:
        ...

    @property
    def name(self) -> str:
        ...
    __members__: ClassVar[dict]

    @property
    def value(self) -> int:
        ...

    def __int__(self, /) -> int:
        ...

    def __index__(self, /) -> int:
        ...
    HYBRID: ClassVar[StatePlacement]
    HOST: ClassVar[StatePlacement]
class Tracking:
    ...

    def __init__(self, value: int) -> None:
        ...

    @property
    def name(self) -> str:
        ...
    __members__: ClassVar[dict]

    @property
    def value(self) -> int:
        ...

    def __int__(self, /) -> int:
        ...

    def __index__(self, /) -> int:
        ...
    TRAINING: ClassVar[Tracking]
    UNTRACKED: ClassVar[Tracking]
class Attempt:
    ...

    def __init__(self, value: int) -> None:
        ...

    @property
    def name(self) -> str:
        ...
    __members__: ClassVar[dict]

    @property
    def value(self) -> int:
        ...

    def __int__(self, /) -> int:
        ...

    def __index__(self, /) -> int:
        ...
    FIRST: ClassVar[Attempt]
    AGAIN: ClassVar[Attempt]
    LAST: ClassVar[Attempt]
class WeightDecay:
    ...

    def __init__(self, value: int) -> None:
        ...

    @property
    def name(self) -> str:
        ...
    __members__: ClassVar[dict]

    @property
    def value(self) -> int:
        ...

    def __int__(self, /) -> int:
        ...

    def __index__(self, /) -> int:
        ...
    L2: ClassVar[WeightDecay]
    DECOUPLED: ClassVar[WeightDecay]
class BiasCorrection:
    ...

    def __init__(self, value: int) -> None:
        ...

    @property
    def name(self) -> str:
        ...
    __members__: ClassVar[dict]

    @property
    def value(self) -> int:
        ...

    def __int__(self, /) -> int:
        ...

    def __index__(self, /) -> int:
        ...
    APPLIED: ClassVar[BiasCorrection]
    NONE: ClassVar[BiasCorrection]
class DelayOptions:
    """A simulated link, and random delays (backend/delaying_backend.h)."""
    ...

    def __init__(self) -> None:
        ...
    bytes_per_second: float
    latency_seconds: float
    max_random_seconds: float
    seed: int
class SpeculationMode:
    ...

    def __init__(self, value: int) -> None:
        ...

    @property
    def name(self) -> str:
        ...
    __members__: ClassVar[dict]

    @property
    def value(self) -> int:
        ...

    def __int__(self, /) -> int:
        ...

    def __index__(self, /) -> int:
        ...
    OFF: ClassVar[SpeculationMode]
    ON: ClassVar[SpeculationMode]
    COMMIT: ClassVar[SpeculationMode]
class DeviceOptions:
    """What engines of one process share (engine/shared_device.h)."""
    ...

    def __init__(self) -> None:
        ...
    cuda_device: int
    device_limit_bytes: int
    host_limit_bytes: int
    limit_rounding_bytes: int
    host_threads: HostThreadOptions
    delays: DelayOptions
class ResidencyOptions:
    """Which states are on the device (engine/residency.h)."""
    ...

    def __init__(self) -> None:
        ...
    warmup_payload_ratio: float
    margin_use_ratio: float
    payload_limit_bytes: int
    state_placement: StatePlacement
    backwards: Backwards
class EngineOptions:
    ...

    def __init__(self) -> None:
        ...
    device: DeviceOptions
    residency: ResidencyOptions
    disk: DiskOptions
    ample_limit_bytes: int
    ample_extra_bytes: int
    speculation: SpeculationMode
class SgdMomentum:
    """How SGD's momentum makes an update (engine/group_options.h)."""
    ...

    def __init__(self, value: int) -> None:
        ...

    @property
    def name(self) -> str:
        ...
    __members__: ClassVar[dict]

    @property
    def value(self) -> int:
        ...

    def __int__(self, /) -> int:
        ...

    def __index__(self, /) -> int:
        ...
    HEAVY_BALL: ClassVar[SgdMomentum]
    NESTEROV: ClassVar[SgdMomentum]
class AdamOptions:
    """Of Adam and AdamW: a parameter group in one step."""
    ...

    def __init__(self, *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, mode: WeightDecay, bias_correction: BiasCorrection=BiasCorrection.APPLIED) -> None:
        ...
class LionOptions:
    """Of Lion: a parameter group in one step."""
    ...

    def __init__(self, *, lr: float, beta1: float, beta2: float, weight_decay: float) -> None:
        ...
class SgdOptions:
    """Of SGD with momentum: a parameter group in one step."""
    ...

    def __init__(self, *, lr: float, momentum: float, dampening: float, weight_decay: float, mode: SgdMomentum=SgdMomentum.HEAVY_BALL) -> None:
        ...
UNLIMITED: int
class Vacate:
    """What leaves the device to make room (engine/shared_device.h)."""
    ...

    def __init__(self, value: int) -> None:
        ...

    @property
    def name(self) -> str:
        ...
    __members__: ClassVar[dict]

    @property
    def value(self) -> int:
        ...

    def __int__(self, /) -> int:
        ...

    def __index__(self, /) -> int:
        ...
    VALUES: ClassVar[Vacate]
    EVERYTHING: ClassVar[Vacate]
def working_set_bytes(layout: Layout, module_params: Sequence[Sequence[int]]) -> int:
    """Least device memory for payloads: the largest module's chunks and their gradients' (plan/placement.h)."""
    ...
def shared_budgets(cuda_device: int) -> tuple[int, int] | None:
    """(device bytes, host bytes) of the engines that are open on a device; None: none is."""
    ...
class Collectives:
    """What ranks do together (engine/collectives.h)."""
    ...

    def __init__(self, gather: collective.Communicator, scatter: collective.Communicator, control: collective.ControlGroup) -> None:
        ...

    def check_same_plan(self, fingerprint: int) -> None:
        ...

    @property
    def num_ranks(self) -> int:
        ...
class Runtime(UseListener):
    """The core's façade (engine/runtime.h)."""
    ...

    def __init__(self, layout: Layout, param_names: Sequence[str], module_params: Sequence[Sequence[int]], options: EngineOptions, collectives: Collectives | None=None, kept: KeptRegions | None=None) -> None:
        ...

    def keep_memory(self) -> KeptRegions:
        ...

    def bind_storage(self, arg0: int, arg1: int, /) -> None:
        ...

    def seal_storage(self, arg0: int, /) -> None:
        ...

    def write_values(self, arg0: int, arg1: ArrayKind, arg2: int, arg3: Tier, /) -> None:
        ...

    def read_values(self, arg0: int, arg1: ArrayKind, arg2: int, /) -> None:
        ...

    def read_own_values(self, arg0: int, arg1: ArrayKind, arg2: int, /) -> None:
        ...

    def read_ranges(self, arg0: Sequence[tuple[int, ArrayKind, int, int, int, int]], arg1: Sequence[tuple[int, int]], /) -> None:
        """[(param, kind, begin, end, file or -1, offset or address)], [(descriptor, bytes)]: values of this rank."""
        ...

    def write_ranges(self, arg0: Sequence[tuple[int, ArrayKind, int, int, int, int]], arg1: Sequence[tuple[int, int]], /) -> None:
        ...

    def stored_bytes(self, param: int) -> list[int]:
        """Bytes of an element of each array that the parameter consists of; none: they cannot be copied as stored."""
        ...

    def is_stored_on_device(self, param: int) -> bool:
        ...

    def stored_on_device(self, arg0: int, /) -> list[int]:
        ...

    def write_stored(self, arg0: int, arg1: Sequence[tuple[int, int, int, int, Tier]], /) -> None:
        """[(array, begin, end, address, tier)]: elements of this rank's part, as stored_on_device() has them."""
        ...

    def copy_on_device(self, to: int, from_: int, num_bytes: int) -> None:
        ...

    def leave_stored(self, chunk: int) -> None:
        ...

    def set_aside(self, arg0: Sequence[tuple[int, ArrayKind, int, int, int, int]], /) -> tuple[list[int], KeptRegions, KeptRegions]:
        ...

    def read_gradient(self, arg0: int, arg1: int, /) -> None:
        ...

    def write_gradient(self, arg0: int, arg1: int, arg2: Tier, /) -> None:
        ...

    def adopt_timeline(self, moments: list, times: object | None=None) -> None:
        ...

    def make_states(self, arg0: Sequence[int], /) -> None:
        ...

    def discard_states(self, arg0: Sequence[int], /) -> None:
        ...

    def train(self, arg0: Sequence[int], /) -> None:
        ...

    def close(self) -> None:
        ...

    def release_chunk(self, arg0: int, /) -> None:
        ...

    def begin_forward(self, arg0: Tracking, arg1: Attempt, /) -> None:
        ...

    def end_forward(self) -> None:
        ...

    def begin_backward(self, expected_groups: Sequence[AdamOptions | LionOptions | SgdOptions]=[], expected_grad_scale: float=1.0) -> None:
        ...

    def fold_gradient(self, arg0: int, arg1: int, /) -> None:
        ...

    def end_backward(self) -> None:
        ...

    def keep_joint_backward(self) -> bool:
        ...

    def abort_forward(self) -> None:
        ...

    def abort_backward(self) -> None:
        ...

    def undo_forward(self) -> None:
        ...

    def meet_ranks(self) -> None:
        ...

    def excess_of_activations(self) -> int:
        ...

    def host_room_of_activations(self) -> int:
        ...

    def take_live_tide_peak(self) -> int:
        ...

    def stash_activation(self, arg0: int, arg1: int, /) -> int:
        ...

    def is_stashed(self, arg0: int, /) -> bool:
        ...

    def finish_stashing(self, arg0: int, /) -> None:
        ...

    def fetch_activation(self, arg0: int, arg1: int, /) -> None:
        ...

    def await_activation(self, arg0: int, /) -> None:
        ...

    def drop_activation(self, arg0: int, /) -> None:
        ...

    def vacate_device(self, arg0: Vacate, /) -> None:
        ...

    def prepare_step(self, left_out: Sequence[int]=[]) -> float:
        ...

    def apply_step(self, arg0: Sequence[AdamOptions | LionOptions | SgdOptions], arg1: float, arg2: float, /) -> None:
        ...

    def skip_step(self) -> None:
        ...

    def clear_gradients(self) -> None:
        ...

    def forget_plan(self) -> None:
        ...

    def clear_gradient(self, arg0: int, /) -> None:
        ...

    def has_gradient(self, arg0: int, /) -> bool:
        ...

    def gradients_pending(self) -> bool:
        ...

    def set_group(self, arg0: int, arg1: int, /) -> None:
        ...

    def step_count(self, arg0: int, /) -> int:
        ...

    def set_step_count(self, arg0: int, arg1: int, /) -> None:
        ...

    def start_trace(self) -> None:
        ...

    def take_trace(self) -> object:
        ...

    def start_stall_trace(self) -> None:
        ...

    def take_stalls(self) -> object:
        ...

    @property
    def disk_faults(self) -> DiskFaults:
        """What a test makes the disk do."""
        ...

    @property
    def closed(self) -> bool:
        ...

    @property
    def num_committed(self) -> int:
        ...

    @property
    def can_repeat_forward(self) -> bool:
        ...

    @property
    def replays(self) -> bool:
        """The running step goes as planned so far."""
        ...

    @property
    def num_pressure_evictions(self) -> int:
        ...

    def report(self) -> dict:
        ...

    def reset_report(self) -> None:
        ...

    def param_state(self, arg0: int, /) -> str:
        ...

    def chunk_state(self, arg0: int, /) -> str:
        ...

    def is_on_device(self, arg0: int, arg1: ArrayKind, /) -> bool:
        ...

    def home(self, arg0: int, /) -> Tier:
        """Where the chunk's optimizer states belong between their uses."""
        ...

    def timeline(self) -> list:
        ...

    def plan(self) -> dict:
        ...

    def plan_problem(self) -> dict:
        ...

    def step_times(self) -> object:
        ...

    def predicted_step(self) -> object:
        ...
class GradientHook:
    """A parameter's post-accumulate hook (bind/gradient_hook.h)."""
    ...

    def __init__(self, *, runtime: object, param: int, strides: tuple, take: object, rearrange: object) -> None:
        ...

    def __call__(self, arg0: object, /) -> None:
        ...

    @property
    def param(self) -> int:
        ...

    @property
    def has_folded(self) -> bool:
        ...
def set_interrupt_delivery(function: object) -> None:
    """What hooks of modules and gradients call while an interrupt is waiting."""
    ...
def set_interrupt_waiting(waiting: bool) -> None:
    ...
