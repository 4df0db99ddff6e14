"""Turns ``model_parameters`` into parameter groups."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from patrickstar.config import ALL_OPTIONS
from patrickstar.config.nearest import slip_of

logger = logging.getLogger("patrickstar")

_OTHER_OPTIMIZERS = (
    *("amsgrad", "maximize", "differentiable", "capturable", "foreach", "fused", "decoupled_weight_decay"),
    *("alpha", "rho", "centered", "bias_correction", "adam_w_mode", "torch_adam"),
    *ALL_OPTIONS,
)
"""Group options of PyTorch's and DeepSpeed's optimizers."""
ModelParameters = Callable[[nn.Module], Iterable[Any]] | Sequence[Mapping[str, Any]] | None


def make_groups(
    module: nn.Module,
    model_parameters: ModelParameters,
    replaced: Mapping[nn.Parameter, nn.Parameter] | None = None,
    *,
    options: Sequence[str],
) -> list[dict[str, Any]]:
    """Returns groups in ``torch.optim``'s format.

    Args:
        module: the user's module.
        model_parameters: None (one group of all parameters); a callable that takes the module and returns parameters or
            groups; or a list of dicts whose ``params`` are name patterns (a string or a list; ``*`` and ``?`` as in
            file names), the first match wins.
        replaced: parameters removed from the module -> their replacements.
        options: options allowed in a group of this type of optimizer.

    Raises:
        ValueError: a pattern matches nothing, a parameter that requires grad matches none, a parameter is in two
            groups, or an option is unknown.

    A callable's result is interpreted as by ``torch.optim``. Parameters that it omits are not trained and named in a
    warning. Further keys of a group (``name``, a script's own schedule) are kept.
    """
    named = dict(module.named_parameters())
    if model_parameters is None:
        groups = [{"params": list(named.values())}]
    elif callable(model_parameters):
        groups = _from_callable(model_parameters(module))
    elif isinstance(model_parameters, Sequence) and not isinstance(model_parameters, str):
        groups = _from_patterns(named, model_parameters)
    else:
        raise ValueError(
            f"model_parameters is a {type(model_parameters).__name__}; give a callable that takes the module and "
            "returns groups, or a list of dicts whose 'params' are name patterns"
        )
    if replaced:
        groups = [{**group, "params": _in_place(group["params"], replaced)} for group in groups]
    _check_groups(named, groups, options)
    if not callable(model_parameters):
        _check_no_further_keys(groups, options)
    missing = _in_no_group(named, groups)
    if missing and callable(model_parameters):
        logger.warning(
            "%d parameters require grad but are in no group (%s): they are not trained; requires_grad_(False) spares "
            "their gradients too",
            len(missing),
            some_of(missing),
        )
    elif missing:
        raise ValueError(
            f"{len(missing)} parameters require grad but are in no group ({some_of(missing)}); add a group for them "
            "(the pattern '*' takes the rest) or freeze them with requires_grad_(False)"
        )
    return groups


def _in_place(params: Iterable[Any], replaced: Mapping[nn.Parameter, nn.Parameter]) -> list[Any]:
    """Returns ``params`` with replaced parameters; several may map to one."""
    found, taken = [], set()
    for param in params:
        now = replaced.get(param, param)
        if now is param or now not in taken:
            found.append(now)
        taken.add(now)
    return found


def checked_added_group(
    module: nn.Module,
    has_param: Callable[[nn.Parameter], bool],
    group: Any,
    groups: Sequence[Mapping[str, Any]],
    options: Sequence[str],
) -> dict[str, Any]:
    """Checks a group to be added to ``groups``; the result's ``params`` are a list of parameters.

    ``has_param`` tests whether the engine has a parameter of ``module``.

    Raises:
        TypeError: the group is not a dict, or its ``params`` have no order.
        ValueError: a parameter is not in the module, newer than the engine, or already in a group, or an option is
            unknown.
    """
    if not isinstance(group, Mapping):
        raise TypeError(f"add_param_group got a {type(group).__name__}; give a dict with 'params'")
    if isinstance(group.get("params"), (set, frozenset)):
        raise TypeError("add_param_group got params as a set, which has no order; give a list of parameters")
    (added,) = _from_callable([group])
    names = {param: name for name, param in module.named_parameters()}
    taken = {param for other in groups for param in other["params"]}
    for param in added["params"]:
        if not isinstance(param, nn.Parameter) or param not in names:
            raise ValueError("add_param_group got a tensor that is not a parameter of the engine's module")
        if not has_param(param):
            raise ValueError(
                f"parameter {names[param]} was put into the module when its engine was open, and an engine trains the "
                "parameters that its module had when it was made; close() the engine, change the module, and make a "
                "new engine"
            )
        if param in taken:
            raise ValueError(f"parameter {names[param]} is in a group already; leave it out of the added one")
        taken.add(param)
    for key in added:
        if key not in ("params", *options, "initial_lr") and (key in _OTHER_OPTIMIZERS or _near(key, options)):
            raise _unknown_option(key, options)
    return added


def _from_callable(result: Any) -> list[dict[str, Any]]:
    if isinstance(result, torch.Tensor):
        raise ValueError("model_parameters returned a tensor; return a list of parameters or of groups")
    items = list(result)
    if items and not isinstance(items[0], Mapping):
        items = [{"params": items}]
    groups = []
    for item in items:
        if not isinstance(item, Mapping) or "params" not in item:
            raise ValueError(f"a parameter group is {item!r}, without 'params'")
        params = item["params"]
        params = [params] if isinstance(params, torch.Tensor) else [p[1] if isinstance(p, tuple) else p for p in params]
        groups.append({**item, "params": params})
    return groups


def _from_patterns(named: Mapping[str, nn.Parameter], items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    left = dict(named)
    groups = []
    for index, item in enumerate(items):
        if not isinstance(item, Mapping) or "params" not in item:
            raise ValueError(f"model_parameters[{index}] is {item!r}; give a dict whose 'params' are name patterns")
        patterns = [item["params"]] if isinstance(item["params"], str) else list(item["params"])
        taken: list[nn.Parameter] = []
        for pattern in patterns:
            if not isinstance(pattern, str):
                raise ValueError(
                    f"model_parameters[{index}]['params'] holds a {type(pattern).__name__}; in a list of dicts they "
                    "are name patterns "
                    "(parameters are not built yet); use a callable to choose parameters"
                )
            matches = [name for name in left if fnmatch.fnmatchcase(name, pattern)]
            if not matches and not any(fnmatch.fnmatchcase(name, pattern) for name in named):
                raise ValueError(
                    f"model_parameters[{index}]: no parameter matches {pattern!r}; names look like "
                    f"{next(iter(named), '')!r}"
                )
            taken += [left.pop(name) for name in matches]
        groups.append({**item, "params": taken})
    return groups


def _check_groups(named: Mapping[str, nn.Parameter], groups: list[dict[str, Any]], options: Sequence[str]) -> None:
    names = {param: name for name, param in named.items()}
    seen: set[nn.Parameter] = set()
    for group in groups:
        for key in group:
            if key not in ("params", *options) and (key in _OTHER_OPTIMIZERS or _near(key, options)):
                raise _unknown_option(key, options)
        for param in group["params"]:
            if param not in names:
                raise ValueError("model_parameters names a tensor that is not a parameter of the module")
            if param in seen:
                raise ValueError(f"parameter {names[param]} is in two groups; leave it in one")
            seen.add(param)


def _near(key: str, options: Sequence[str]) -> bool:
    """True if ``key`` is probably a misspelt option."""
    return slip_of(str(key), options, 0.88) is not None


def _check_no_further_keys(groups: list[dict[str, Any]], options: Sequence[str]) -> None:
    for group in groups:
        for key in group:
            if key not in ("params", *options):
                raise _unknown_option(key, options)


def _unknown_option(key: Any, options: Sequence[str]) -> ValueError:
    return ValueError(f"a parameter group has the unknown option {key!r}; options are {', '.join(options)}")


def _in_no_group(named: Mapping[str, nn.Parameter], groups: list[dict[str, Any]]) -> list[str]:
    grouped = {param for group in groups for param in group["params"]}
    return [name for name, param in named.items() if param.requires_grad and param not in grouped]


def some_of(names: Sequence[str]) -> str:
    """The first of ``names``, for messages."""
    return f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
