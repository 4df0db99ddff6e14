"""Parameters that an engine trains: those trained from the start, and those that are unfrozen later."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.utils.hooks import RemovableHandle

from patrickstar import _C
from patrickstar.module.chunked_parameter import drop_gradient, make_gradient_hook
from patrickstar.module.managed import ManagedParams
from patrickstar.module.preprocess import ChunkedSpec, ManagedParam, SortedParams
from patrickstar.optimizer.groups import some_of
from patrickstar.ranks.distributed import RankGroups
from patrickstar.session.rank_sync import failed_ranks

logger = logging.getLogger("patrickstar")
_Guard = Callable[[], contextlib.AbstractContextManager[None]]


def _refusal_of_tied(spec: ChunkedSpec) -> str:
    return (
        f"a parameter that has the memory of {spec.name} requires grad by now, and an engine has one state for both; "
        "freeze it again, or assign the parameter itself before the engine is built"
    )


class TrainedParams:
    """The trained parameters of one engine, which are in chunks.

    Setting ``requires_grad`` or adding a group sends no notification. So each training forward first checks a flag of
    every untrained parameter. Newly trained ones get optimizer states for their chunks, gradient hooks, and a step
    count of 0. All ranks must find the same parameters; either all of them get states or none.

    A parameter that is frozen again keeps its states, and is skipped like any parameter without a gradient.

    Args:
        params: where parameters are, and which are trained at first.
        layout: Python's own copy, kept equal to the core's.
        runtime: the core.
        managed: parameters that PyTorch keeps.
        ranks: that train together.
        groups: returns the optimizer's groups.
    """

    def __init__(
        self,
        params: SortedParams,
        layout: _C.Layout,
        runtime: _C.Runtime,
        managed: ManagedParams,
        ranks: RankGroups,
        groups: Callable[[], Sequence[dict[str, Any]]],
    ):
        self._layout = layout
        self._runtime = runtime
        self._managed = managed
        self._ranks = ranks
        self._groups = groups
        self._untrainable = dict(params.untrainable)
        for spec in params.chunked:
            self._untrainable.update((tied, _refusal_of_tied(spec)) for tied in spec.ties)
        self._ties = [tied for spec in params.chunked for tied in spec.ties]
        self._gradient_hooks: list[_C.GradientHook] = []
        self._params: list[nn.Parameter] = []
        self._step_counts: dict[int, int] = {}
        """Parameter id -> its step count at the end of the last step."""
        self._handles: dict[nn.Parameter, RemovableHandle] = {}
        """Hooks of parameters in chunks that require grad, or did."""
        specs: list[ChunkedSpec | ManagedParam] = [*params.chunked, *params.managed]
        self._untrained = [spec for spec in specs if not spec.trained]
        self._asking: list[ChunkedSpec | ManagedParam] = []
        """Untrained parameters that required grad at the last check."""
        self._left_out = {id(spec) for spec in self._untrained if spec.param.requires_grad}
        """Specs of :attr:`_untrained` that a warning named: the first ones when the engine was opened."""
        self._num_grouped = 0
        """Number of parameters in the groups at the last check."""
        self.untrained_at_first = {spec.param._patrickstar.id for spec in params.chunked if not spec.trained}
        """Ids of parameters in chunks."""
        self._first = [spec.param for spec in params.chunked if spec.trained]

    def attach(self) -> None:
        """Installs hooks on parameters that are trained at first, and on untrained ones that require grad."""
        for param in self._first:
            self._accumulate_gradients_of(param)
        self._drop_gradients_of(spec for spec in self._untrained if spec.param.requires_grad)

    def remove(self) -> None:
        """Removes the gradient hooks."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def got_gradient(self) -> set[int]:
        """Ids of parameters in chunks that ever got a gradient."""
        return {hook.param for hook in self._gradient_hooks if hook.has_accumulated}

    def end_step(self) -> None:
        """Tells autograd which parameters the step has changed, as ``torch.optim`` does.

        A backward of a forward from before the step then raises, where it needs the old values.
        """
        for hook, param in zip(self._gradient_hooks, self._params, strict=True):
            count = self._runtime.step_count(hook.param)
            if self._step_counts.get(hook.param, 0) != count:
                self._step_counts[hook.param] = count
                increment_version(param)

    def drop_left_gradients(self) -> None:
        """Drops gradients that an interrupted backward left in ``.grad``, where autograd would add to them."""
        for param in self._params:
            drop_gradient(param)

    def follow(self, guard: _Guard) -> None:
        """Starts training parameters that require grad and are in a group by now.

        Collective over all ranks, at the same point between a step's forwards and backwards. ``guard`` wraps their
        exchanges.

        Raises:
            MemoryBudgetError: a rank has no room for their states; nothing is changed.
            ValueError: a parameter is quantised, or shares memory with another.
            DisagreementError: ranks found different parameters; nothing is changed.
        """
        for tied in self._ties:
            if tied.requires_grad:
                raise ValueError(self._untrainable[tied])
        if not self._untrained:
            return
        new = self._found()
        if len(self._ranks.members) > 1:
            names = ", ".join(spec.name for spec in new)
            with guard():
                self._ranks.check_agreement("the parameters that are trained from now on", names or "none")
        for spec in new:
            if spec.param in self._untrainable:
                raise ValueError(self._untrainable[spec.param])
            if isinstance(spec, ChunkedSpec) and spec.quantization is not _C.QuantType.NONE:
                raise ValueError(
                    f"{spec.name} requires grad by now, but is quantised ({spec.quantization.name.lower()}), and so "
                    "few bits cannot be trained; freeze it with requires_grad_(False), or leave it out of quantisation "
                    "when the engine is made (quantization.skip_modules)"
                )
        if new:
            self._train(new, guard)

    def _found(self) -> list[ChunkedSpec | ManagedParam]:
        with torch._C.DisableTorchFunctionSubclass():
            asking = [spec for spec in self._untrained if spec.param.requires_grad]
        groups = self._groups()
        num_grouped = sum(len(group["params"]) for group in groups)
        if asking == self._asking and num_grouped == self._num_grouped:
            return []
        self._drop_gradients_of(asking)
        grouped = {param for group in groups for param in group["params"]}
        found = [spec for spec in asking if spec.param in grouped]
        if not found:
            self._asking, self._num_grouped = asking, num_grouped
        self._warn_of([spec for spec in asking if spec.param not in grouped])
        return found

    def _warn_of(self, left_out: Sequence[ChunkedSpec | ManagedParam]) -> None:
        new = [spec for spec in left_out if id(spec) not in self._left_out]
        self._left_out.update(map(id, new))
        if new:
            logger.warning(
                "%d parameters require grad by now but are in no group of the optimizer (%s): they are not trained; "
                "add them with optimizer.add_param_group",
                len(new),
                some_of([spec.name for spec in new]),
            )

    def _train(self, specs: list[ChunkedSpec | ManagedParam], guard: _Guard) -> None:
        chunked = [spec for spec in specs if isinstance(spec, ChunkedSpec)]
        chunks = sorted({spec.param._patrickstar.chunk for spec in chunked})
        chunks = [chunk for chunk in chunks if not self._layout.chunk(chunk)["trainable"]]
        failure: Exception | None = None
        try:
            self._runtime.make_states(chunks)
        except Exception as error:
            failure = error
        with guard():
            failed = failed_ranks(self._ranks, failure)
        if failed:
            if failure is None:
                self._runtime.discard_states(chunks)
            more = f" and {len(specs) - 1} more parameters" if len(specs) > 1 else ""
            what = f"{specs[0].name}{more} cannot be trained from now on: {failed if failure is None else failure}"
            raise _C.MemoryBudgetError(what) from failure
        for index, group in enumerate(self._groups()):
            for param in set(group["params"]).intersection(spec.param for spec in chunked):
                self._runtime.set_group(param._patrickstar.id, index)
        self._runtime.train([spec.param._patrickstar.id for spec in chunked])
        for chunk in chunks:
            self._layout.train(chunk)
        for spec in chunked:
            spec.param._patrickstar.trainable = True
            self._accumulate_gradients_of(spec.param)
        self._managed.train({spec.param for spec in specs if isinstance(spec, ManagedParam)})
        new = {spec.param for spec in specs}
        self._untrained = [spec for spec in self._untrained if spec.param not in new]
        self._asking = [spec for spec in self._untrained if spec.param.requires_grad]

    def _accumulate_gradients_of(self, param: nn.Parameter) -> None:
        if param in self._handles:
            self._handles.pop(param).remove()
        drop_gradient(param)
        hook = make_gradient_hook(param, self._runtime)
        self._handles[param] = param.register_post_accumulate_grad_hook(hook)
        self._gradient_hooks.append(hook)
        self._params.append(param)

    def _drop_gradients_of(self, specs: Iterable[ChunkedSpec | ManagedParam]) -> None:
        for spec in specs:
            if isinstance(spec, ChunkedSpec) and spec.param not in self._handles:
                self._handles[spec.param] = spec.param.register_post_accumulate_grad_hook(drop_gradient)
