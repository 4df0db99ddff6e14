"""The strategy: a ``LightningModule``'s parameters are in chunks between a run's setup and teardown.

``fit``, ``validate``, ``test`` and ``predict`` each build an engine in ``setup`` and close it in ``teardown``.
Meanwhile the module keeps its class and parameters; before and after it is an ordinary one.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from patrickstar import _C
from patrickstar.config import parse_config
from patrickstar.engine.engine import Engine
from patrickstar.engine.optim import HybridOptimizer
from patrickstar.integrations.decided_config import own_config, ranks_per_sample
from patrickstar.integrations.lightning import folders
from patrickstar.integrations.lightning.compiled import CompiledSteps
from patrickstar.integrations.lightning.modules import frozen, move_metrics
from patrickstar.integrations.lightning.optimizer import ConfiguredOptimizer
from patrickstar.integrations.lightning.package import pl
from patrickstar.integrations.lightning.precision import PatrickStarPrecision, check_clip_algorithm
from patrickstar.integrations.lightning.ranks import RankedStrategy
from patrickstar.integrations.lightning.settings import TrainerSettings, merge
from patrickstar.module.compiled.units import check_compiler
from patrickstar.runtime import initialize_engine

logger = logging.getLogger("patrickstar")
_KEEPS_RANKS = (
    "Lightning's loops and data loaders keep the ranks that they began with; train with initialize_engine or Hugging "
    "Face's Trainer (docs/guides/elastic.md), or save a checkpoint and start as many ranks as you want"
)
_FITTING = pl.trainer.states.TrainerFn.FITTING


class CheckpointFormat(enum.Enum):
    """Formats of ``trainer.save_checkpoint`` and ``ModelCheckpoint``."""

    FILE = "file"
    """Lightning's own file, which any strategy can read. Each rank holds all of it in host memory (12 bytes per
    parameter) while it is made or loaded.
    """
    FOLDER = "folder"
    """A folder in which each rank writes its shard, without a copy in memory. Only this strategy can read it."""


class ModuleInit(enum.Enum):
    """The device on which ``configure_model`` builds the module's layers."""

    CPU = "cpu"
    """Host memory, whole on each rank, with the values of its code."""
    META = "meta"
    """The meta device; then unit by unit, with values from the modules' own ``reset_parameters`` (or Hugging Face's
    ``_init_weights``). Other initialisation is lost.
    """


class AfterRun(enum.Enum):
    """Data that is whole in host memory again, on each rank, after a run."""

    MODULE = "module"
    """The module; its optimizer's state is dropped."""
    EVERYTHING = "everything"
    """The module, and after ``fit`` the user's optimizer with its state (8 more bytes per parameter)."""
    NOTHING = "nothing"
    """Nothing: the module's parameters have no elements. For a model that fits in no rank's host memory."""


