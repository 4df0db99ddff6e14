"""Accelerate: an ``Accelerator`` whose ``prepare`` puts the model into an engine.

    accelerator = PatrickStarAccelerator(patrickstar_config={"device_memory": "24GiB"}, mixed_precision="bf16")
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

The model is converted in place, and the user's ``torch.optim`` optimizer is taken over. The results of ``prepare`` are
used as with any accelerator. The engine lives until ``accelerator.free_memory()``.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, DynamoBackend, convert_file_size_to_int, convert_to_fp32
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from patrickstar._C import StateError
from patrickstar.config import parse_config
from patrickstar.engine.engine import Engine
from patrickstar.engine.optim import HybridOptimizer
from patrickstar.engine.optimizer_takeover import groups_of, move_state
from patrickstar.engine.start import opening
from patrickstar.integrations.accelerator_states import AcceleratorStates
from patrickstar.integrations.decided_config import (
    decided_precision,
    own_config,
    ranks_per_sample,
    with_optimizer,
    with_parallelism,
)
from patrickstar.integrations.deepspeed_config import pop_loop_config, without_launched_deepspeed
from patrickstar.integrations.elastic_ranks import ElasticRanks
from patrickstar.integrations.weights import export_into, only_dtype
from patrickstar.module.compiled.dynamo import Compiler, make_compiler, unwrapped
from patrickstar.module.compiled.units import check_compiler
from patrickstar.runtime import initialize_engine

logger = logging.getLogger("patrickstar")
_PRECISION_VARIABLE = "ACCELERATE_MIXED_PRECISION"  # set by `accelerate launch --mixed_precision`
_DISTRIBUTED_TYPES = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)


class PatrickStarOptimizer(AcceleratedOptimizer):
    """The user's optimizer after ``prepare``. Like Accelerate's, it steps when gradients are complete."""

    def __init__(self, optimizer: HybridOptimizer):
        super().__init__(optimizer, device_placement=False)
        self._is_accelerate_prepared = True

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step updated nothing, because its gradients were not finite."""
        return self.optimizer.step_was_skipped


