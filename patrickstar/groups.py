"""Parameter groups: what ``model_parameters`` may be, turned into groups of parameters."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

_OPTIONS = ("lr", "betas", "eps", "weight_decay")
ModelParameters = Callable[[nn.Module], Iterable[Any]] | Sequence[Mapping[str, Any]] | None


def make_groups(
    module: nn.Module, model_parameters: ModelParameters, replaced: Mapping[nn.Parameter, nn.Parameter] | None = None
) -> list[dict[str, Any]]:
    """Groups as ``torch.optim`` takes them.

    Args:
        module: the user's module.
        model_parameters: None (one group of all parameters); a callable that takes the module and returns parameters or
            groups; or a list of dicts whose ``params`` are name patterns (a string or a list; ``*`` and ``?`` as in
            file names), the first match wins.
        replaced: parameters that the module no longer has, and those in their place.

    Raises:
        ValueError: a pattern matches nothing, a parameter that requires grad is in no group or in two, an option is
            unknown.
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
        groups = [{**group, "params": [replaced.get(param, param) for param in group["params"]]} for group in groups]
    _check_groups(named, groups)
    return groups


def _from_callable(result: Any) -> list[dict[str, Any]]:
    if isinstance(result, torch.Tensor):
        raise ValueError("model_parameters returned a tensor; return a list of parameters or of groups")
    items = list(result)
    if items and not isinstance(items[0], Mapping):
        items = [{"params": items}]
    groups = []
    for item in items:
        if not isinstance(item, Mapping) or "params" not in item:
            raise ValueError(f"model_parameters returned a group {item!r} without 'params'")
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


def _check_groups(named: Mapping[str, nn.Parameter], groups: list[dict[str, Any]]) -> None:
    names = {param: name for name, param in named.items()}
    seen: set[nn.Parameter] = set()
    for group in groups:
        unknown = [key for key in group if key != "params" and key not in _OPTIONS]
        if unknown:
            raise ValueError(
                f"a parameter group has the unknown option {unknown[0]!r}; options are {', '.join(_OPTIONS)}"
            )
        for param in group["params"]:
            if param not in names:
                raise ValueError("model_parameters names a tensor that is not a parameter of the module")
            if param in seen:
                raise ValueError(f"parameter {names[param]} is in two groups; leave it in one")
            seen.add(param)
    missing = [name for param, name in names.items() if param.requires_grad and param not in seen]
    if missing:
        raise ValueError(
            f"{len(missing)} parameters require grad but are in no group "
            f"({', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}); add a "
            "group for them (the pattern '*' takes the rest) or freeze them with requires_grad_(False)"
        )
