"""Liger-Kernel's Triton kernels in the model that is tuned: norms, rotary embeddings and MLPs, but no loss."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from patrickstar.command.flags import UsageError

_SMALL_LLAMA = "llama"


def check_kernels(kernels: str | None, folder: Path | None) -> None:
    """Looks for what ``--kernels`` needs; ``folder`` is the model's, None for the small Llama.

    Raises:
        UsageError: the package, the GPU or kernels of the model's type are missing.
    """
    if kernels is None:
        return
    if importlib.util.find_spec("liger_kernel") is None:
        raise UsageError("--kernels liger: liger-kernel is not installed; pip install liger-kernel")
    import torch

    if not torch.cuda.is_available():
        raise UsageError("--kernels liger: its kernels need a GPU, and there is none; leave --kernels out")
    kind = _SMALL_LLAMA if folder is None else _model_type(folder)
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    if kind is not None and kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UsageError(f"--kernels liger: Liger-Kernel has none for models of type {kind}; leave --kernels out")


def _model_type(folder: Path) -> str | None:
    """None: the folder's configuration has none, which another check reports."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def with_kernels(model: Any, kernels: str | None) -> Any:
    """``model``, whose modules compute by ``kernels``, None for its own; the loss stays its own."""
    if kernels is not None:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance as apply  # what transformers calls

        apply(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
    return model