class PatrickStarAccelerator(ElasticRanks, AcceleratorStates):
    """Trains one model through an engine. All arguments of ``Accelerator`` are accepted by keyword.

    Args:
        patrickstar_config: PatrickStar's configuration (docs/config.md), a dict or the path of a JSON file. Keys that
            the optimizer and ``mixed_precision`` decide may be missing. Its keys win over those of a
            ``DeepSpeedPlugin``, or of ``accelerate launch``, whose configuration is taken.
        mixed_precision: ``"no"``, ``"bf16"`` or ``"fp16"``: dtype of parameters and gradients; masters are float32.
            None: the value from ``accelerate launch``, else the configuration's.

    Raises:
        ValueError: the configuration contradicts ``mixed_precision``, or another engine (FSDP, ...) is requested.
    """

    def __init__(
        self,
        *,
        patrickstar_config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        mixed_precision: str | None = None,
        **kwargs: Any,
    ):
        self._engine: Engine | None = None
        self._optimizer: PatrickStarOptimizer | None = None
        self._waiting: list[nn.Module] = []
        self._user_dtype: torch.dtype | None = None
        self._output_hook: RemovableHandle | None = None
        self.accumulated_batches: int | None = None
        """Backward passes of a step, for which memory is reserved; None: ``gradient_accumulation_steps``."""
        deepspeed, accumulation = pop_loop_config(kwargs)
        config = {**deepspeed, **own_config(patrickstar_config)}
        self._config = with_parallelism(config, kwargs.pop("parallelism_config", None))
        if mixed_precision is not None:
            self._config = decided_precision(self._config, str(mixed_precision))
        elif os.environ.get(_PRECISION_VARIABLE, "no") != "no":  # the default is set too
            self._config = decided_precision(self._config, os.environ[_PRECISION_VARIABLE])
        with without_launched_deepspeed():
            super().__init__(mixed_precision="no", **kwargs)  # the engine handles precision
        if accumulation is not None:
            self.gradient_accumulation_steps = accumulation
        self._check_alone()

    def _check_alone(self) -> None:
        if self.distributed_type not in _DISTRIBUTED_TYPES:
            raise ValueError(
                f"Accelerate is set up for {self.distributed_type.value}, which places the model itself; start the "
                "script by torchrun, or by accelerate launch without it"
            )
        compiler = self._compiler()
        if compiler is not None:
            check_compiler(compiler, "the model")

    def _compiler(self) -> Compiler | None:
        plugin = self.state.dynamo_plugin
        if plugin is None or plugin.backend == DynamoBackend.NO:
            return None
        return make_compiler(plugin.to_kwargs())

    @property
    def engine(self) -> Engine:
        """The engine of the prepared model.

        Raises:
            StateError: ``prepare`` was not called with a model and its optimizer.
        """
        if self._engine is None:
            raise StateError("no model is prepared; call accelerator.prepare(model, optimizer) first")
        return self._engine

    @property
    def has_engine(self) -> bool:
        """True if a model is prepared for training."""
        return self._engine is not None

    @property
    def user_dtype(self) -> torch.dtype | None:
        """The common dtype of the prepared model's floating point parameters before preparation; None if
        they differed.
        """
        return self._user_dtype

    def replace_config(self, config: Mapping[str, Any]) -> None:
        """Replaces the configuration before the engine is made.

        Raises:
            StateError: the engine exists.
        """
        if self._engine is not None:
            raise StateError("the engine is made; its configuration cannot be replaced")
        self._config = dict(config)

    @property
    def mixed_precision(self) -> str:
        """The engine's compute precision."""
        sections = {name: self._config[name] for name in ("bf16", "fp16") if self._config.get(name) is not None}
        return next((name for name, section in sections.items() if section.get("enabled", True)), "no")

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """``Accelerator.prepare``. The model that the optimizer trains goes into the engine; models without trainable
        parameters are placed on the device as usual. Optimizer and model may come in separate calls.

        Raises:
            ValueError: the optimizer is not supported, trains no model given so far, or contradicts the configuration.
            StateError: another model is in the engine.
        """
        prepared = {id(obj): self._prepared(obj, args) for obj in args if _is_plain_optimizer(obj)}
        args = tuple(prepared.get(id(obj), obj) for obj in args)
        return super().prepare(*args, device_placement=device_placement)

    def _prepared(self, optimizer: torch.optim.Optimizer, args: Iterable[Any]) -> PatrickStarOptimizer:
        models = [obj for obj in args if isinstance(obj, nn.Module)] + self._waiting
        trained = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for model in models:
            own = {id(param) for param in model.parameters()}
            if trained and not trained & own:
                continue
            if trained - own:
                raise ValueError(
                    f"{len(trained - own)} of the optimizer's {len(trained)} parameters are not in the "
                    f"{type(model).__name__} that it trains; an engine has one model: put all that is trained into one "
                    "nn.Module, and make the optimizer from its parameters"
                )
            opened = self._open(model, optimizer)
            self._waiting = [other for other in self._waiting if other is not model]
            return opened
        raise ValueError(
            "prepare got an optimizer of parameters that are in no model; give the model with it: "
            "accelerator.prepare(model, optimizer)"
        )

    def _open(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> PatrickStarOptimizer:
        if self._engine is not None:
            raise StateError(
                "the accelerator has an engine already, which trains one model with one optimizer; give all that is "
                "trained to them (one nn.Module, several parameter groups), or call accelerator.free_memory() before "
                "preparing another"
            )
        self._user_dtype = only_dtype(model)
        self._warn_of_widening(model)
        taken = groups_of(optimizer)
        config = parse_config(with_optimizer(self._config, taken)).model_copy(
            update={"gradient_accumulation_steps": self.accumulated_batches or self.gradient_accumulation_steps}
        )
        engine, hybrid = initialize_engine(lambda: model, self.local_process_index, config, lambda _: taken.groups)
        with opening(engine._session):
            move_state(optimizer, hybrid)
            if self._compiler() is not None and not engine.is_compiled:
                engine.compile(**self.state.dynamo_plugin.to_kwargs())
        self._engine = engine
        model._is_accelerate_prepared = True
        if self._compute_dtype is not None:
            self._output_hook = model.register_forward_hook(_in_float32)
        self._optimizer = PatrickStarOptimizer(hybrid)
        return self._optimizer

    def _warn_of_widening(self, model: nn.Module) -> None:
        dtypes = {param.dtype for param in model.parameters()} & {torch.bfloat16, torch.float16}
        if dtypes and self._compute_dtype is None:
            name = str(dtypes.pop()).removeprefix("torch.")
            logger.warning(
                "the model has %s parameters, and training computes in float32: it takes twice their memory and is "
                "slower. Set bf16=True (TrainingArguments) or mixed_precision='bf16' (Accelerator) for 16 bits with "
                "float32 master weights",
                name,
            )

    @property
    def _compute_dtype(self) -> torch.dtype | None:
        """The 16-bit dtype of ``mixed_precision``; None for float32."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.mixed_precision)

    @property
    def ranks_per_sample(self) -> int:
        """Processes that share each sequence or matrix, and so get the same batches."""
        return ranks_per_sample(self._config)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """``Accelerator.prepare_data_loader``; processes that share sequences get the same batches."""
        shared = self.ranks_per_sample
        if shared == 1 or getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=self.num_processes // shared,
            process_index=self.process_index // shared,
            split_batches=self.split_batches,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types.copy() if self.rng_types else None,
            dispatch_batches=False,
            even_batches=self.even_batches,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        self._dataloaders.append(prepared)
        return prepared

    def gather(self, tensor: Any) -> Any:
        """``Accelerator.gather``; the first of the processes that share a sequence contributes."""
        gathered, shared = super().gather(tensor), self.ranks_per_sample
        if shared == 1:
            return gathered

        def firsts(value: torch.Tensor) -> torch.Tensor:
            return value.unflatten(0, (self.num_processes, -1))[::shared].flatten(0, 1)

        return tree_map_only(torch.Tensor, firsts, gathered)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """``Accelerator.prepare_model``: a model that is not trained is placed on the device; a trained one waits for
        its optimizer.
        """
        if getattr(model, "_is_accelerate_prepared", False):
            return super().prepare_model(model, device_placement, evaluation_mode)
        if evaluation_mode or not any(param.requires_grad for param in model.parameters()):
            with self._autocast_for(model):
                return super().prepare_model(model, device_placement, evaluation_mode=True)
        self._waiting.append(model)
        return model

    @contextlib.contextmanager
    def _autocast_for(self, model: nn.Module) -> Iterator[None]:
        """Context in which Accelerate prepares ``model``, which is in no engine, for ``mixed_precision``: autocast, and
        outputs in float32. Parameters of the engine's dtype need no autocast: a reference model then has the bits of a
        policy with the same weights.
        """
        if self._compute_dtype is None:
            yield
        elif only_dtype(model) == self._compute_dtype:
            model.register_forward_hook(_in_float32)
            yield
        else:
            state, self.native_amp = self.state, True
            state._mixed_precision = self.mixed_precision
            try:
                yield
            finally:
                state._mixed_precision, self.native_amp = "no", False

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """``Accelerator.backward``, for the loss divided by the number of accumulated batches."""
        self.engine.backward(loss / self.gradient_accumulation_steps, **kwargs)

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """``Accelerator.clip_grad_norm_`` for all trained parameters; the coming step clips. An infinite ``max_norm``
        only computes the norm. Returns the norm before clipping, over all ranks.

        Raises:
            ValueError: trained parameters are missing, or the norm is not Euclidean.
        """
        if float(norm_type) != 2:
            raise ValueError(f"norm_type is {norm_type}; gradients in chunks have their norm of type 2 alone")
        given = {id(parameters)} if isinstance(parameters, torch.Tensor) else {id(param) for param in parameters}
        trained = {id(param) for group in self._optimizer.optimizer.param_groups for param in group["params"]}
        left_out = [
            name
            for name, param in self.engine.named_parameters()
            if param.requires_grad and id(param) in trained - given
        ]
        if left_out:
            raise ValueError(
                f"clip_grad_norm_ got {len(given)} parameters without {left_out[0]} and {len(left_out) - 1} more that "
                "are trained; the norm is that of all of them: give model.parameters()"
            )
        if math.isinf(max_norm):
            return torch.tensor(self.engine.grad_norm())
        return self.engine.clip_grad_norm_(max_norm)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Refused: gradients are in chunks and have no element-wise access.

        Raises:
            ValueError: always.
        """
        raise ValueError("clip_grad_value_ is not possible with gradients in chunks; use clip_grad_norm_")

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """``Accelerator.save_model``, called by all ranks; weights are streamed, without a copy of the model."""
        streams = self.has_engine and model is self.engine.module and self._user_dtype is not None
        if not (streams and safe_serialization):
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
            return
        if self.is_main_process:
            Path(save_directory).mkdir(parents=True, exist_ok=True)
        self.wait_for_everyone()
        export_into(
            self.engine,
            save_directory,
            self._user_dtype,
            is_first_rank=self.is_main_process,
            max_file_bytes=convert_file_size_to_int(max_shard_size),
        )
        self.wait_for_everyone()

    def free_memory(self, *objects: Any) -> Any:
        """``Accelerator.free_memory``; closes the engine, so the model is an ordinary one again."""
        self.close_engine()
        return super().free_memory(*objects)

    def close_engine(self, *, discard: bool = False) -> None:
        """Closes the engine, if there is one: the model is whole and ordinary again, on each rank. With ``discard`` it
        has no values.
        """
        self._waiting.clear()
        if self._engine is None:
            return
        engine, self._engine, self._optimizer = self._engine, None, None
        if self._output_hook is not None:
            self._output_hook.remove()
            self._output_hook = None
        vars(unwrapped(engine.module)).pop("_is_accelerate_prepared", None)
        engine.discard() if discard else engine.close()


def _in_float32(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    """A forward hook: 16-bit outputs become float32, as Accelerate's do with mixed precision."""
    return convert_to_fp32(outputs)


def _is_plain_optimizer(obj: Any) -> bool:
    return isinstance(obj, torch.optim.Optimizer) and not isinstance(obj, PatrickStarOptimizer)
