"""The optimizer's face: a ``torch.optim.Optimizer`` whose step runs in the core.

Schedulers, ``param_groups`` and ``state_dict`` work as with ``torch.optim.Adam``; the state dict has torch's format, so
a run can move between the two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from patrickstar import _C
from patrickstar.chunked_parameter import ChunkedParameter
from patrickstar.config import Config, OptimizerType, check_adam_options
from patrickstar.managed_optimizer import managed_optimizer

if TYPE_CHECKING:
    from patrickstar.session import Session

_OPTIONS = ("lr", "betas", "eps", "weight_decay")


class HybridAdam(torch.optim.Optimizer):
    """Adam or AdamW over chunks, on the CPU or the GPU, wherever a chunk's states are.

    Made by ``initialize_engine``. A parameter that got no gradient since the last step is left alone (its step count
    too), as ``torch.optim`` leaves ``grad is None``.
    """

    def __init__(self, session: Session, groups: list[dict[str, Any]], config: Config):
        self._session = session
        self._built = False
        corrects = config.optimizer.params.bias_correction
        self._bias_correction = _C.BiasCorrection.APPLIED if corrects else _C.BiasCorrection.NONE
        self._mode = _C.WeightDecay.DECOUPLED if config.optimizer.type is OptimizerType.ADAMW else _C.WeightDecay.L2
        options = config.optimizer.params
        defaults = {"lr": options.lr, "betas": options.betas, "eps": options.eps, "weight_decay": options.weight_decay}
        for index, group in enumerate(groups):
            check_adam_options({**defaults, **group}, f"model_parameters[{index}]")
        super().__init__(groups, defaults)
        self._built = True
        session.expected_options = self._group_options
        session.param_groups = self.param_groups
        for index, group in enumerate(self.param_groups):
            for param in group["params"]:
                if isinstance(param, ChunkedParameter):
                    session.runtime.set_group(param._patrickstar.id, index)
        session.managed.make_optimizer(self.param_groups, managed_optimizer(config.optimizer))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while the optimizer is being built.

        Raises:
            RuntimeError: the engine is built; its chunks are laid out.
        """
        if self._built:
            raise RuntimeError(
                "parameter groups are fixed when the engine is built; pass all of them in model_parameters"
            )
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """Updates the parameters with the gradients of the backwards since the last step, then forgets the gradients.

        With loss scaling, a step whose gradients are not finite is skipped and the scale lowered; without it such a
        step is skipped too, with a warning, since it would destroy the parameters.

        Args:
            closure: runs forward and ``model.backward`` and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._session.step(self.param_groups, self._group_options())
        return loss

    @property
    def loss_scale(self) -> float:
        """The present loss scale; 1 without float16."""
        return self._session.loss_scale

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step updated nothing, because its gradients were not finite."""
        return not self._session.outcome.applied

    @property
    def overflow(self) -> bool:
        """The same, by DeepSpeed's name."""
        return self.step_was_skipped

    def _group_options(self) -> list[_C.GroupOptions]:
        """The groups' present options, as the core takes them."""
        return [
            _C.GroupOptions(
                lr=float(group["lr"]),
                beta1=float(group["betas"][0]),
                beta2=float(group["betas"][1]),
                eps=float(group["eps"]),
                weight_decay=float(group["weight_decay"]),
                mode=self._mode,
                bias_correction=self._bias_correction,
            )
            for group in self.param_groups
        ]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients since the last step."""
        self._session.zero_grad()

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """As ``torch.optim.Adam.state_dict``: ``step``, ``exp_avg`` and ``exp_avg_sq`` (float32, CPU) by parameter
        index, and the groups; with float16 also ``loss_scaler``. Parameters that were never updated have no state.
        """
        state: dict[int, dict[str, Any]] = {}
        groups, index = [], 0
        for group in self.param_groups:
            indices = []
            for param in group["params"]:
                entry = self._session.states.optimizer_state(param)
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
        """Takes what :meth:`state_dict` or ``torch.optim.Adam(W).state_dict`` gave for the same parameters.

        Raises:
            ValueError: the groups or the shapes of the states do not match; nothing is changed then.
        """
        saved_groups = state_dict["param_groups"]
        saved_sizes, sizes = (
            [len(group["params"]) for group in groups] for groups in (saved_groups, self.param_groups)
        )
        if saved_sizes != sizes:
            raise ValueError(
                f"the optimizer has groups of {sizes} parameters, the state dict of {saved_sizes}; "
                "build the engine with the same model_parameters"
            )
        pairs = [
            (param, saved)
            for group, saved_group in zip(self.param_groups, saved_groups, strict=True)
            for param, saved in zip(group["params"], saved_group["params"], strict=True)
        ]
        for param, saved in pairs:
            entry = state_dict["state"].get(saved)
            if entry and tuple(entry["exp_avg"].shape) != tuple(param.shape):
                raise ValueError(
                    f"state {saved} has shape {tuple(entry['exp_avg'].shape)}, its parameter {tuple(param.shape)}"
                )
        for param, saved in pairs:
            self._session.states.set_optimizer_state(param, state_dict["state"].get(saved, {}))
        for group, saved_group in zip(self.param_groups, saved_groups, strict=True):
            group.update({key: value for key, value in saved_group.items() if key != "params"})
        if self._session.scaler is not None and "loss_scaler" in state_dict:
            self._session.scaler.set_state(**state_dict["loss_scaler"])
