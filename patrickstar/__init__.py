"""PatrickStar: train models whose states do not fit in GPU memory, from an ordinary PyTorch script.

    from patrickstar.runtime import initialize_engine

Names are imported when they are first used, so that `python -m patrickstar.env` runs where PyTorch or the extension is
missing, and says so.
"""

import contextlib
import importlib
from typing import TYPE_CHECKING, Any

with contextlib.suppress(ImportError, OSError):
    import torch  # noqa: F401  (the extension needs PyTorch's libraries loaded)

if TYPE_CHECKING:
    from patrickstar._C import MemoryBudgetError, RankFailure, StateError
    from patrickstar.checkpoint import CheckpointError
    from patrickstar.preprocess import torch_scope
    from patrickstar.runtime import initialize_engine

__version__ = "0.5.0"
__all__ = ["CheckpointError", "MemoryBudgetError", "RankFailure", "StateError", "initialize_engine", "torch_scope"]

_HOMES = {
    "CheckpointError": "patrickstar.checkpoint",
    "MemoryBudgetError": "patrickstar._C",
    "RankFailure": "patrickstar._C",
    "StateError": "patrickstar._C",
    "torch_scope": "patrickstar.preprocess",
    "initialize_engine": "patrickstar.runtime",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES and name != "_C":
        raise AttributeError(f"module 'patrickstar' has no attribute {name!r}")
    try:
        module = importlib.import_module(_HOMES.get(name, "patrickstar._C"))
    except ImportError as error:
        raise ImportError(f"{error} (python -m patrickstar.env says what is missing and what mends it)") from error
    value = module if name == "_C" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