class PatrickStarStrategy(RankedStrategy):
    """Trains, evaluates and predicts with a module that need not fit in GPU memory, on one device or several.

    Args:
        patrickstar_config: a dict or a JSON file's path (docs/config.md). Settings of the ``Trainer`` and
            ``configure_optimizers`` may be missing; if present, they must be equal.
        checkpoint_format: a :class:`CheckpointFormat` or its value.
        module_init: a :class:`ModuleInit` or its value.
        after_run: an :class:`AfterRun` or its value.
        **kwargs: of ``ParallelStrategy``.

    Raises:
        ValueError: one of these is wrong.
    """

    strategy_name = "patrickstar"

    def __init__(
        self,
        patrickstar_config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        *,
        checkpoint_format: CheckpointFormat | str = CheckpointFormat.FILE,
        module_init: ModuleInit | str = ModuleInit.CPU,
        after_run: AfterRun | str = AfterRun.MODULE,
        **kwargs: Any,
    ):
        self._config = own_config(patrickstar_config)
        super().__init__(parse_config(self._config).rank_timeout_seconds, **kwargs)
        self._checkpoint_format = CheckpointFormat(checkpoint_format)
        self._module_init = ModuleInit(module_init)
        self._after_run = AfterRun(after_run)
        self._engine: Engine | None = None
        self._configured: ConfiguredOptimizer | None = None
        self._unfreeze = contextlib.ExitStack()
        self._error: BaseException | None = None
        self._compiled_steps: CompiledSteps | None = None
        self._folders = folders.Folders()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """This rank's share of the data; ranks that share sequences have the same."""
        shared = ranks_per_sample(self._config)
        return {"num_replicas": self.world_size // shared, "rank": self.global_rank // shared}

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers the strategy with Lightning, for ``Trainer(strategy="patrickstar")``."""
        strategy_registry.register(
            cls.strategy_name, cls, description="Parameters, gradients and Adam states in chunks", override=True
        )

    @property
    def engine(self) -> Engine:
        """The engine of the present run, for its ``grad_norm()``, ``report()`` and ``plan()``.

        Raises:
            StateError: no run is active.
        """
        if self._engine is None:
            raise _C.StateError("there is no engine: it lives from a run's setup (before on_fit_start) to its teardown")
        return self._engine

    @property  # type: ignore[override]
    def _lightning_module(self) -> Any:
        return self.__dict__.get("_module")

    @_lightning_module.setter
    def _lightning_module(self, module: Any) -> None:
        # The Trainer sets it, then refuses modules with compiled steps under unknown strategies.
        steps = CompiledSteps.of(module)
        if steps is not None:
            self._compiled_steps = steps
        self.__dict__["_module"] = module

    @property
    def precision_plugin(self) -> PatrickStarPrecision:
        """The plugin for ``Trainer(precision=...)``; ``"32-true"`` by default."""
        if self._precision_plugin is None:
            self._precision_plugin = PatrickStarPrecision()
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        self._precision_plugin = None if plugin is None else PatrickStarPrecision.of(plugin)

    # A run's setup and teardown.

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Builds models in host memory, never on the GPU; with ``empty_init`` on the meta device."""
        with torch.device("meta" if empty_init else "cpu"):
            yield

    @contextlib.contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Context of ``configure_model``: new tensors are made on :class:`ModuleInit`'s device."""
        with torch.device(self._module_init.value):
            yield

    def model_to_device(self) -> None:
        """Does nothing: the engine moves data on demand."""

    def setup(self, trainer: Any) -> None:
        """Makes the optimizers, then the engine from their groups.

        Raises:
            ValueError: settings of the ``Trainer``, the module and the configuration do not fit together.
        """
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self._refuse(trainer)
        self._error = None
        self._configured = None
        if trainer.state.fn == _FITTING:
            self.setup_optimizers(trainer)
            self._configured = ConfiguredOptimizer(self.optimizers)
        else:
            self._unfreeze.enter_context(frozen(self.lightning_module, self.precision_plugin.compute_dtype))
        self._open_engine(trainer.gradient_clip_val)
        self.setup_precision_plugin()

    def _refuse(self, trainer: Any) -> None:
        if torch.cuda.is_available() != (self.root_device.type == "cuda"):
            raise ValueError(
                f"the Trainer's device is {self.root_device}, and an engine computes on a GPU where there is one; give "
                'Trainer(accelerator="gpu"), or hide the GPUs with CUDA_VISIBLE_DEVICES='
            )
        if self._layer_sync is not None:
            raise ValueError("sync_batchnorm replaces layers by ones that wait for each other in forward; leave it out")
        if self._compiled_steps is not None:
            check_compiler(self._compiled_steps.compiler, "the module")
        if trainer.gradient_clip_val:
            check_clip_algorithm(trainer.gradient_clip_algorithm)

    def _open_engine(self, gradient_clip_val: float | None) -> None:
        configured, precision = self._configured, self.precision_plugin
        settings = TrainerSettings(
            precision=precision.precision,
            compute_dtype=precision.compute_dtype,
            gradient_clip_val=gradient_clip_val,
            optimizer=configured.taken if configured is not None else None,
        )
        engine, optimizer = initialize_engine(
            lambda: self.lightning_module,
            self.root_device.index or 0,
            merge({"steps_per_print": 0, **self._config}, settings).model_copy(
                update={"gradient_accumulation_steps": self.lightning_module.trainer.accumulate_grad_batches}
            ),
            (lambda _: configured.taken.groups) if configured is not None else None,
        )
        self._engine = engine
        engine._session.owner.keeps_ranks = _KEEPS_RANKS
        if self._compiled_steps is not None:
            engine.compile_parts(self._compiled_steps.compiler)
        precision.attach(engine)
        if configured is not None:
            configured.hand_over(optimizer)
            self.optimizers = [optimizer]
        move_metrics(self.lightning_module, self.root_device)

    def on_exception(self, exception: BaseException) -> None:
        """Keeps the error; :meth:`teardown` reports it to the other ranks without waiting for them."""
        self._error = exception

    def teardown(self) -> None:
        """Restores the ordinary module (:class:`AfterRun`), in host memory."""
        engine, self._engine = self._engine, None
        self.precision_plugin.attach(None)
        try:
            if engine is not None:
                self._close(engine)
        finally:
            self._unfreeze.close()
            if self._compiled_steps is not None:
                self._compiled_steps.put_back()
                self._compiled_steps = None
            super().teardown()

    def _close(self, engine: Engine) -> None:
        error = self._error
        if error is not None:
            if getattr(error, "on_all_ranks", False):  # a signal's: its save is completed
                self._folders.finish(engine)
            engine.__exit__(type(error), error, error.__traceback__)
            return
        try:
            self._folders.finish(engine)
        finally:  # a failed save closes the engine too
            if self._after_run is AfterRun.NOTHING:
                engine.discard()
            else:
                if self._after_run is AfterRun.EVERYTHING and self._configured is not None:
                    self.optimizers = [self._configured.give_back(self.optimizers[0])]
                engine.close()

    # Steps. Each runs as one forward; in manual optimization backward is inside training_step, and each call of the
    # module is a forward.

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's ``training_step``; in automatic optimization all of it is one forward of the engine."""
        step = functools.partial(super().training_step, *args, **kwargs)
        return self.engine.run_forward(step) if self.lightning_module.automatic_optimization else step()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's ``validation_step`` as one forward of the engine."""
        return self.engine.run_forward(functools.partial(super().validation_step, *args, **kwargs))

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's ``test_step`` as one forward of the engine."""
        return self.engine.run_forward(functools.partial(super().test_step, *args, **kwargs))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's ``predict_step`` as one forward of the engine."""
        return self.engine.run_forward(functools.partial(super().predict_step, *args, **kwargs))

    # Checkpoints.

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Always True: values are loaded into chunks."""
        return True

    @property
    def _writes_folders(self) -> bool:
        return self._checkpoint_format is CheckpointFormat.FOLDER and self._engine is not None

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Float32 values under the module's names, on the first rank; empty if a folder will be written."""
        if self._engine is None:
            return super().lightning_module_state_dict()
        return {} if self._writes_folders else self._whole_state_dict()

    def _whole_state_dict(self) -> dict[str, Any]:
        is_plain = type(self.lightning_module).state_dict is torch.nn.Module.state_dict
        with _C.HostAllocations():  # the module's own would round float32 values to its parameters' dtype
            state = self.engine.state_dict() if is_plain else self.lightning_module.state_dict()
        return state if self.is_global_zero else {}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The state in ``torch.optim.Adam``'s format, on the first rank. Empty if a folder will be written, or after a
        run unless ``after_run`` is ``"everything"``.
        """
        optimizer = getattr(optimizer, "_optimizer", optimizer)  # Lightning's wrapper
        if not isinstance(optimizer, HybridOptimizer):
            return optimizer.state_dict()
        if self._engine is None and self.is_global_zero:
            logger.warning(
                "the run is over, and this checkpoint has no optimizer state: fit cannot go on from it. Save within "
                'the run (ModelCheckpoint(save_last=True)), or give PatrickStarStrategy(after_run="everything")'
            )
        if self._engine is None or self._writes_folders:
            return {}
        with _C.HostAllocations():
            state = optimizer.state_dict()
        return state if self.is_global_zero else {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes a file, or a folder beside training. Weights alone are always a file."""
        with _C.HostAllocations():
            if not self._writes_folders:
                super().save_checkpoint(checkpoint, filepath, storage_options)
            elif "optimizer_states" not in checkpoint:
                whole = {**checkpoint, "state_dict": self._whole_state_dict()}
                super().save_checkpoint(whole, filepath, storage_options)
            else:
                write = self.checkpoint_io.save_checkpoint if self.is_global_zero else None
                self._folders.save(self.engine, checkpoint, self.broadcast(filepath), write)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a checkpoint: a folder that goes on being replaced stays until the newer one is complete."""
        if self.is_global_zero:
            self._folders.remove(functools.partial(self.checkpoint_io.remove_checkpoint, filepath))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads Lightning's state of a run. A folder's values are read by the engine itself."""
        loops = folders.find_loops(checkpoint_path)
        with _C.HostAllocations():
            checkpoint = super().load_checkpoint(loops or checkpoint_path, weights_only)
        if loops is not None:
            checkpoint["patrickstar_folder"] = str(checkpoint_path)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads the checkpoint's parameters and buffers; from a folder, with an optimizer, the engine's whole state."""
        folder, tag = checkpoint.get("patrickstar_folder"), folders.tag_of(checkpoint)
        if folder is None or tag is None:
            super().load_model_state_dict(checkpoint, strict)
        elif self._configured is not None:
            self.engine.load_checkpoint(folder, tag)
        else:
            folders.load_values(self.lightning_module, Path(folder), tag)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads Adam's states into chunks; a folder's were loaded with the values.

        Raises:
            ValueError: the checkpoint has none.
        """
        if folders.tag_of(checkpoint) is not None:
            return
        states = checkpoint["optimizer_states"]
        if len(states) != 1 or not states[0]:
            raise ValueError(
                f"the checkpoint has the states of {sum(map(bool, states))} optimizers, and fit goes on with one; give "
                "one that was saved within a run of one optimizer, or load the weights alone with load_from_checkpoint"
            )
        with _C.HostAllocations():
            self.optimizers[0].load_state_dict(states[0])
