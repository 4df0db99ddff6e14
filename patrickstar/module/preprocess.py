"""Sorts the parameters of the user's module: chunks and their compute dtypes, or PyTorch. Changes nothing
(patrickstar/module/adoption.py does).

These stay with PyTorch:

* parameters made inside :func:`torch_scope`
* embeddings with ``use_cpu_embedding`` (in host memory)
* embeddings with ``max_norm``, whose forward writes the weights
* parameters of other classes than ``nn.Parameter`` (quantised weights)
* parameters without elements, or of a dtype that chunks cannot have (:func:`is_converted`)
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from patrickstar import _C
from patrickstar.config import QuantizationConfig
from patrickstar.module.aliases import find_aliases
from patrickstar.module.chunked_parameter import ChunkedParameter
from patrickstar.module.observed_buffers import SPARSE_BUFFER_REMEDY, persistent_buffers
from patrickstar.module.param_ranks import RankPart, part_of
from patrickstar.module.quantization import quantizable_weights

logger = logging.getLogger("patrickstar")

DTYPES = {torch.float32: _C.DType.FLOAT32, torch.bfloat16: _C.DType.BFLOAT16, torch.float16: _C.DType.FLOAT16}

# Smallest parameter with 8-bit moments: bitsandbytes' min_8bit_size.
_LEAST_8_BIT_NUMEL = 4096

_UNDIVIDED = (
    "leave that out and give the whole model: PatrickStar shards it over the ranks, by tensor_parallel in the "
    "configuration also each matrix"
)

# Names of a module's parameters that were registered inside torch_scope, with its do_allreduce.
_torch_scoped: weakref.WeakKeyDictionary[nn.Module, dict[str, bool]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def torch_scope(do_allreduce: bool = True) -> Iterator[None]:
    """Context in which newly registered parameters stay with PyTorch: float32, on the device, outside of chunks.

    Args:
        do_allreduce: average their gradients over ranks.
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
    """Gradients are averaged over ranks (``torch_scope(do_allreduce)``)."""
    trained: bool = True
    """The optimizer updates it if it has a gradient."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedSpec:
    """A parameter that goes into a chunk."""

    name: str
    param: nn.Parameter
    """Whole until its values move into a chunk."""
    shape: torch.Size
    """Shape in the chunk."""
    compute_dtype: torch.dtype
    original_device: torch.device
    """Device to which the parameter returns when the engine is closed."""
    trained: bool
    """True if it requires grad and the optimizer updates it when the engine is opened; else its chunk has no states."""
    keeps_float32: bool
    """Its moments stay float32 even if others have 8 bits."""
    quantization: _C.QuantType = _C.QuantType.NONE
    """Storage format of the values; only frozen parameters may differ from the compute dtype."""
    part: RankPart | None = None
    """This rank's part of the parameter; None: ranks share it."""
    ties: tuple[nn.Parameter, ...] = ()
    """Frozen parameters over the same memory (:mod:`patrickstar.module.aliases`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SortedParams:
    """Destination of every parameter of a module."""

    chunked: list[ChunkedSpec]
    """In registration order; the index is the parameter's id in the core."""
    managed: list[ManagedParam]
    untrainable: dict[nn.Parameter, str] = dataclasses.field(default_factory=dict)
    """Parameters that are not trained and cannot be, with the reason: they share memory with something else."""

    @property
    def all(self) -> set[nn.Parameter]:
        """Every parameter of the module."""
        ties = (param for spec in self.chunked for param in spec.ties)
        return {*ties, *(spec.param for spec in self.chunked), *(spec.param for spec in self.managed)}

    @property
    def quantized(self) -> set[int]:
        """Ids of the chunked parameters that are stored quantised."""
        return {index for index, spec in enumerate(self.chunked) if spec.quantization is not _C.QuantType.NONE}


ModelSource = nn.Module | Callable[[], nn.Module]
"""A module, or a function without arguments that returns one."""


class BuiltModule(NamedTuple):
    """A module and its origin."""

    module: nn.Module
    is_new: bool
    """True if a function built it; False if it existed before."""


