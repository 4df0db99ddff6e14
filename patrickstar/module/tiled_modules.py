"""Modules of a model that are computed in tiles of tokens (:mod:`patrickstar.sequence.tiling`), with no code changed.

    tiled = tile_modules(model, tile_tokens=4096)   # before the model goes into an engine, or any other training
    print(tiled.names)                              # ['model.layers.0.mlp', ...]
    tiled.restore()

Found by structure: in the layers that a model has in an ``nn.ModuleList``, MLPs, which consist of linear layers,
activation functions and dropout alone, and norms that are written in several operations. Linear layers may be PEFT's,
or divided over ranks: then all ranks of a mesh compute the same number of tiles, since they have as many tokens each.
A module's ``forward`` is replaced in the module itself, so one that somebody else has put there (as Liger-Kernel does)
is what is computed in tiles.

[Note: a tiled module is one use] Its parameters come and go together, for all tiles of a forward, and for all of a
backward: an engine's hooks take it as a module without modules inside (``hooks.py``). Otherwise the chunks of its
linear layers would pass through the device once for each tile.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from patrickstar.module.compiled.dynamo import outside_of_graphs
from patrickstar.sequence.tiling import in_tiles
from patrickstar.tensor2d import Linear2D
from patrickstar.tensor2d.adapters import AdaptedParts, GivenProduct
from patrickstar.tensor2d.low_rank import Narrow2D, Widen2D
from patrickstar.tensor2d.one_dimension import ColumnLinear1D, RowLinear1D

PROPOSED_TILE_TOKENS = 4096
"""Of the tiles that are proposed: smaller ones save little more (docs/guides/long_sequences.md)."""
_MLP_CLASSES = ("mlp", "feedforward", "ffn", "denseactdense", "densegatedactdense")
_MLP_PLACES = ("mlp", "feed_forward", "ffn")
_NORM_CLASSES = ("rmsnorm", "layernorm")
_FUSED_NORMS = (nn.LayerNorm, nn.RMSNorm)
"""One operation each, which keeps its input and two numbers per token: tiles would save nothing."""
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterDict, nn.ParameterList)
_ACTIVATIONS = (
    nn.CELU, nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU, nn.LogSigmoid, nn.Mish, nn.ReLU,
    nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Tanh,
)  # fmt: skip
_DIVIDED = (Linear2D, ColumnLinear1D, RowLinear1D, Narrow2D, Widen2D, AdaptedParts, GivenProduct)
"""Of a tile each rank has as many tokens, and gets those that it sent back in their order."""
_TOKEN_WISE = (nn.Linear, nn.Dropout, nn.Identity, *_DIVIDED, *_ACTIVATIONS)


class TiledForward:
    """Stands where a module has its ``forward``."""

    def __init__(self, module: nn.Module, name: str, tile_tokens: int):
        self._module = module
        self._name = name
        self._tile_tokens: int | None = tile_tokens
        self._before: Callable[..., Any] | None = vars(module).get("forward")
        module.forward = self

    @outside_of_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One call: in tiles where it has one argument, which is a tensor of tokens; any other as it is."""
        forward = self._before or functools.partial(type(self._module).forward, self._module)
        given = [*args, *kwargs.values()]
        hidden = given[0] if len(given) == 1 else None
        is_of_tokens = isinstance(hidden, torch.Tensor) and hidden.is_floating_point() and hidden.dim() >= 2
        if self._tile_tokens is None or not is_of_tokens:
            return forward(*args, **kwargs)
        keyword = next(iter(kwargs), None)

        def compute(tile: torch.Tensor) -> torch.Tensor:
            return forward(tile) if keyword is None else forward(**{keyword: tile})

        return in_tiles(compute, hidden, list(self._module.parameters()), self._tile_tokens, name=self._name)

    def restore(self) -> None:
        """The module has the ``forward`` that it had; where somebody has put another one around this since, that stays
        and this one does nothing.
        """
        self._tile_tokens = None
        if vars(self._module).get("forward") is not self:
            return
        if self._before is None:
            del self._module.forward
        else:
            self._module.forward = self._before


class TiledModules:
    """What :func:`tile_modules` has tiled."""

    def __init__(self, forwards: dict[str, TiledForward]):
        self._forwards = forwards

    @property
    def names(self) -> list[str]:
        """Of the modules, as ``model.named_modules()`` gives them."""
        return list(self._forwards)

    def restore(self) -> None:
        """They are computed as they were before."""
        for forward in self._forwards.values():
            forward.restore()


def tile_modules(model: nn.Module, tile_tokens: int, names: Sequence[str] | None = None) -> TiledModules:
    """From now on modules of ``model`` are computed ``tile_tokens`` tokens at a time, in forward and in backward.

    Args:
        model: its parameters may be anywhere; modules are looked at, not run.
        tile_tokens: tokens of a tile, over all sequences of a batch. Calls with no more of them are as before.
        names: of the modules; None: the MLPs and norms of its layers, and norms beside the layers. Left alone are
            experts, modules with buffers, and PyTorch's own ``nn.LayerNorm`` and ``nn.RMSNorm``, which keep nothing
            that tiles would save.

    Raises:
        ValueError: ``tile_tokens`` is less than 1, a module that is named is not there or cannot be tiled, there is
            none to be tiled, or one is tiled already. Nothing is changed then.
    """
    if tile_tokens < 1:
        raise ValueError(f"tile_tokens is {tile_tokens}; give at least 1")
    found = find_tileable(model) if names is None else _named(model, names)
    return TiledModules({name: TiledForward(module, name, tile_tokens) for name, module in found.items()})


