"""The section ``optimizer`` of the configuration. The text under each key is its meaning."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from pydantic import BeforeValidator, Field

from patrickstar.choices import Master, OptimizerType, Speculation, States
from patrickstar.config.fates import HONOURED, mapped, no_effect, refused
from patrickstar.config.nearest import slip_of
from patrickstar.config.values import (
    Betas,
    Fraction,
    NonNegative,
    Section,
    Switch,
    Text,
    ignoring_case,
    unexpected,
)

_INSTEAD_OF_OPTIMIZERS = {
    "onebitadam": "compressed gradients change the numbers: use Adam",
    "zerooneadam": "compressed gradients change the numbers: use Adam",
    "onebitlamb": "compressed gradients change the numbers: use AdamW",
    "fusedadam": "all updates are fused: use Adam",
    "deepspeedcpuadam": "states rest where there is room: use Adam",
    "fusedlion": "all updates are fused: use Lion",
    "deepspeedcpulion": "states rest where there is room: use Lion",
    "muadam": "mup's learning rates are those of its parameter groups: pass these, with Adam",
    "muadamw": "mup's learning rates are those of its parameter groups: pass these, with AdamW",
}


class NearestOptimizer(NamedTuple):
    """The nearest thing to an optimizer that PatrickStar lacks."""

    why: str
    """The property that both have; empty if there is none but training."""
    type: OptimizerType
    states: States

    def __str__(self) -> str:
        """``"<why>: use <type> with <states>"``, in the configuration's words."""
        states = "" if self.states is States.FP32 else f' with optimizer.states "{self.states.value}"'
        return f"{self.why}: use {self.type.value}{states}".removeprefix(": ")


_NEAREST_BY_PART = {
    "muon": NearestOptimizer("Lion too keeps a momentum and no variance", OptimizerType.LION, States.FP32),
    **dict.fromkeys(
        ("adafactor", "galore", "apollo", "lomo", "8bit", "4bit"),
        NearestOptimizer("8-bit states save as much memory", OptimizerType.ADAMW, States.EIGHT_BIT),
    ),
}
"""By a part of the name, in lower case and without underscores."""


def nearest_optimizer(name: str) -> NearestOptimizer:
    """The nearest thing to an optimizer of that name, by which a class, a configuration or a Trainer calls it."""
    word = name.lower().replace("_", "")
    found = (nearest for part, nearest in _NEAREST_BY_PART.items() if part in word)
    return next(found, NearestOptimizer("", OptimizerType.ADAMW, States.FP32))


def _optimizer_type(value: object) -> object:
    found = ignoring_case(OptimizerType)(value)
    if isinstance(found, OptimizerType):
        return found
    names = {member.value.lower(): member.value for member in OptimizerType}
    near, nearest = slip_of(str(value).lower(), names, 0.7), nearest_optimizer(str(value))
    instead = str(nearest) if near is None or nearest.why else f"did you mean {names[near]!r}?"
    instead = _INSTEAD_OF_OPTIMIZERS.get(str(value).lower(), instead)
    *others, last = names.values()
    raise unexpected(f"PatrickStar has {', '.join(others)} and {last}: {instead}")


class OptimizerParams(Section):
    """``optimizer.params``: the defaults of every parameter group. Options that ``type`` lacks are refused."""

    lr: Annotated[NonNegative, HONOURED] = 1e-3
    """The learning rate, at least 0."""
    betas: Annotated[Betas, HONOURED] = (0.9, 0.999)
    """Decay rates of momentum and variance, each in [0, 1), for Adam and AdamW. Lion has two rates for its one
    momentum, by default (0.9, 0.99): the first for the update, the second for the stored momentum.
    """
    eps: Annotated[NonNegative, HONOURED] = 1e-8
    """Number that is added to the denominator of the update of Adam and AdamW, at least 0."""
    weight_decay: Annotated[NonNegative, HONOURED] = 0.0
    """Factor of weight decay, at least 0: an L2 term with Adam and SGD, decoupled with AdamW and Lion. The default is
    DeepSpeed's and Hugging Face's; that of ``torch.optim.AdamW`` is 0.01.
    """
    momentum: Annotated[NonNegative, HONOURED] = 0.0
    """Factor of SGD's momentum in each step, at least 0, as in ``torch.optim.SGD``."""
    dampening: Annotated[Fraction, HONOURED] = 0.0
    """The share of a gradient that does not go into SGD's momentum, from 0 to 1; the first gradient goes in whole."""
    nesterov: Annotated[Switch, HONOURED] = False
    """True for Nesterov momentum in SGD, which needs a ``momentum`` and no ``dampening``."""
    use_hybrid_adam: Annotated[Switch, HONOURED] = True
    """True if optimizer states may rest on the device where it has headroom; else all rest on the host."""
    adam_w_mode: Annotated[
        Switch | None, mapped("optimizer.type", "``True`` makes Adam AdamW; AdamW is AdamW with either value")
    ] = None
    """True for decoupled weight decay, as in AdamW; None: as ``type`` says."""
    torch_adam: Annotated[
        Switch,
        mapped(
            "optimizer.params.weight_decay",
            "formulas are those of ``torch.optim`` in either case; with ``True``, AdamW's default decay is too (0.01)",
        ),
    ] = False
    """True for PyTorch's Adam instead of DeepSpeed's."""
    bias_correction: Annotated[Switch, HONOURED] = True
    """True if the bias of momentum and variance in the first steps is corrected, as in ``torch.optim``."""
    amsgrad: Annotated[Switch, refused("the maximum of variances is not kept; leave it out")] = False
    """True for Adam's AMSGrad variant."""
    fp32_optimizer_states: Annotated[
        Switch, refused('what momentum and variance are stored in is optimizer.states: give "bf16" there', only=(True,))
    ] = True
    """True if momentum and variance are float32; else they have the parameters' dtype."""
    max_grad_norm: Annotated[
        NonNegative | None,
        refused("it is no option of the optimizer; give gradient_clipping at top level", only=(None,)),
    ] = None
    """Largest norm of the gradients, for scripts that give it here instead of as ``gradient_clipping``."""


