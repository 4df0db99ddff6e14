"""From the user's module to a layout: which parameters go into chunks, in which dtype, and which stay with PyTorch.

Stay with PyTorch: parameters made inside :func:`torch_scope`, embeddings with ``use_cpu_embedding`` (in host memory),
parameters of other classes than ``nn.Parameter`` (quantised weights), without elements, or not floating point.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from patrickstar import _C
from patrickstar.chunked_parameter import ChunkedParameter, ParamHandle
from patrickstar.materialize import DeferredInit
from patrickstar.observer import Observer

logger = logging.getLogger("patrickstar")

DTYPES = {torch.float32: _C.DType.FLOAT32, torch.bfloat16: _C.DType.BFLOAT16, torch.float16: _C.DType.FLOAT16}

_LEAST_CHUNK_NUMEL = 1024
_UNIT_BYTES = 512 * 2**20  # of a model on the meta device, in memory of their own at a time

# Which parameter names of a module were registered inside torch_scope, and with which do_allreduce.
_torch_scoped: weakref.WeakKeyDictionary[nn.Module, dict[str, bool]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def torch_scope(do_allreduce: bool = True) -> Iterator[None]:
    """Parameters registered inside stay with PyTorch: float32, on the device, outside of chunks.

    Args:
        do_allreduce: whether their gradients are averaged over the processes (with several processes).
    """

    def note(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        _torch_scoped.setdefault(module, {})[name] = do_allreduce

    handle = register_module_parameter_registration_hook(note)
    try:
        yield
    finally:
        handle.remove()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ManagedParam:
    """A parameter that stays with PyTorch."""

    name: str
    param: nn.Parameter
    on_host: bool
    """Kept in host memory (use_cpu_embedding)."""
    all_reduced: bool = True
    """Whether its gradient is the mean over ranks (``torch_scope(do_allreduce)``)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedSpec:
    """A parameter that goes into a chunk."""

    name: str
    param: nn.Parameter
    compute_dtype: torch.dtype
    original_device: torch.device
    """Where the parameter returns to when it leaves the engine."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamPlan:
    """Where every parameter of a module goes."""

    chunked: list[ChunkedSpec]
    """In registration order; the index is the parameter's id in the core."""
    managed: list[ManagedParam]


def build_module(model_func: Callable[[], nn.Module]) -> nn.Module:
    """Calls ``model_func`` and checks what it returns.

    Raises:
        ValueError: it is not callable, or returns something else than an ``nn.Module``, or one that an engine owns.
    """
    if isinstance(model_func, nn.Module):
        raise ValueError("model_func is a module; give a function that returns one: model_func=lambda: model")
    if not callable(model_func):
        raise ValueError(
            f"model_func is a {type(model_func).__name__}; give a function without arguments that returns an nn.Module"
        )
    module = model_func()
    if not isinstance(module, nn.Module):
        raise ValueError(f"model_func returned a {type(module).__name__}; it must return an nn.Module")
    for name, param in module.named_parameters():
        if isinstance(param, ChunkedParameter):
            raise ValueError(f"parameter {name} belongs to an engine already; close() that engine first")
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"parameter {name} is not initialised (a lazy module); run one forward in model_func first"
            )
    return module


def plan_params(module: nn.Module, compute_dtype: torch.dtype, *, use_cpu_embedding: bool) -> ParamPlan:
    """Decides for every parameter of ``module`` whether it goes into a chunk, and in which dtype it computes."""
    scoped = {
        module._parameters[name]: do_allreduce
        for module, names in _scoped_modules(module)
        for name, do_allreduce in names.items()
        if name in module._parameters
    }
    on_host = _cpu_embeddings(module) if use_cpu_embedding else set()
    keep_float32 = _float32_params(module) if compute_dtype != torch.float32 else set()
    chunked, managed = [], []
    for name, param in module.named_parameters():
        plain = (
            type(param) is nn.Parameter
            and param.is_floating_point()
            and param.numel() > 0
            and param.layout == torch.strided
        )
        if param in scoped or param in on_host or not plain:
            all_reduced = scoped.get(param, True)
            managed.append(ManagedParam(name=name, param=param, on_host=param in on_host, all_reduced=all_reduced))
        else:
            dtype = torch.float32 if param in keep_float32 else compute_dtype
            chunked.append(ChunkedSpec(name=name, param=param, compute_dtype=dtype, original_device=param.device))
    return ParamPlan(chunked=chunked, managed=managed)


