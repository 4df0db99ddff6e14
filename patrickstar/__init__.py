"""PatrickStar: train models whose states do not fit in GPU memory, from an ordinary PyTorch script.

    from patrickstar.runtime import initialize_engine

Names are imported on first use, and PyTorch with the first of them. So ``patrickstar --help`` starts at once, and
``patrickstar env`` can report a missing PyTorch or extension.
"""

import contextlib
import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from patrickstar import checkpointing, comm, ops, utils, zero
    from patrickstar._C import DiskError, MemoryBudgetError, RankFailure, RankMismatch, StateError
    from patrickstar.checkpoint import CheckpointError
    from patrickstar.comm import init_distributed
    from patrickstar.deepspeed import TrainingEngine, add_config_arguments, initialize
    from patrickstar.engine.saved_run import SavedRun
    from patrickstar.module.preprocess import torch_scope
    from patrickstar.module.pretrained import from_pretrained
    from patrickstar.runtime import initialize_engine
    from patrickstar.session.registry import close_open_engine

__version__ = "0.7.0"
__all__ = [
    "CheckpointError",
    "DiskError",
    "MemoryBudgetError",
    "RankFailure",
    "RankMismatch",
    "SavedRun",
    "StateError",
    "TrainingEngine",
    "add_config_arguments",
    "checkpointing",
    "close_open_engine",
    "comm",
    "from_pretrained",
    "init_distributed",
    "initialize",
    "initialize_engine",
    "ops",
    "torch_scope",
    "utils",
    "zero",
]

_HOMES = {
    "CheckpointError": "patrickstar.checkpoint",
    "DiskError": "patrickstar._C",
    "MemoryBudgetError": "patrickstar._C",
    "RankFailure": "patrickstar._C",
    "RankMismatch": "patrickstar._C",
    "SavedRun": "patrickstar.engine.saved_run",
    "StateError": "patrickstar._C",
    "TrainingEngine": "patrickstar.deepspeed",
    "add_config_arguments": "patrickstar.deepspeed",
    "close_open_engine": "patrickstar.session.registry",
    "from_pretrained": "patrickstar.module.pretrained",
    "init_distributed": "patrickstar.comm",
    "initialize": "patrickstar.deepspeed",
    "initialize_engine": "patrickstar.runtime",
    "torch_scope": "patrickstar.module.preprocess",
}
_MODULES = ("_C", "checkpointing", "comm", "ops", "utils", "zero")


def __getattr__(name: str) -> Any:
    if name not in _HOMES and name not in _MODULES:
        raise AttributeError(f"module 'patrickstar' has no attribute {name!r}")
    with contextlib.suppress(ImportError, OSError):
        importlib.import_module("torch")  # the CUDA part of the extension needs its libraries loaded
    try:
        module = importlib.import_module(_HOMES.get(name, f"patrickstar.{name}"))
        if name == "_C" and "torch" in sys.modules:
            importlib.import_module("patrickstar.torch_shim").attach()
    except ImportError as error:
        globals().pop("_C", None)  # bound by its import; the next one must fail too
        globals().pop("_C", None)  # the next import must fail too
        hint = "(python -m patrickstar.env says what is missing and what mends it)"
        if hint in str(error):
            raise  # from a module that this one imports
        raise ImportError(f"{error} {hint}") from error
    value = module if name in _MODULES else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
