"""Hugging Face causal language models whose loss is computed without all logits; no model code is changed.

    fused = fuse_loss(model)   # before it goes into an engine, or any other training
    fused.restore()

If the model is called with labels, its head returns a :class:`LateLogits`, which has the shape of the logits and no
memory. The model's loss function recognises it and computes the loss tile by tile. Any other function gets real logits,
computed at that point. So a model that transforms its logits trains unchanged, without the saving.

After a training forward logits can no longer be computed; using them raises an error. After an evaluation forward they
can be computed until the next forward begins, which may change their inputs.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from patrickstar.sequence.losses import linear_cross_entropy, tiled_cross_entropy
from patrickstar.sequence.memoryless import ASKED_FREELY

_LOSS_TYPE = "ForCausalLM"


def fuse_loss(model: nn.Module, num_ranks: int = 1) -> FusedModel:
    """Makes a Hugging Face causal language model compute its loss without all logits.

    Losses equal those of the model's own loss function up to rounding; sums over tiles are in float32. In training with
    labels, ``logits`` of the output cannot be used. With autograd off, they are computed on use. With several ranks
    they are computed at once, since one rank could not do it alone.

    Returns:
        an object that undoes the change.

    Raises:
        ValueError: the model has another loss, or no linear output layer.
    """
    check_fusable(model)
    return FusedModel(model, num_ranks)


def check_fusable(model: nn.Module) -> None:
    """Raises ValueError if the loss of ``model`` cannot be fused with its output layer; changes nothing."""
    if not isinstance(_head_of(model), nn.Linear):
        raise ValueError(f"{type(model).__name__} has no linear output layer, so its loss cannot be fused with it")
    if "_loss_function" in vars(model) or getattr(model, "loss_type", None) not in (_LOSS_TYPE, None):
        raise ValueError(f"{type(model).__name__} has a loss of its own; only {_LOSS_TYPE} can be fused")


def _head_of(model: nn.Module) -> nn.Module | None:
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


class FusedModel:
    """A model whose loss is fused with its output layer."""

    def __init__(self, model: nn.Module, num_ranks: int):
        self._model = model
        head = _head_of(model)
        assert head is not None
        self._head = head
        self._forward = vars(head).get("forward")
        state = _State()
        model.loss_function = _FusedLoss(model.loss_function)
        self._handles = (
            model.register_forward_pre_hook(state.begin, with_kwargs=True),
            model.register_forward_hook(state.end, always_call=True),
        )
        head.forward = _LateHead(state, head.forward, num_ranks)  # type: ignore[method-assign]

    def restore(self) -> None:
        """Restores loss function and output layer."""
        for handle in self._handles:
            handle.remove()
        vars(self._model).pop("_loss_function", None)
        if self._forward is None:
            vars(self._head).pop("forward", None)
        else:
            self._head.forward = self._forward  # type: ignore[method-assign]


class _Forward(enum.Enum):
    """Kinds of a forward, by who needs its logits."""

    NONE = enum.auto()
    """No forward runs, or the caller needs real logits."""
    TRAINING = enum.auto()
    """Only the loss needs them."""
    EVALUATION = enum.auto()
    """The loss needs them, and the caller may."""


@dataclasses.dataclass
class _State:
    """Kind and number of the model's current forward."""

    running: _Forward = _Forward.NONE
    number: int = 0

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.number += 1
        self.running = _Forward.NONE
        if kwargs.get("labels") is None:
            return
        if not torch.is_grad_enabled():
            self.running = _Forward.EVALUATION
        elif module.training:
            self.running = _Forward.TRAINING

    def end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.running = _Forward.NONE


class _LateHead:
    """Replaces the forward of the output layer."""

    postpones_uses = True
    """See ``ModuleHooks.leave_out``."""

    def __init__(self, state: _State, forward: Callable[[torch.Tensor], torch.Tensor], num_ranks: int):
        self._state = state
        self._forward = forward
        self._late = {_Forward.TRAINING, _Forward.EVALUATION} if num_ranks == 1 else {_Forward.TRAINING}

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns real or late logits."""
        if self._state.running not in self._late:
            return self._forward(hidden)
        head: nn.Linear = self._forward.__self__  # type: ignore[attr-defined]
        return LateLogits(hidden, head, self._state)


class LateLogits(torch.Tensor):
    """Logits that are computed on use; see the module's docstring."""

    hidden: torch.Tensor
    head: nn.Linear

    @staticmethod
    def __new__(cls, hidden: torch.Tensor, head: nn.Linear, state: _State) -> LateLogits:  # noqa: D102
        shape = (*hidden.shape[:-1], head.out_features)
        late = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=hidden.dtype, device=hidden.device)
        late.hidden, late.head, late._state = hidden, head, state
        late._made_in, late._number = state.running, state.number
        late._values = None
        return late

    def __init__(self, *_: Any):
        super().__init__()

    def made(self) -> torch.Tensor:
        """Computes real logits.

        Raises:
            RuntimeError: the forward that made them is over.
        """
        if self._values is not None:
            return self._values
        is_last = self._number == self._state.number
        if is_last and self._made_in is _Forward.EVALUATION:
            with torch.no_grad():
                self._values = functional.linear(self.hidden, self.head.weight, self.head.bias)
            return self._values
        if is_last and self._state.running is _Forward.TRAINING:
            return functional.linear(self.hidden, self.head.weight, self.head.bias)
        if self._made_in is _Forward.EVALUATION:
            raise RuntimeError(
                "these logits were not made: the model was given labels, its loss is fused with its output layer, and "
                "another forward came meanwhile; use logits before the next forward, or call the model without labels"
            )
        raise RuntimeError(
            "these logits were not made: the model was given labels in training, and its loss is fused with its output "
            "layer; call the model without labels, or under torch.no_grad()"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs ``func`` on real logits, unless it only inspects shape, dtype and the like."""
        if func in ASKED_FREELY:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(LateLogits, LateLogits.made, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Never reached with late logits: functions get real ones."""
        raise NotImplementedError(f"{func} of logits that were not made")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LateLogits(shape={tuple(self.shape)}, dtype={self.dtype})"


class _FusedLoss:
    """Replaces the model's loss function."""

    def __init__(self, plain: Callable[..., torch.Tensor]):
        self._plain = plain

    def __call__(
        self, logits: torch.Tensor, labels: Any = None, vocab_size: Any = None, **options: Any
    ) -> torch.Tensor:
        """Same arguments as ``ForCausalLMLoss`` of transformers."""
        is_late = isinstance(logits, LateLogits)
        if not is_late and torch.is_grad_enabled():
            return self._plain(logits, labels, vocab_size, **options)
        ignore_index = options.get("ignore_index", -100)
        shifted = options.get("shift_labels")
        if shifted is None:
            shifted = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        shifted = shifted.reshape(logits.shape[:-1]).to(logits.device)
        counts = {"ignore_index": ignore_index, "num_targets": options.get("num_items_in_batch")}
        if not is_late:
            return tiled_cross_entropy(logits, shifted, **counts)
        return linear_cross_entropy(logits.hidden, logits.head.weight, shifted, bias=logits.head.bias, **counts)