def build_module(model_func: ModelSource, release: Callable[[nn.Module], None]) -> BuiltModule:
    """Builds and checks the module. ``release`` may take it from an engine that has it.

    Raises:
        ValueError: ``model_func`` is neither a module nor callable, or returns no module; an engine owns the module; or
            parameters on the meta device share memory with something else.
    """
    if not callable(model_func):  # an nn.Module is callable too
        raise ValueError(
            f"model_func is a {type(model_func).__name__}; give an nn.Module, or a function without arguments that "
            "returns one"
        )
    registered: set[nn.Module] = set()

    def note(owner: nn.Module, _name: str, _param: nn.Parameter | None) -> None:
        registered.add(owner)

    handle = register_module_parameter_registration_hook(note)
    try:
        module = model_func if isinstance(model_func, nn.Module) else model_func()
    finally:
        handle.remove()
    if not isinstance(module, nn.Module):
        raise ValueError(f"model_func returned a {type(module).__name__}; it must return an nn.Module")
    release(module)
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule) and child.state_dict():
            raise ValueError(
                f"module {name or type(module).__name__} is a torch.jit.ScriptModule, whose code uses its parameters "
                "and buffers without telling PatrickStar; build the engine with the module that was scripted or traced "
                "(torch.compile is supported)"
            )
        if hasattr(child, "_fsdp_wrapped_module"):
            raise ValueError(
                f"module {name or type(module).__name__} is a FullyShardedDataParallel, whose parameters are pieces of "
                f"one; {_UNDIVIDED}"
            )
    for name, param in module.named_parameters():
        if isinstance(param, ChunkedParameter):
            raise ValueError(
                f"parameter {name} belongs to an engine that is open already; close() that engine first, or, where no "
                "name of it is left (a notebook's cell raised, say), patrickstar.close_open_engine()"
            )
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"parameter {name} is not initialised (a lazy module); run one forward in model_func first"
            )
        if hasattr(param, "device_mesh"):  # a DTensor
            raise ValueError(
                f"parameter {name} is a DTensor: fully_shard or parallelize_module has divided it; {_UNDIVIDED}"
            )
    pending = [name for name, param in module.named_parameters() if param.grad is not None]
    if pending:
        logger.warning(
            "gradients of an earlier backward are dropped (%d parameters, the first is %s); make the engine after "
            "optimizer.step() and zero_grad()",
            len(pending),
            pending[0],
        )
    sparse = [name for name, buffer in persistent_buffers(module) if buffer.layout != torch.strided]
    if sparse:
        logger.warning("the buffer %s is sparse and cannot be saved: %s", sparse[0], SPARSE_BUFFER_REMEDY)
    # Parameters on the meta device get separate memory before it is known which are trained.
    find_aliases(module, [param for param in module.parameters() if param.is_meta and param.requires_grad])
    owners = [child for child in module.modules() if child._parameters]
    return BuiltModule(module, is_new=all(owner in registered for owner in owners))


def plan_params(
    module: nn.Module,
    compute_dtype: torch.dtype,
    *,
    use_cpu_embedding: bool,
    in_groups: Collection[nn.Parameter] | None = None,
    quantization: QuantizationConfig | None = None,
) -> SortedParams:
    """Decides for each parameter of ``module`` whether it goes into a chunk, and its compute dtype.

    Args:
        module: the user's module.
        compute_dtype: 16-bit or float32.
        use_cpu_embedding: the configuration's value.
        in_groups: the optimizer's parameters; None: all parameters.
        quantization: the configuration's value; None: the modules' own (``freeze_quantizable``).

    Raises:
        ValueError: ``quantization.skip_modules`` names no module, no weight can be quantised, or a trained parameter
            shares memory with something else.
    """
    rules = _SortingRules(module, compute_dtype, use_cpu_embedding=use_cpu_embedding, in_groups=in_groups)
    quantizable = quantizable_weights(module, quantization)
    aliases = find_aliases(module, filter(rules.is_trained, module.parameters()), rules.may_tie)
    ties: dict[nn.Parameter, tuple[nn.Parameter, ...]] = {}
    for tied, owner in aliases.ties.items():
        ties[owner] = (*ties.get(owner, ()), tied)
    named = [(name, param) for name, param in module.named_parameters() if param not in aliases.ties]
    managed = [rules.managed(name, param) for name, param in named if param in rules.with_pytorch]
    chunked = [
        dataclasses.replace(
            rules.chunked(name, param),
            quantization=_C.QuantType.NONE if param.requires_grad else quantizable.get(param, _C.QuantType.NONE),
            ties=ties.get(param, ()),
        )
        for name, param in named
        if param not in rules.with_pytorch
    ]
    sorted_params = SortedParams(chunked=chunked, managed=managed, untrainable=aliases.untrainable)
    if quantization is not None and not sorted_params.quantized:
        raise ValueError(
            f"quantization is {quantization.type.value!r}, but no weight of a linear layer of {type(module).__name__} "
            "is frozen, and those that are trained are not quantised; put adapters around the model (get_peft_model), "
            "freeze weights with requires_grad_(False), or leave quantization out"
        )
    return sorted_params


