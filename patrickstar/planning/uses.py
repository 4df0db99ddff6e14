"""Traces the parameter uses of a training step on the meta device: no computation, no memory, seconds for any model.

The hooks of an engine (hooks.py, observer.py, chunked_parameter.py) report to a :class:`UseRecorder` instead of the
core. A dispatch mode counts the cost of operations between two uses and the live memory. Value-dependent control flow
is not seen: every condition is true.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from patrickstar import _C
from patrickstar.activations.activation_rules import LEAST_ATTENTION_TOKENS
from patrickstar.activations.call_measurement import CallMeasurement
from patrickstar.activations.checkpoint_calls import CheckpointCalls
from patrickstar.module.checkpointed_layers import is_checkpointed
from patrickstar.module.chunked_parameter import accumulated_gradient, become_chunked, become_tied
from patrickstar.module.hooks import ModuleHooks
from patrickstar.module.layouts import owned_params
from patrickstar.module.managed import ManagedParams
from patrickstar.module.observer import Observer
from patrickstar.module.param_handle import ParamHandle
from patrickstar.module.preprocess import ChunkedSpec, SortedParams
from patrickstar.planning.known_values import KnownValues
from patrickstar.planning.leaving import KeptEvent, KeptTensors, Span
from patrickstar.planning.machines import Gpu
from patrickstar.planning.meta_observer import MetaObserver
from patrickstar.planning.meta_operations import MetaOperations
from patrickstar.planning.operation_costs import (
    FUSED_ATTENTION,
    FusedAttention,
    FusedKernel,
    OperationCosts,
    tensors_in,
)
from patrickstar.planning.repeated_layers import Stack, find_repetition
from patrickstar.planning.repeated_uses import DoesNotRepeatError, extended
from patrickstar.planning.sharded_matrices import Costs
from patrickstar.planning.step_uses import StepUses, UseRecorder
from patrickstar.sequence.tiling import equal_tiles_once

_ALLOCATION_ROUNDING = 512  # bytes, in PyTorch's CUDA allocator


class Division(Protocol):
    """Parallelism of a traced model."""

    def trace(self, costs: Costs) -> None:
        """Begins a traced step; waits for other ranks are charged to ``costs``."""
        ...


class _CostMode(TorchDispatchMode):
    """Adds cost and live memory of operations to the recorder's last use."""

    def __init__(self, recorder: UseRecorder, costs: OperationCosts, operations: MetaOperations, values: KnownValues):
        super().__init__()
        self._recorder = recorder
        self._operations = operations
        self._values = values
        self._costs = costs
        self._alive: dict[int, weakref.ref] = {}
        self._bytes = 0
        self._ignored: set[int] = set()
        self._kept: KeptTensors | None = None
        self._count = 1
        self.flops = 0.0
        self.seconds = 0.0
        self.num_operations = 0

    def ignore(self, tensor: torch.Tensor) -> None:
        """Excludes ``tensor`` from activation memory."""
        self._watch(tensor, 0)
        self._ignored.add(tensor.untyped_storage()._cdata)

    def tell_attention(self, kept: KeptTensors) -> None:
        """Reports attention calls to ``kept`` from now on."""
        self._kept = kept

    def meet(self, event: KeptEvent) -> None:
        """Records the keeping, use or release of a tensor."""
        if self._recorder.uses:
            self._recorder.uses[-1].spans.append(Span(event, self._bytes))

    def is_ignored(self, storage: int) -> bool:
        """True if the storage at this address is excluded from activation memory."""
        return storage in self._ignored

    @property
    def repetitions(self) -> int:
        """Number of identical consecutive operations that one operation represents now."""
        return self._count

    def count(self, count: int) -> None:
        """Lets each operation represent ``count`` identical consecutive ones."""
        self._count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # already applied to the operation
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        is_read = func is torch.ops.aten._local_scalar_dense.default
        if is_read and self._values.find(args[0]) is None:
            return True if args[0].dtype == torch.bool else 1
        out, key = self._values.run(func, args, kwargs, self._operations.run)
        outputs = tensors_in(out)
        is_on_host = outputs and all(tensor.device.type == "cpu" for tensor in outputs)  # such as random number states
        if is_read or is_on_host:
            return out
        for tensor in outputs:
            storage = tensor.untyped_storage()
            self._watch(tensor, -(-storage.nbytes() // _ALLOCATION_ROUNDING) * _ALLOCATION_ROUNDING)
        if self._recorder.uses:
            use = self._recorder.uses[-1]
            span = use.spans[-1]
            span.peak_bytes = max(span.peak_bytes, self._bytes)
            cost = self._costs.find(func, key, args, kwargs, out)
            if cost is not None:
                seconds = self._count * cost.seconds
                self._spend(seconds, self._count * cost.flops, self._count)
                if func.overloadpacket in FUSED_ATTENTION and self._kept is not None:
                    self._note_attention(self._kept, FUSED_ATTENTION[func.overloadpacket], args, outputs, seconds)
        return out

    @staticmethod
    def _note_attention(
        kept: KeptTensors, kernel: FusedKernel, args: Any, outputs: list[torch.Tensor], seconds: float
    ) -> None:
        dropout_p = args[kernel.dropout] if len(args) > kernel.dropout else 0.0
        if dropout_p or args[kernel.query].shape[-2] < LEAST_ATTENTION_TOKENS:
            return
        if kernel.products == 2:
            kept.note_attention(sum(out.nbytes for out in outputs), seconds)
        else:
            kept.end_attention()

    def charge(self, seconds: float, flops: float) -> None:
        """Adds a cost without an operation."""
        self._spend(seconds, flops, 1)

    def _spend(self, seconds: float, flops: float, num_operations: int) -> None:
        self.flops += flops
        self.num_operations += num_operations
        if self._recorder.uses:
            self.seconds += seconds
            use = self._recorder.uses[-1]
            use.seconds += seconds
            use.flops += flops
            use.num_operations += num_operations

    def _watch(self, tensor: torch.Tensor, num_bytes: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return

        def forget(_reference: Any) -> None:
            if self._alive.pop(key, None) is not None:
                self._bytes -= num_bytes

        self._alive[key] = weakref.ref(storage, forget)
        self._bytes += num_bytes


def trace_uses(
    module: nn.Module,
    params: SortedParams,
    compute_dtype: torch.dtype,
    inputs: Mapping[str, Any],
    gpu: Gpu,
    loss: Callable[[Any], torch.Tensor] = lambda out: out["loss"],
    divisions: Sequence[Division] = (),
    stack: Stack | None = None,
) -> StepUses:
    """Traces two training steps of ``module`` on the meta device and returns the uses of the second; the hooks learn in
    the first. ``module`` must not be used afterwards.

    Args:
        module: built on the meta device (``with torch.device("meta")``).
        params: the division into chunked and other parameters.
        compute_dtype: of the step.
        inputs: keyword arguments of the module's forward. Tensors on the meta device have no values; shapes that
            follow from values need them.
        gpu: rates for operations.
        loss: returns the loss from the module's output.
        divisions: parallelism in use that changes what a rank computes.
        stack: the part whose layers may repeat; None: the whole module.
    """
    module.train()
    tracer = _Tracer(module, params, compute_dtype, inputs, gpu, loss, divisions)
    repetition = None if divisions else find_repetition(stack or Stack(module), params)
    if repetition is not None:
        with contextlib.suppress(DoesNotRepeatError):
            with repetition.shortened():
                traced = tracer.trace()
            return extended(traced, repetition)
    return tracer.trace()


class _Tracer:
    """Traces a module, or what is left of it at the time (``Repetition.shortened``)."""

    def __init__(
        self,
        module: nn.Module,
        params: SortedParams,
        compute_dtype: torch.dtype,
        inputs: Mapping[str, Any],
        gpu: Gpu,
        loss: Callable[[Any], torch.Tensor],
        divisions: Sequence[Division],
    ):
        self._module, self._params, self._loss, self._divisions = module, params, loss, divisions
        self._recorder = UseRecorder()
        self._observer = MetaObserver(self._recorder)  # type: ignore[arg-type]
        self._managed = ManagedParams(module, params.managed, compute_dtype, torch.device("meta"))
        self._values = KnownValues()
        self._inputs = tree_map_only(torch.Tensor, functools.partial(self._to_meta, dtype=compute_dtype), dict(inputs))
        self._operations, self._costs = MetaOperations(), OperationCosts(gpu)
        self._owned = owned_params(params, module)
        self._adopted: set[int] = set()
        self._got_gradient = {index for index, spec in enumerate(params.chunked) if not spec.trained}
        outside = [item.param for item in params.managed if not item.on_host]
        static = [*module.buffers(), *outside, *tree_leaves(self._inputs)]
        self._static_bytes = sum(t.numel() * t.itemsize for t in static if isinstance(t, torch.Tensor))

    def trace(self) -> StepUses:
        """Traces two steps and returns the uses of the second."""
        module, recorder = self._module, self._recorder
        self._adopt_present()
        hooks = ModuleHooks(module, self._observer)
        checkpoint_calls = CheckpointCalls(module)
        for _ in range(2):
            costs = _CostMode(recorder, self._costs, self._operations, self._values)
            static = [self._params.chunked[index].param for index in self._adopted]
            static += [tensor for tensor in tensors_in(self._inputs) if type(tensor) is torch.Tensor]
            for tensor in static:
                costs.ignore(tensor)
            recorder.clear()
            for division in self._divisions:
                division.trace(costs)
            kept = KeptTensors(costs.meet, costs.is_ignored)
            costs.tell_attention(kept)
            measurement = _measurement(recorder, costs)
            if not checkpoint_calls.obstacle:
                checkpoint_calls.observe(measurement)
            with FusedAttention(), self._values.keeping_numbers(), costs, equal_tiles_once(costs.count):
                with kept.keeping(), checkpoint_calls.running():
                    out = module(**self._inputs)
                value = self._loss(out)
                del out
                recorder.note(_C.UseCall.END_FORWARD)
                kept.begin_backward()
                _run_backward(value)
            del value
            self._managed.zero_grad()
            hooks.finish_learning(self._got_gradient)
        hooks.remove()
        return StepUses(
            uses=recorder.uses,
            flops=costs.flops,
            num_operations=costs.num_operations,
            static_bytes=self._static_bytes,
            module_params=self._owned,
            checkpoints=is_checkpointed(module),
            calls=measurement.finish(),
            is_quadratic=measurement.is_quadratic,
        )

    def _to_meta(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        wanted = dtype if tensor.is_floating_point() else tensor.dtype
        if not tensor.is_meta:
            return self._values.on_meta(tensor, wanted)
        return tensor if tensor.dtype == wanted else torch.empty_like(tensor, dtype=wanted)

    def _adopt_present(self) -> None:
        present = set(self._module.parameters())
        for index, spec in enumerate(self._params.chunked):
            if spec.param not in present or index in self._adopted:
                continue
            self._adopted.add(index)
            _adopt(spec, index, self._observer)
            if spec.trained:
                notify = functools.partial(_accumulate, self._recorder, self._got_gradient)
                spec.param.register_post_accumulate_grad_hook(notify)


def _measurement(recorder: UseRecorder, costs: _CostMode) -> CallMeasurement:
    return CallMeasurement(
        lambda: len(recorder.uses) - 1, lambda: costs.seconds, torch.device("meta"), costs.is_ignored, proof=None
    )


def _run_backward(loss: torch.Tensor) -> None:
    # Not loss.backward(), which suspends function modes: recomputation must see fused attention too.
    torch.autograd.Variable._execution_engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _adopt(spec: ChunkedSpec, index: int, observer: Observer) -> None:
    param = spec.param
    shape, stride = spec.shape, param.stride()
    original = param.dtype
    view = torch.empty_strided(shape, stride, dtype=spec.compute_dtype, device="meta")
    handle = ParamHandle(
        id=index,
        name=spec.name,
        chunk=-1,
        storage=view.untyped_storage()._cdata,
        shape=shape,
        stride=stride,
        offset=0,
        share=slice(0, shape.numel()),
        dtype=spec.compute_dtype,
        trainable=spec.trained,
        original_dtype=original,
        original_device=param.device,
        observer=observer,
        uses=observer.uses,
    )
    become_chunked(param, view, handle)
    for tied in spec.ties:
        become_tied(tied, view, handle)


def _accumulate(recorder: UseRecorder, got_gradient: set[int], param: nn.Parameter) -> None:
    accumulated_gradient(param)
    index = param._patrickstar.id
    got_gradient.add(index)
    recorder.note(_C.UseCall.ACCUMULATE, [index])
