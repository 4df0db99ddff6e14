"""The engine's calls that save a run, load it, and hand its weights on."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from patrickstar.checkpoint.export import DEFAULT_MAX_FILE_BYTES
from patrickstar.checkpoint.runs import RunFormat
from patrickstar.engine.module_face import ModuleFace
from patrickstar.session.interrupts import deferred_signals
from patrickstar.state.export_run import export_session_run
from patrickstar.state.export_weights import export_session, send_session
from patrickstar.state.parts import Completion
from patrickstar.state.save_load import Scheduler, load_session, save_session


class SavingFace(ModuleFace):
    """See the module's docstring."""

    def save_checkpoint(
        self,
        directory: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        *,
        lr_scheduler: Scheduler | None = None,
        wait: bool = True,
    ) -> Path:
        """Saves the run between two steps (docs/checkpoints.md) and returns the checkpoint's folder, ``directory/tag``.

        Saved are parameters, optimizer states, step counts, buffers, the groups' options, the loss scaler, and random
        number generators.

        Args:
            directory: created if missing. Its file ``latest`` will name the checkpoint.
            tag: None: ``global_step<n>``. An existing checkpoint of this tag stays until the new one is complete.
            client_state: the user's data, of numbers, strings, bools, None, lists, tuples and dicts.
            lr_scheduler: whose state is saved too.
            wait: False: values are copied into free host memory, those without room are written, and a thread writes
                the copies while training goes on. The next save, :meth:`wait_for_save` and :meth:`close` wait for it.

        Raises:
            CheckpointError: nothing was saved; earlier checkpoints are unchanged. A save that fails later raises it in
                the next optimizer step, before the step begins.
            StateError: gradients are pending.
        """
        self._session.check_open()
        completion = Completion.NOW if wait else Completion.LATER
        with deferred_signals() as signals, self._session.guard("save_checkpoint"), signals.allowed():
            return save_session(self._session, directory, tag, client_state, lr_scheduler, completion=completion)

    def wait_for_save(self) -> None:
        """Waits until a save with ``wait=False`` is complete. Collective over all ranks.

        Raises:
            CheckpointError: it failed; earlier checkpoints are unchanged.
        """
        with deferred_signals() as signals, self._session.guard("wait_for_save"), signals.allowed():
            self._session.saves.finish()

    def load_checkpoint(
        self,
        directory: str | os.PathLike[str],
        tag: str | None = None,
        *,
        lr_scheduler: Scheduler | None = None,
    ) -> tuple[Path, dict[str, Any]]:
        """Continues from a checkpoint of the same model, with any budgets. Returns its folder and the ``client_state``.

        Random number generators are restored if the number of ranks is unchanged.

        Args:
            directory: as given to :meth:`save_checkpoint`, or DeepSpeed's or FSDP's (docs/checkpoints.md).
            tag: None: the latest (``patrickstar.checkpoint.latest_tag``).
            lr_scheduler: receives the saved scheduler's state.

        Raises:
            CheckpointError: no checkpoint, or one of another model (nothing is changed), or a damaged one.
            StateError: gradients are pending. Those of ``optimizer.speculation`` ``"commit"`` are dropped.
        """
        self._session.train_unfrozen()
        with deferred_signals() as signals, self._session.guard("load_checkpoint"), signals.allowed():
            return load_session(self._session, directory, tag, lr_scheduler)

    def export_weights(
        self,
        directory: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = torch.float32,
        max_file_bytes: int = DEFAULT_MAX_FILE_BYTES,
    ) -> Path:
        """Writes parameters and persistent buffers as Hugging Face's sharded safetensors.

        Names are those of the module's ``state_dict``, with tied weights once. For a Hugging Face model they are those
        that its ``save_pretrained`` writes, with fused experts split again, and ``config.json`` is added. Parameters
        are written one at a time, without a copy of the model. With several ranks the first one writes a model whose
        parameters are converted so.

        Args:
            directory: the folder to make.
            dtype: of floating point parameters; None: as held (float32 for trained ones).
            max_file_bytes: bytes per file.

        Raises:
            CheckpointError: the folder exists and is not empty, or cannot be written.
        """
        self._session.check_open()
        with deferred_signals() as signals, self._session.guard("export_weights"), signals.allowed():
            self._session.ranks.meet()
            return export_session(self._session, directory, dtype, max_file_bytes)

    def export_checkpoint(
        self,
        directory: str | os.PathLike[str],
        form: RunFormat | str = RunFormat.DCP,
        client_state: Mapping[str, Any] | None = None,
        *,
        lr_scheduler: Scheduler | None = None,
    ) -> Path:
        """Writes parameters, Adam's states and counts in a format that other programs resume. Returns the folder.

        Tensors are written one at a time, in float32. With several ranks all read each tensor, and the first writes it.

        Args:
            directory: the folder to make.
            form: ``"dcp"``: torch.distributed.checkpoint's, with torchtitan's keys; ``"universal"``: DeepSpeed's
                universal checkpoint (docs/checkpoints.md).
            client_state: the user's data, which DeepSpeed returns at loading.
            lr_scheduler: whose state DeepSpeed loads.

        Raises:
            CheckpointError: the folder exists and is not empty, cannot be written, or cannot hold the run.
            StateError: gradients are pending.
        """
        self._session.check_open()
        with deferred_signals() as signals, self._session.guard("export_checkpoint"), signals.allowed():
            self._session.ranks.meet()
            return export_session_run(self._session, directory, RunFormat(form), client_state, lr_scheduler)

    def export_to(
        self,
        receive: Callable[[list[tuple[str, torch.Tensor]]], object],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        bucket_bytes: int | str = "1GiB",
    ) -> None:
        """Passes the weights to a generator, a bucket at a time: ``receive([(name, tensor), ...])``.

        Names and tensors are those of :meth:`export_weights`. vLLM's ``load_weights`` takes such a bucket. Allowed
        while :meth:`lend` lends the memory. Tensors are copies that may be kept, or sent to another process on the same
        GPU by ``torch.multiprocessing``. Collective over all ranks, each of which receives the whole model.

        Args:
            receive: called on each rank with the same names.
            dtype: of floating point parameters; None: that of the computation.
            device: of the tensors; None: the engine's.
            bucket_bytes: most bytes of a bucket, or a size such as ``"1GiB"``; a larger tensor has its own.

        Raises:
            StateError: a forward, a backward or a step is not over.
            ValueError: ``bucket_bytes`` is no size.
        """
        self._session.check_open()
        send_session(self._session, receive, dtype, device, bucket_bytes)
