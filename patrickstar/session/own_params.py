"""Settings and calls that are refused while each rank has parameters of its own (``module/param_ranks.py``)."""

from __future__ import annotations

from torch import nn

from patrickstar import _C
from patrickstar.config import Config, RankReduction
from patrickstar.module.param_ranks import is_own
from patrickstar.session.session import Session


def check_settings(module: nn.Module, config: Config, num_ranks: int) -> None:
    """Raises ValueError if the configuration needs every parameter to be shared by all ranks, and some are not."""
    names = [name for name, param in module.named_parameters() if is_own(param)]
    if not names or num_ranks == 1:
        return
    if config.gradient_allreduce_op is RankReduction.SUM:
        raise ValueError(
            f'gradient_allreduce_op is "sum", but {_said(names)}, whose gradients are not added up over ranks; set it '
            'to "mean"'
        )
    if config.ranks_per_sample > 1:
        raise ValueError(
            f"{config.ranks_per_sample} ranks share each sample (sequence_parallel, tensor_parallel), but "
            f"{_said(names)}; leave these keys out"
        )


def check_shared(session: Session, call: str) -> None:
    """Raises StateError on all ranks if each has parameters of its own; ``call`` needs shared values."""
    names = [spec.name for spec in session.plan_of_params.chunked if spec.is_own]
    if names and session.layout.num_ranks > 1:
        error = _C.StateError(
            f"{call} is not supported yet where {_said(names)}; close the engine, and the module of each rank has the "
            "values of that rank"
        )
        error.on_all_ranks = True  # so the process groups stay usable
        raise error


def _said(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"each rank has parameters of its own ({names[0]}{more})"
