"""Computes modules of a model in tiles of tokens (:mod:`patrickstar.sequence.tiling`) without changes to its code.

    tiled = tile_modules(model, tile_tokens=4096)   # before the model goes into an engine
    print(tiled.names)                              # ['model.layers.0.mlp', ...]
    tiled.restore()

Modules are found by structure, in the layers of an ``nn.ModuleList``:

* MLPs that consist of linear layers, activation functions and dropout alone
* norms that are written in several operations

Linear layers may be PEFT's, or tensor-parallel. In that case all ranks of a mesh have as many tokens each, and so
compute the same number of tiles. ``forward`` is replaced on the instance, so a ``forward`` that was assigned there (by
Liger-Kernel, say) is computed in tiles.

A tiled module is one use of its parameters, for all tiles of a forward and all of a backward: an engine's hooks treat
it as a module without submodules (``hooks.py``). Otherwise the chunks of its linear layers would be fetched once per
tile.
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
from patrickstar.tensor2d.fused import Part
from patrickstar.tensor2d.low_rank import Narrow2D, Widen2D
from patrickstar.tensor2d.one_dimension import ColumnLinear1D, RowLinear1D

PROPOSED_TILE_TOKENS = 4096
"""Tile size that plans propose; smaller tiles save little more (docs/guides/long_sequences.md)."""
_MLP_CLASSES = ("mlp", "feedforward", "ffn", "denseactdense", "densegatedactdense")
_MLP_PLACES = ("mlp", "feed_forward", "ffn")
_NORM_CLASSES = ("rmsnorm", "layernorm")
_FUSED_NORMS = (nn.LayerNorm, nn.RMSNorm)
"""Single operations that keep their input and two numbers per token; tiles would save nothing."""
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterDict, nn.ParameterList)
_ACTIVATIONS = (
    nn.CELU, nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU, nn.LogSigmoid, nn.Mish, nn.ReLU,
    nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Tanh,
)  # fmt: skip
_SHARDED = (Linear2D, ColumnLinear1D, RowLinear1D, Narrow2D, Widen2D, Part)
"""Tensor-parallel layers: each rank has as many tokens of a tile, and gets its own tokens back in order."""
_TOKEN_WISE = (nn.Linear, nn.Dropout, nn.Identity, *_SHARDED, *_ACTIVATIONS)


class TiledForward:
    """Replaces a module's ``forward``."""

    def __init__(self, module: nn.Module, name: str, tile_tokens: int):
        self._module = module
        self._name = name
        self._tile_tokens: int | None = tile_tokens
        self._before: Callable[..., Any] | None = vars(module).get("forward")
        module.forward = self

    @outside_of_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one call: in tiles if its only argument is a tensor of tokens, else unchanged."""
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
        """Restores the former ``forward``. If another one was put around this since, it stays, and this one only passes
        calls on.
        """
        self._tile_tokens = None
        if vars(self._module).get("forward") is not self:
            return
        if self._before is None:
            del self._module.forward
        else:
            self._module.forward = self._before


class TiledModules:
    """The modules that :func:`tile_modules` has tiled."""

    def __init__(self, forwards: dict[str, TiledForward]):
        self._forwards = forwards

    @property
    def names(self) -> list[str]:
        """Module names, as in ``model.named_modules()``."""
        return list(self._forwards)

    def restore(self) -> None:
        """Ends tiling."""
        for forward in self._forwards.values():
            forward.restore()


def tile_modules(model: nn.Module, tile_tokens: int, names: Sequence[str] | None = None) -> TiledModules:
    """Makes modules of ``model`` compute ``tile_tokens`` tokens at a time, in forward and backward.

    Args:
        model: its parameters may be on any device; modules are inspected, not run.
        tile_tokens: tokens of a tile, over all sequences of a batch. Calls with at most so many tokens are unchanged.
        names: modules to tile; None: the MLPs and norms of the layers, and norms beside the layers. Experts and modules
            with buffers are left alone, and ``nn.LayerNorm`` and ``nn.RMSNorm``, where tiles save nothing.

    Raises:
        ValueError: ``tile_tokens`` is less than 1, a named module does not exist or cannot be tiled, no module can be
            tiled, or one is tiled already. Nothing is changed then.
    """
    if tile_tokens < 1:
        raise ValueError(f"tile_tokens is {tile_tokens}; give at least 1")
    found = find_tileable(model) if names is None else _named(model, names)
    return TiledModules({name: TiledForward(module, name, tile_tokens) for name, module in found.items()})


def is_tiled(module: nn.Module) -> bool:
    """Tests whether the module is computed in tiles."""
    return isinstance(vars(module).get("forward"), TiledForward)


def is_one_use(module: nn.Module) -> bool:
    """Tests whether a call of the module is one use of all parameters in it: it is computed in tiles, or calls its
    submodules with other tensors in place of their parameters.
    """
    return is_tiled(module) or getattr(module, "is_one_use", False)


def inside_one_use(model: nn.Module) -> set[nn.Module]:
    """Submodules of the modules in ``model`` whose call is one use."""
    return {child for module in model.modules() if is_one_use(module) for child in module.modules() if child != module}


def find_tileable(model: nn.Module) -> dict[str, nn.Module]:
    """The modules, by name, that :func:`tile_modules` tiles by default.

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
    """The reason why the module cannot be computed in tiles; None if it can."""
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
    """Children of layers, and norms beside the lists of layers."""
    for module in model.modules():
        lists = [child for child in module.children() if isinstance(child, nn.ModuleList)]
        if lists:
            yield from (child for child in module.children() if _is_norm(child))
        for layers in lists:
            for layer in layers:
                yield from layer.children()


def _is_usual(place: str, module: nn.Module) -> bool:
    """Tests by name for an MLP or a norm for which tiles save memory."""
    kind = type(module).__name__.lower()
    if any(True for _ in module.children()):
        return kind.endswith(_MLP_CLASSES) or place in _MLP_PLACES
    return _is_norm(module) and not isinstance(module, _FUSED_NORMS)


def _is_norm(module: nn.Module) -> bool:
    """Tests for a norm over one token's features: its parameters, if any, are vectors of one size."""
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
    """transformers' ``Conv1D``, GPT-2's linear layer with a transposed weight."""
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
