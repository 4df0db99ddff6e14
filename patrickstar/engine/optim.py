"""The optimizer that users hold: a ``torch.optim.Optimizer`` whose step runs in the core.

Schedulers, ``param_groups`` and ``state_dict`` work as with the ``torch.optim`` class of the same type. The state dict
has torch's format, so a run can move between the two. Subclasses translate a group's options for the core.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from patrickstar import _C
from patrickstar.config import Config, OptimizerType, check_loss_scaler_state, group_options, rule_of
from patrickstar.engine.optimizer_states import OptimizerStates
from patrickstar.module.chunked_parameter import ChunkedParameter, is_tied, whole_shape
from patrickstar.module.compiled.dynamo import outside_of_graphs
from patrickstar.optimizer.core_options import CoreOptions
from patrickstar.optimizer.groups import checked_added_group
from patrickstar.optimizer.loss_scaling import LossScaling
from patrickstar.optimizer.managed_optimizer import managed_optimizer
from patrickstar.optimizer.state import CheckedState, check_no_refused_option, checked_state
from patrickstar.session.session import Session
from patrickstar.session.step_loop import StepLoop
from patrickstar.session.step_state import OptimizerLink
from patrickstar.session.wholeness import State


class HybridOptimizer(torch.optim.Optimizer):
    """An optimizer over chunks, on the CPU or the GPU, wherever a chunk's states rest. Made by ``initialize_engine``.

    Parameters without a gradient since the last step are skipped, including their step count, as ``torch.optim`` skips
    ``grad is None``.
    """

    def __init__(self, session: Session, groups: list[dict[str, Any]], config: Config):
        self._session = session
        self._loop = StepLoop(session)
        self._built = False
        self._members: list[list[torch.Tensor]] = []
        """Parameters of each group at the last look."""
        self._type = config.optimizer.type
        options = config.optimizer.params.model_dump()
        defaults = {key: options[key] for key in rule_of(self._type).options}
        for index, group in enumerate(groups):
            group_options(self._type, {**defaults, **group}, f"model_parameters[{index}]")
        super().__init__(groups, defaults)
        self._built = True
        session.optimizer = OptimizerLink(self._group_options, lambda: self.param_groups, self._tell_groups)
        self._tell_groups()

    def _core_options(self, group: Mapping[str, Any]) -> CoreOptions:
        """A group's present options, as plain numbers, in the core's type."""
        raise NotImplementedError

    def _check_same_formula(self, group: Mapping[str, Any], what: str) -> None:
        """Raises ValueError if ``group`` belongs to an optimizer with another update formula."""

    def _tell_groups(self) -> None:
        session = self._session
        for index, group in enumerate(self.param_groups):
            for param in group["params"]:
                if isinstance(param, ChunkedParameter) and not is_tied(param):
                    session.runtime.set_group(param._patrickstar.id, index)
        session.managed.make_optimizer(self.param_groups, managed_optimizer(session.config.optimizer))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Like ``torch.optim.Optimizer.add_param_group``, for parameters of the module that are in no group.

        They are trained from the next forward on if they require grad (see ``TrainedParams``). All ranks must add the
        same.

        Raises:
            TypeError: ``param_group`` is no dict, or its ``params`` are unordered.
            ValueError: a parameter is foreign or in a group already, or an option is unknown or impossible. Nothing is
                changed.
        """
        if self._built:
            what = "the added parameter group"
            options = rule_of(self._type).options
            session = self._session
            param_group = checked_added_group(
                session.module, session.has_param, param_group, self.param_groups, options
            )
            check_no_refused_option(param_group, what)
            self._check_same_formula({**self.defaults, **param_group}, what)
            group_options(self._type, {**self.defaults, **param_group}, what)
        super().add_param_group(param_group)

    @property
    def state(self) -> OptimizerStates:  # type: ignore[override]
        """States by parameter; copies, which refuse writes. Assignments reach the chunks."""
        return OptimizerStates(self._session, self._type, self.param_groups)

    @state.setter
    def state(self, states: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        if not self._built:  # torch's own constructor
            return
        kept = self.state
        kept.clear()
        kept.update(states)

    @outside_of_graphs
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """Updates the parameters with the gradients since the last step, then drops the gradients.

        If a step raised after a part was updated, for example for want of memory, the next call finishes it with its
        own options (``session/optimizer_step.py``).

        A step with gradients that are not finite is skipped. With loss scaling the scale is lowered; without it a
        warning is logged.

        Args:
            closure: runs forward and ``model.backward`` and returns the loss; not called to finish a step.
        """
        loss = None
        if closure is not None and self._session.whole.state is not State.IN_STEP:
            with torch.enable_grad():
                loss = closure()
        self._loop.step(self.param_groups, self._group_options())
        return loss

    @property
    def loss_scale(self) -> float:
        """The present loss scale; 1 without float16."""
        return self._session.loss_scale

    @property
    def loss_scaler(self) -> LossScaling:
        """The loss scaler's state, under DeepSpeed's names."""
        return LossScaling(self._session.scaler, self._session.config.fp16)

    @property
    def loss_scale_config(self) -> LossScaling:
        """DeepSpeed's alias of :attr:`loss_scaler`."""
        return self.loss_scaler

    @property
    def cur_scale(self) -> float:
        """DeepSpeed's alias of :attr:`loss_scale`."""
        return self.loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """True if the loss scale follows overflows."""
        return self.loss_scaler.dynamic

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step updated nothing because its gradients were not finite."""
        return not self._session.outcome.applied

    @property
    def overflow(self) -> bool:
        """DeepSpeed's alias of :attr:`step_was_skipped`."""
        return self.step_was_skipped

    def _group_options(self) -> list[CoreOptions]:
        """The groups' present options in the core's type.

        Raises:
            ValueError: a group has an option that engines lack, or a parameter has left its group, and the core would
                update it still.
        """
        for index, members in enumerate(self._members):
            now = self.param_groups[index]["params"] if index < len(self.param_groups) else []
            if len(now) < len(members) or not all(map(operator.is_, members, now)):
                raise ValueError(
                    f"parameters of the optimizer's group {index} were removed or moved, but those of an engine stay "
                    "in the groups that it was made with; freeze them with requires_grad_(False), set the group's "
                    "lr, or make a new engine. Add parameters with optimizer.add_param_group"
                )
        for index, group in enumerate(self.param_groups):
            check_no_refused_option(group, f"parameter group {index}")
        self._members = [list(group["params"]) for group in self.param_groups]
        return [self._core_options(group) for group in self.param_groups]

    @outside_of_graphs
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients since the last step."""
        self._loop.zero_grad()

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Torch's ``state_dict``: ``step`` and states (float32, CPU) by parameter index, and groups; with float16 also
        ``loss_scaler``. Parameters without an update have no state.
        """
        state: dict[int, dict[str, Any]] = {}
        groups, index = [], 0
        for group in self.param_groups:
            indices = []
            for param in group["params"]:
                entry = {} if is_tied(param) else self._session.states.optimizer_state(param)
                if entry:
                    state[index] = entry
                indices.append(index)
                index += 1
            groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": indices})
        result: dict[str, Any] = {"state": state, "param_groups": groups}
        if self._session.scaler is not None:
            result["loss_scaler"] = dict(self._session.scaler.state())
        return result

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of :meth:`state_dict`, or of torch's optimizer of this type, for the same parameters.

        Raises:
            ValueError: groups, states or options do not match, or are not supported; nothing is changed.
        """
        entries, groups = self.checked_state(state_dict)
        scaler = self._session.scaler
        self._session.train_unfrozen()
        for param, entry in entries:
            if not is_tied(param):
                self._session.states.set_optimizer_state(param, entry)
        for own, group in zip(self.param_groups, groups, strict=True):
            own.update(group)
        if scaler is not None and "loss_scaler" in state_dict:
            scaler.set_state(**state_dict["loss_scaler"])

    def checked_state(self, state_dict: dict[str, Any]) -> CheckedState:
        """Checks ``state_dict`` as :meth:`load_state_dict` does, and returns its content. Changes nothing.

        Raises:
            ValueError: the state dict is refused.
        """
        checked = checked_state(self._type, state_dict, self.param_groups, whole_shape)
        for index, group in enumerate(checked.groups):
            self._check_same_formula(group, f"group {index} of the state dict")
        if self._session.scaler is not None and "loss_scaler" in state_dict:
            check_loss_scaler_state(self._session.config, state_dict["loss_scaler"])
        return checked


class HybridAdam(HybridOptimizer):
    """Adam or AdamW over chunks."""

    def __init__(self, session: Session, groups: list[dict[str, Any]], config: Config):
        corrects = config.optimizer.params.bias_correction
        self._bias_correction = _C.BiasCorrection.APPLIED if corrects else _C.BiasCorrection.NONE
        self._mode = _C.WeightDecay.DECOUPLED if config.optimizer.type is OptimizerType.ADAMW else _C.WeightDecay.L2
        super().__init__(session, groups, config)

    def _core_options(self, group: Mapping[str, Any]) -> _C.AdamOptions:
        return _C.AdamOptions(
            lr=float(group["lr"]),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            mode=self._mode,
            bias_correction=self._bias_correction,
        )

    def _check_same_formula(self, group: Mapping[str, Any], what: str) -> None:
        decoupled = self._mode == _C.WeightDecay.DECOUPLED
        if group.get("decoupled_weight_decay") and not decoupled and group["weight_decay"] > 0:
            raise ValueError(
                f"{what} is AdamW's, with decoupled weight decay, and the engine's optimizer is Adam; set "
                'optimizer.type to "AdamW"'
            )
        corrects = self._bias_correction == _C.BiasCorrection.APPLIED
        if bool(group.get("bias_correction", corrects)) != corrects:
            raise ValueError(
                f"{what} has bias_correction={group['bias_correction']!r}, the engine's optimizer {corrects}; set "
                "optimizer.params.bias_correction to the former"
            )


class HybridLion(HybridOptimizer):
    """Lion over chunks, like :class:`patrickstar.optimizer.lion.Lion`."""

    def _core_options(self, group: Mapping[str, Any]) -> _C.LionOptions:
        return _C.LionOptions(
            lr=float(group["lr"]),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            weight_decay=float(group["weight_decay"]),
        )


class HybridSGD(HybridOptimizer):
    """SGD over chunks, like ``torch.optim.SGD``; the momentum buffer exists even if its factor is 0."""

    def _core_options(self, group: Mapping[str, Any]) -> _C.SgdOptions:
        return _C.SgdOptions(
            lr=float(group["lr"]),
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            weight_decay=float(group["weight_decay"]),
            mode=_C.SgdMomentum.NESTEROV if group["nesterov"] else _C.SgdMomentum.HEAVY_BALL,
        )


_CLASSES: dict[OptimizerType, type[HybridOptimizer]] = {
    OptimizerType.ADAM: HybridAdam,
    OptimizerType.ADAMW: HybridAdam,
    OptimizerType.LION: HybridLion,
    OptimizerType.SGD: HybridSGD,
}


def make_optimizer(session: Session, groups: list[dict[str, Any]], config: Config) -> HybridOptimizer:
    """The optimizer that ``config`` asks for, over the parameters of ``session``."""
    return _CLASSES[config.optimizer.type](session, groups, config)