_IN_PARAMS = no_effect("as in DeepSpeed, it counts in ``optimizer.params`` alone")


class OptimizerConfig(Section):
    """The section ``optimizer``: the update rule, its options, when it updates, and how its states are stored."""

    type: Annotated[OptimizerType, BeforeValidator(_optimizer_type), HONOURED] = OptimizerType.ADAM
    """``"Adam"``, ``"AdamW"``, ``"Lion"`` (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms") or
    ``"SGD"`` (as in ``torch.optim``), in any case. The latter two keep a momentum and no variance, which saves 4 bytes
    per parameter. With ``patrickstar.initialize``, as with DeepSpeed, Adam is AdamW too unless ``params.adam_w_mode``
    is ``False``.
    """
    params: OptimizerParams = Field(default_factory=OptimizerParams)
    """Options of the optimizer: the defaults of every parameter group."""
    speculation: Annotated[Speculation, HONOURED] = Speculation.AUTO
    """When updates on the host start: ``"auto"`` (speculative with a GPU), ``"always"``, ``"never"`` or ``"commit"``.
    It changes no number.
    Speculative updates start during backward, on the assumption that neither clipping nor an overflow will occur; if
    one does, they are redone. They need memory of their own: up to 14 bytes per parameter, within ``host_memory``. With
    less memory they take 2 bytes for the new parameters, and the states are updated afterwards.
    ``"commit"`` is optimizer-in-backward: updates run in place, need no memory and cannot be rolled back, including
    those of chunks whose states are on the device. The user guarantees that each backward is followed by exactly one
    step with the options it began with: no accumulation, no values read or written in between (violations are refused),
    no clipping, no loss scaling. Gradients that are not finite are applied, as in ``torch.optim``. A backward that
    fails half way leaves a partly updated model: continue from a checkpoint. ``load_checkpoint`` also drops a step that
    has its backward behind it. On one GPU with ``bf16``, parameters and states then take 12 bytes per parameter instead
    of 14.
    """
    states: Annotated[States, HONOURED] = States.FP32
    """Types of momentum and variance between updates; updates compute in float32. ``"fp32"``: 14 bytes per parameter in
    16-bit training, including the parameter and its float32 master. ``"bf16"``: 10 bytes, rounded stochastically.
    ``"8bit"``: 8 bytes, in blocks of 256 with a scale (Dettmers et al. 2021, "8-bit Optimizers via Block-wise
    Quantization"). As there, with ``"8bit"`` embeddings, parameters of fewer than two dimensions and those of fewer
    than 4,096 elements keep float32. Precision is lost: the guide ``docs/guides/fewer_bytes.md`` says how much. For
    given states results are bitwise the same for any budget.
    """
    master: Annotated[Master, HONOURED] = Master.EXACT
    """Values from which parameters are updated. ``"exact"``: a float32 master beside each parameter. ``"stochastic"``:
    the bfloat16 parameter alone, rounded stochastically by each update. That saves 4 bytes per parameter (2 if masters
    are split); with ``states`` ``"8bit"`` 4.03 remain in all. It needs ``bf16``. If ``speculation`` is not
    ``"commit"``, a gradient takes 2 bytes of its own until the norm is known. Precision is lost, as with ``states``.
    """
    streaming: Annotated[
        Text,
        refused(
            "states on the host are updated by its threads: passing them through the GPU moves the same bytes of host "
            "memory, and was slower wherever it was measured; leave it out",
            only=("never",),
        ),
    ] = "never"
    """When the GPU updates states that stay in host memory; an option of version 0.6 and older."""
    torch_adam: Annotated[Switch, _IN_PARAMS] = False
    """``params.torch_adam``, for scripts that give it here."""
    adam_w_mode: Annotated[Switch | None, _IN_PARAMS] = None
    """``params.adam_w_mode``, for scripts that give it here."""
    legacy_fusion: Annotated[Switch, no_effect("all updates are fused")] = False
    """True for the older code of fused Adam in DeepSpeed's float16 optimizer."""