def _scoped_modules(module: nn.Module) -> list[tuple[nn.Module, dict[str, bool]]]:
    return [(child, _torch_scoped[child]) for child in module.modules() if child in _torch_scoped]


def _cpu_embeddings(module: nn.Module) -> set[nn.Parameter]:
    """Embedding weights that no other module uses as well (a tied output layer computes on the device)."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for child in module.modules():
        for param in child._parameters.values():
            if param is not None:
                owners.setdefault(param, []).append(child)
    embeddings = {p for p, modules in owners.items() if any(isinstance(m, nn.Embedding) for m in modules)}
    alone = {p for p in embeddings if all(isinstance(m, nn.Embedding) for m in owners[p])}
    if alone != embeddings:
        logger.info(
            "use_cpu_embedding: %d embedding weights are tied to other layers and stay in chunks",
            len(embeddings - alone),
        )
    return alone


def _float32_params(module: nn.Module) -> set[nn.Parameter]:
    """Parameters that must stay float32 in 16-bit training: those of layers with float32 running statistics, whose
    kernels want weights and statistics of one dtype.
    """
    params: set[nn.Parameter] = set()
    for child in module.modules():
        if isinstance(child, nn.modules.batchnorm._NormBase) and child.running_mean is not None:
            params |= {param for param in child._parameters.values() if param is not None}
    return params


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkSize:
    """The chunk size in elements, and from which device budget on it would be another one."""

    numel: int
    ample_bytes: int
    """A device budget of at least this gets the default size."""
    ample_extra_bytes: int
    """How much more memory the default size may need at any moment."""


def choose_chunk_size(plan: ParamPlan, module: nn.Module, default_numel: int, device_bytes: int) -> ChunkSize:
    """The default size on an ample device; on a scarce one the largest power-of-two fraction of it that makes the
    largest module's chunks take (within 5 %) as little as they can.

    Numbers do not depend on it. On a scarce device the choice depends on the model alone, so that the least budget
    which a warm-up step measures holds for the next run.
    """
    num_bytes = sum(spec.param.numel() * spec.compute_dtype.itemsize for spec in plan.chunked)
    ample_bytes = 16 * num_bytes
    extra_bytes = 2 * num_bytes  # all compute copies and all gradients
    if device_bytes >= ample_bytes:
        return ChunkSize(numel=default_numel, ample_bytes=ample_bytes, ample_extra_bytes=extra_bytes)
    ids = {spec.param: index for index, spec in enumerate(plan.chunked)}
    owned = [[ids[p] for p in child._parameters.values() if p is not None and p in ids] for child in module.modules()]
    sizes = [default_numel]
    while sizes[-1] >= 2 * _LEAST_CHUNK_NUMEL:
        sizes.append(sizes[-1] // 2)
    needs = {numel: _C.working_set_bytes(make_layout(plan, numel), owned) for numel in sizes}
    numel = next(numel for numel in sizes if needs[numel] <= 1.05 * min(needs.values()))
    return ChunkSize(numel=numel, ample_bytes=ample_bytes, ample_extra_bytes=extra_bytes)


def make_layout(plan: ParamPlan, chunk_numel: int, num_ranks: int = 1, rank: int = 0) -> _C.Layout:
    """Packs the chunked parameters in registration order, each chunk cut into ``num_ranks`` shards."""
    return _C.Layout.pack(
        numels=[spec.param.numel() for spec in plan.chunked],
        dtypes=[DTYPES[spec.compute_dtype] for spec in plan.chunked],
        trainable=[spec.param.requires_grad for spec in plan.chunked],
        chunk_numel=chunk_numel,
        num_ranks=num_ranks,
        rank=rank,
    )


def adopt_params(
    plan: ParamPlan,
    layout: _C.Layout,
    runtime: _C.Runtime,
    observer: Observer,
    device: torch.device,
    deferred: DeferredInit | None,
) -> None:
    """Moves the parameters' values into chunks and makes the parameters views of them.

    Each parameter's own memory is freed as soon as its values are in the chunk, so the model is never held twice: at
    most one chunk of values, or one unit of a model on the meta device (``deferred``), exists in both places.
    """
    libc = ctypes.CDLL(None)
    chunks = [layout.chunk(chunk)["params"] for chunk in range(layout.num_chunks)]
    storages = [_bind_storage(runtime, chunk, device) for chunk in range(layout.num_chunks)]
    missing = [len(params) for params in chunks]
    ids = {spec.param: index for index, spec in enumerate(plan.chunked)}
    for params in _batches(plan, chunks, device, deferred):
        for param_id in [ids.pop(param) for param in params if param in ids]:
            chunk, offset = layout.placement(param_id)
            _adopt(plan.chunked[param_id], param_id, chunk, offset, storages[chunk], observer)
            missing[chunk] -= 1
            if missing[chunk] == 0:
                runtime.seal_storage(chunk)
        # Freed pieces of the heap go back to the system; without this the peak would hold both copies.
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)


def _bind_storage(runtime: _C.Runtime, chunk: int, device: torch.device) -> torch.UntypedStorage:
    with _C.HostAllocations():
        storage = torch.empty(0, device=device).untyped_storage()
    runtime.bind_storage(chunk, storage._cdata)
    return storage


def _batches(
    plan: ParamPlan, chunks: list[list[int]], device: torch.device, deferred: DeferredInit | None
) -> Iterator[list[nn.Parameter]]:
    """All chunked parameters, in pieces that may exist beside their chunks."""
    if deferred is not None:
        yield from deferred.units(device, _UNIT_BYTES)
    for params in chunks:  # what is left: those that had values from the start
        yield [plan.chunked[param_id].param for param_id in params]


def _adopt(
    spec: ChunkedSpec, param_id: int, chunk: int, offset: int, storage: torch.UntypedStorage, observer: Observer
) -> None:
    param = spec.param
    data = param.detach()
    if torch.empty_like(data, device="meta").stride() != data.stride():  # overlapping or with gaps
        data = data.contiguous()
    handle = ParamHandle(
        id=param_id,
        name=spec.name,
        chunk=chunk,
        storage=storage._cdata,
        shape=data.shape,
        stride=data.stride(),
        offset=offset,
        trainable=param.requires_grad,
        original_dtype=data.dtype,
        original_device=spec.original_device,
        observer=observer,
        uses=observer.uses,
    )
    observer.write_values(handle, _C.ArrayKind.MASTER, data)
    param.grad = None  # of a backward before the engine was built: autograd would add to it
    with torch.no_grad():
        view = torch.empty(0, dtype=spec.compute_dtype, device=storage.device)
        param.data = view.set_(storage, offset, data.shape, data.stride())
    param.__class__ = ChunkedParameter
    param._patrickstar = handle


def release_params(plan: ParamPlan, layout: _C.Layout, runtime: _C.Runtime) -> None:
    """Undoes :func:`adopt_params`: ordinary parameters again, of the original dtype and device, chunk by chunk."""
    for chunk in range(layout.num_chunks):
        for param_id in layout.chunk(chunk)["params"]:
            param = plan.chunked[param_id].param
            handle = param._patrickstar
            values = handle.observer.read_values(handle, _C.ArrayKind.MASTER)
            del param._patrickstar
            param.__class__ = nn.Parameter
            with _C.HostAllocations():
                param.data = values.to(device=handle.original_device, dtype=handle.original_dtype)
        runtime.release_chunk(chunk)


def discard_params(plan: ParamPlan, layout: _C.Layout, runtime: _C.Runtime) -> None:
    """Frees all chunks; parameters are ordinary ones without elements afterwards."""
    for chunk in range(layout.num_chunks):
        for param_id in layout.chunk(chunk)["params"]:
            param = plan.chunked[param_id].param
            handle = param._patrickstar
            del param._patrickstar
            param.__class__ = nn.Parameter
            with _C.HostAllocations():
                param.data = torch.empty(0, dtype=handle.original_dtype, device=handle.original_device)
        runtime.release_chunk(chunk)


def move_rest(module: nn.Module, plan: ParamPlan, device: torch.device) -> None:
    """Moves buffers (dtype kept) and the parameters that stay with PyTorch to the device; CPU embeddings stay on the
    host.

    On the simulated device they are copied, so that they count as its memory.
    """

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, copy=device.type == "cpu" and tensor.device.type == "cpu")

    with torch.no_grad():
        for child in module.modules():
            for name, buffer in child._buffers.items():
                if buffer is not None:
                    child._buffers[name] = moved(buffer)
        for managed in plan.managed:
            if not managed.on_host:
                managed.param.data = moved(managed.param.data)
            elif managed.param.device.type != "cpu":
                managed.param.data = managed.param.data.cpu()