def is_tiled(module: nn.Module) -> bool:
    """Whether its calls are computed in tiles."""
    return isinstance(vars(module).get("forward"), TiledForward)


def inside_tiled(model: nn.Module) -> set[nn.Module]:
    """The modules within those of ``model`` that are tiled."""
    return {child for module in model.modules() if is_tiled(module) for child in module.modules() if child != module}


def find_tileable(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that :func:`tile_modules` tiles where none are named, by name.

    Raises:
        ValueError: there are none, or one is tiled already.
    """
    found = {}
    places = set(_candidates(model))
    for name, module in model.named_modules():
        if module in places and _is_usual(name.rpartition(".")[2], module) and why_not(module) is None:
            found[name] = module
    _check_untiled(model)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no layers with MLPs or norms that can be computed in tiles; name modules "
            "yourself (patrickstar.module.tiled_modules.tile_modules), or set activations.tile_tokens to 0"
        )
    return found


def why_not(module: nn.Module) -> str | None:
    """What of its structure speaks against computing it in tiles; None where nothing does."""
    buffers = [name for name, _ in module.named_buffers()]
    if buffers:
        return f"it has buffers ({', '.join(buffers)}), which each tile would read or change anew"
    if not _takes_one_tensor(module):
        return "its forward takes more than the tokens' tensor"
    if not any(True for _ in module.children()):
        if isinstance(module, _TOKEN_WISE) or _is_conv1d(module) or _is_norm(module):
            return None
        return "it is neither a linear layer, an activation function nor a norm of each token"
    for name, child in module.named_modules():
        if child is not module and not _is_token_wise(child):
            return f"within it {name} is a {type(child).__name__}, of which nothing says that it treats tokens alone"
    return None


def _candidates(model: nn.Module) -> Iterator[nn.Module]:
    """What stands in one of several layers, or beside them."""
    for module in model.modules():
        lists = [child for child in module.children() if isinstance(child, nn.ModuleList)]
        if lists:
            yield from (child for child in module.children() if _is_norm(child))
        for layers in lists:
            for layer in layers:
                yield from layer.children()


def _is_usual(place: str, module: nn.Module) -> bool:
    """Whether its names say that it is an MLP or a norm, and tiles save something."""
    kind = type(module).__name__.lower()
    if any(True for _ in module.children()):
        return kind.endswith(_MLP_CLASSES) or place in _MLP_PLACES
    return _is_norm(module) and not isinstance(module, _FUSED_NORMS)


def _is_norm(module: nn.Module) -> bool:
    """Of one token: its parameters, if any, have one dimension, of one size."""
    if not type(module).__name__.lower().endswith(_NORM_CLASSES) or any(True for _ in module.children()):
        return False
    shape = getattr(module, "normalized_shape", (0,))
    return len({param.shape for param in module.parameters()}) <= 1 and all(
        len(dims) == 1 for dims in (shape, *(param.shape for param in module.parameters()))
    )


def _is_token_wise(module: nn.Module) -> bool:
    kind = type(module)
    if isinstance(module, (*_TOKEN_WISE, *_CONTAINERS)) or _is_conv1d(module) or _is_norm(module):
        return True
    return kind.__module__.startswith("peft.tuners.") or kind.__module__ == "transformers.activations"


def _is_conv1d(module: nn.Module) -> bool:
    """transformers' linear layer with its weight transposed, of GPT-2."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def _takes_one_tensor(module: nn.Module) -> bool:
    params = inspect.signature(module.forward).parameters.values()
    needed = [p for p in params if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return len(needed) == 1 and needed[0].kind is not inspect.Parameter.KEYWORD_ONLY


def _named(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    modules = dict(model.named_modules(remove_duplicate=False))
    found = {}
    for name in names:
        if name not in modules:
            raise ValueError(f"{type(model).__name__} has no module {name!r}; names are those of named_modules()")
        reason = why_not(modules[name])
        if reason is not None:
            raise ValueError(
                f"{name} ({type(modules[name]).__name__}) cannot be computed in tiles: {reason}; leave it out"
            )
        found[name] = modules[name]
    _check_untiled(model)
    for name, module in found.items():
        others = {other for other, inner in found.items() if other != name and inner in set(module.modules())}
        if others:
            raise ValueError(f"{min(others)} lies within {name}, or is the same; name one of them")
    return found


def _check_untiled(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if is_tiled(module):
            raise ValueError(
                f"{name} of {type(model).__name__} is computed in tiles already; restore() what tile_modules gave "
                "first, or set activations.tile_tokens to 0"
            )