class _SortingRules:
    """Properties of a module's parameters that decide where they go."""

    with_pytorch: set[nn.Parameter]
    """Parameters that stay with PyTorch."""

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype,
        *,
        use_cpu_embedding: bool,
        in_groups: Collection[nn.Parameter] | None,
    ):
        self._compute_dtype, self._in_groups = compute_dtype, in_groups
        self._scoped = _torch_scoped_params(module)
        self._on_host = _cpu_embeddings(module) if use_cpu_embedding else set()
        self._with_statistics = _params_with_statistics(module, compute_dtype)
        self._embeddings = _embedding_weights(module)
        kept = {*self._scoped, *self._on_host, *_renormalized(module)}
        self.with_pytorch = {
            param for param in module.parameters() if param in kept or not _is_plain(param, compute_dtype)
        }

    def is_trained(self, param: nn.Parameter) -> bool:
        return param.requires_grad and (self._in_groups is None or param in self._in_groups)

    def may_tie(self, one: nn.Parameter, other: nn.Parameter) -> bool:
        """True if both may be one parameter of a chunk."""
        norms = self._with_statistics
        alike = norms.get(one) == norms.get(other) and part_of(one) == part_of(other)
        return self.with_pytorch.isdisjoint((one, other)) and alike

    def managed(self, name: str, param: nn.Parameter) -> ManagedParam:
        """Raises ValueError if ranks do not share ``param``."""
        if part_of(param) is not None:
            raise ValueError(
                f"{name} is divided over ranks, but stays with PyTorch, where ranks share it; register it outside "
                "of torch_scope, or leave expert_parallel out"
            )
        return ManagedParam(
            name=name,
            param=param,
            on_host=param in self._on_host,
            all_reduced=self._scoped.get(param, True),
            trained=self.is_trained(param),
        )

    def chunked(self, name: str, param: nn.Parameter) -> ChunkedSpec:
        part = part_of(param)
        return ChunkedSpec(
            name=name,
            param=param,
            shape=param.shape if part is None else part.shape_of(param.shape),
            compute_dtype=self._with_statistics.get(param, self._compute_dtype),
            original_device=param.device,
            trained=self.is_trained(param),
            keeps_float32=param in self._embeddings or param.dim() < 2 or param.numel() < _LEAST_8_BIT_NUMEL,
            part=part,
        )


def is_converted(dtype: torch.dtype, compute_dtype: torch.dtype) -> bool:
    """True if values of ``dtype`` become ``compute_dtype``, as inputs of the module do: float32 and 16 bits always,
    float64 unless the engine computes in float32, 8 bits never.
    """
    return dtype in DTYPES or (dtype == torch.float64 and compute_dtype != torch.float32)


def _is_plain(param: nn.Parameter, compute_dtype: torch.dtype) -> bool:
    return (
        type(param) is nn.Parameter
        and is_converted(param.dtype, compute_dtype)
        and param.numel() > 0
        and param.layout == torch.strided
    )


def _embedding_weights(module: nn.Module) -> set[nn.Parameter]:
    """Includes weights that other modules use too."""
    embeddings = (child for child in module.modules() if isinstance(child, (nn.Embedding, nn.EmbeddingBag)))
    return {child.weight for child in embeddings if isinstance(child.weight, nn.Parameter)}


def _torch_scoped_params(module: nn.Module) -> dict[nn.Parameter, bool]:
    """Parameters made inside :func:`torch_scope`, with its ``do_allreduce``."""
    return {
        child._parameters[name]: do_allreduce
        for child in module.modules()
        for name, do_allreduce in _torch_scoped.get(child, {}).items()
        if name in child._parameters
    }


def _renormalized(module: nn.Module) -> set[nn.Parameter]:
    """Weights that their layer's forward writes."""
    embeddings = (child for child in module.modules() if isinstance(child, (nn.Embedding, nn.EmbeddingBag)))
    return {child.weight for child in embeddings if child.max_norm is not None}


def _cpu_embeddings(module: nn.Module) -> set[nn.Parameter]:
    """Embedding weights that no other kind of module uses; a tied output layer computes on the device."""
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


def statistics_dtype(module: nn.Module, compute_dtype: torch.dtype) -> torch.dtype | None:
    """The dtype of a layer's running statistics and parameters in training; kernels require one for both.

    The compute dtype if the statistics have it, else float32. None if the layer has no running statistics.
    """
    if not isinstance(module, nn.modules.batchnorm._NormBase) or module.running_mean is None:
        return None
    return compute_dtype if module.running_mean.dtype == compute_dtype else torch.float32


def _params_with_statistics(module: nn.Module, compute_dtype: torch.dtype) -> dict[nn.Parameter, torch.dtype]:
    params: dict[nn.Parameter, torch.dtype] = {}
    for child in module.modules():
        dtype = statistics_dtype(child, compute_dtype)
        if dtype is not None:
            params |= {param: dtype for param in child._parameters.values() if param is not None}
    return params
