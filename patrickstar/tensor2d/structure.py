"""The parts of a Hugging Face model that a mesh shards, found by structure: by the shapes of linear layers and by what
norms compute, not by names.

    structure = find_structure(model)           # raises ValueError, naming the module that has no form over a mesh

Layers are the elements of a ``ModuleList`` that attend. The module that attends has ``is_causal``, which transformers'
attention functions read, and linear layers. Those whose outputs are queries, keys and values take
the layer's input. The one whose input is as wide as all heads is the output. Every other pair of linear layers in a
layer is an MLP: the second takes what the first (or gate and up) computed. Around the layers are a table of tokens,
smaller tables, norms, and a head. A model with a parameter that belongs to none of these is refused.

Shapes do not show everything, such as the order of queries, keys and values in a fused layer. An engine therefore
compares the sharded model with the original before it trains (:mod:`patrickstar.parallel.proof`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from patrickstar.tensor2d.adapters import check_adapters, is_above_base, is_adapted
from patrickstar.tensor2d.recognised import NormKind, embedding_factor, recognise_norm
from patrickstar.tensor2d.styles import features_of, is_linear


@dataclasses.dataclass(frozen=True)
class Pair:
    """Linear layers of which the second takes what the first computed, with only feature-wise or head-wise operations
    between them.
    """

    firsts: tuple[str, ...]
    """Names of layers with the same input."""
    second: str
    parts: tuple[int, ...]
    """Features of each part of the firsts' outputs; of each part a rank gets some."""


@dataclasses.dataclass(frozen=True)
class Attention:
    """A module that attends."""

    name: str
    pair: Pair
    heads: int
    key_heads: int
    head_dim: int


@dataclasses.dataclass(frozen=True)
class Structure:
    """Names of a model's modules by what they are."""

    layers: tuple[str, ...]
    attentions: tuple[Attention, ...]
    mlps: tuple[Pair, ...]
    mixtures: tuple[str, ...]
    """Mixtures of experts, with their routers."""
    norms: Mapping[str, NormKind]
    """Norms over a token's features."""
    inner_norms: Mapping[str, NormKind]
    """Norms over the features of all heads, or over an MLP's inner features."""
    head_norms: Mapping[str, NormKind]
    """Norms over the features of one head."""
    table: str
    """The table of tokens."""
    small_tables: tuple[str, ...]
    linears: tuple[str, ...]
    """Between the layers and the head, or before the layers."""
    head: str | None
    """Computes logits of the vocabulary."""
    scores: tuple[str, ...]
    """Layers that compute a classifier's scores of labels: one, or the trained and the frozen one of PEFT."""

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """All pairs: of attention, then of MLPs."""
        return (*(attention.pair for attention in self.attentions), *self.mlps)


def find_structure(model: nn.Module) -> Structure:
    """The structure of ``model``, which is not changed. Parameters may be on the meta device.

    Raises:
        ValueError: a module has no form over a mesh; the message names it and the model.
    """
    check_adapters(model)
    return _Search(model).found()


_REMEDY = "leave tensor_parallel out, or give parallelize() a plan"


def refused(model: nn.Module, why: str, remedy: str = _REMEDY) -> ValueError:
    """An error that names ``model``."""
    return ValueError(f"{type(model).__name__} cannot be sharded over a mesh: {why}; {remedy}")


class _Search:
    """One search; results are gathered in the order of the model's modules."""

    def __init__(self, model: Any):
        self._model = model
        config = getattr(model, "config", None)
        width = getattr(config, "hidden_size", None)
        if type(width) is not int or not hasattr(model, "get_input_embeddings"):
            raise refused(model, "it has no configuration with a hidden_size, as models of Hugging Face have")
        if getattr(config, "is_encoder_decoder", False):
            raise refused(model, "it is an encoder-decoder model, which has two streams of tokens")
        self._width: int = width
        self._attentions: list[Attention] = []
        self._mlps: list[Pair] = []
        self._mixtures: list[str] = []
        self._norms: dict[str, NormKind] = {}
        self._inner_norms: dict[str, NormKind] = {}
        self._head_norms: dict[str, NormKind] = {}
        self._linears: list[str] = []

    def found(self) -> Structure:
        layers = dict(_layers(self._model))
        if not layers:
            raise refused(
                self._model,
                "no ModuleList of it has layers with attention of transformers' interface (a module with is_causal and "
                "linear layers)",
            )
        for name, layer in layers.items():
            self._search_layer(name, layer)
        tables, head, scores = self._search_around(layers)
        structure = Structure(
            layers=tuple(layers),
            attentions=tuple(self._attentions),
            mlps=tuple(self._mlps),
            mixtures=tuple(self._mixtures),
            norms=self._norms,
            inner_norms=self._inner_norms,
            head_norms=self._head_norms,
            table=tables[0],
            small_tables=tuple(tables[1:]),
            linears=tuple(self._linears),
            head=head,
            scores=scores,
        )
        self._check_covered(structure)
        if structure.mixtures and getattr(self._model.config, "output_router_logits", False):
            raise refused(
                self._model,
                "it adds a loss of its routers (output_router_logits), which is no sum over tokens",
                "set it to False, or leave tensor_parallel out",
            )
        return structure

    def _search_layer(self, name: str, layer: nn.Module) -> None:
        attending = [(place, child) for place, child in _walk(layer, name) if _attends(child)]
        if len(attending) != 1:
            where = " and in ".join(place for place, _ in attending) or "no module"
            raise refused(self._model, f"{name} ({type(layer).__name__}) attends in {where}, not in one")
        ((place, module),) = attending
        for path, child in _walk(layer, name):
            if path != name and not _is_within(path, self._mixtures) and _is_mixture(child):
                self._mixtures.append(path)
        linears = {
            path: child
            for path, child in _walk(layer, name)
            if is_linear(child) and not _is_within(path, self._mixtures) and not path.startswith(f"{place}.")
        }
        attention = self._attention(place, module, linears)
        self._attentions.append(attention)
        linears.pop(attention.pair.second, None)
        self._mlps += self._pairs(name, linears)
        for path, child in _walk(layer, name):
            if not _is_within(path, self._mixtures):
                self._note_norm(path, child, attention)

    def _attention(self, name: str, module: Any, others: Mapping[str, nn.Module]) -> Attention:
        """The attention of ``module``; its output layer may be the first of the ``others``."""
        own = {f"{name}.{key}": child for key, child in module.named_children() if is_linear(child)}
        heads, key_heads = self._num_heads(module)
        shapes = {path: features_of(child) for path, child in own.items()}
        fitting = _fitting(shapes, heads, key_heads, self._width)
        if fitting is None:  # the output layer is elsewhere
            outside = next(((path, features_of(child)) for path, child in others.items()), None)
            fitting = outside and _fitting({**shapes, outside[0]: outside[1]}, heads, key_heads, self._width)
        if fitting is None:
            listed = ", ".join(f"{path.rpartition('.')[2]} {list(shape)}" for path, shape in shapes.items())
            raise refused(
                self._model,
                f"the linear layers of {name} ({type(module).__name__}: {listed}) are not the queries, keys, values "
                f"and output of {heads} heads and {key_heads} of keys",
            )
        second, head_dim = fitting
        firsts = tuple(path for path in own if path != second)
        sizes = tuple(shapes[path][1] for path in firsts)
        parts = sizes if len(firsts) > 1 else tuple(number * head_dim for number in (heads, key_heads, key_heads))
        return Attention(name, Pair(firsts, second, parts), heads, key_heads, head_dim)

    def _num_heads(self, module: Any) -> tuple[int, int]:
        found = []
        for key in ("num_attention_heads", "num_key_value_heads"):
            values = (_attribute(owner, key) for owner in (getattr(module, "config", None), self._model.config))
            found.append(next((value for value in values if type(value) is int), None))
        if found[0] is None:
            raise refused(self._model, "its configuration has no number of attention heads that all layers share")
        return found[0], found[0] if found[1] is None else found[1]

    def _pairs(self, layer: str, linears: Mapping[str, nn.Module]) -> Iterator[Pair]:
        """The pairs of MLPs: of a module's own linear layers, or of single ones of two modules, one after the other."""
        owners: dict[str, list[str]] = {}
        for path in linears:
            owners.setdefault(path.rpartition(".")[0], []).append(path)
        single: list[str] = []
        for paths in owners.values():
            if len(paths) > 1:
                yield self._pair(paths, linears)
            else:
                single += paths
        if len(single) % 2:
            raise refused(self._model, f"{single[-1]} is a linear layer of {layer} that forms no pair with another one")
        for index in range(0, len(single), 2):
            yield self._pair(single[index : index + 2], linears)

    def _pair(self, paths: list[str], linears: Mapping[str, nn.Module]) -> Pair:
        shapes = {path: features_of(linears[path]) for path in paths}
        inner = [path for path, shape in shapes.items() if shape[0] != self._width and shape[1] == self._width]
        second = inner[0] if len(inner) == 1 else paths[-1]
        firsts = tuple(path for path in paths if path != second)
        outputs = [shapes[path][1] for path in firsts]
        size = shapes[second][0]
        is_pair = shapes[second][1] == self._width and all(shapes[path][0] == self._width for path in firsts)
        if not is_pair or outputs not in ([size], [size, size], [2 * size]):
            listed = ", ".join(f"{path} {list(shape)}" for path, shape in shapes.items())
            raise refused(self._model, f"{listed} are linear layers in a layer, but not those of a (gated) MLP")
        return Pair(firsts, second, (size,) * (sum(outputs) // size))

    def _note_norm(self, path: str, module: nn.Module, attention: Attention | None) -> None:
        kind = recognise_norm(module, self._width)
        if kind is None:
            return
        if attention is not None and path.startswith(f"{attention.name}."):
            widths = {number * attention.head_dim for number in (attention.heads, attention.key_heads)}
            if not (kind.has_weight or kind.has_bias):
                return  # it takes the features of its input, which are those of a head
            if kind.features == attention.head_dim:
                self._head_norms[path] = kind
            elif kind.features in widths:
                self._inner_norms[path] = kind
        elif kind.features == self._width or attention is None:
            self._norms[path] = kind
        elif any(kind.features == sum(pair.parts) // len(pair.parts) for pair in self._mlps):
            self._inner_norms[path] = kind

    def _search_around(self, layers: Mapping[str, nn.Module]) -> tuple[list[str], str | None, tuple[str, ...]]:
        model = self._model
        around = {path: child for path, child in _walk(model, "") if not _is_within(path, layers)}
        names = {id(child): path for path, child in around.items()}
        tables = [path for path, child in around.items() if isinstance(child, nn.Embedding)]
        table = names.get(id(model.get_input_embeddings()))
        if table not in tables:
            raise refused(model, "its table of tokens (get_input_embeddings) is no embedding outside of its layers")
        for path in tables:
            if embedding_factor(around[path]) is None:
                raise refused(
                    model,
                    f"{path} ({type(around[path]).__name__}) computes something else than rows of its table times a "
                    "number",
                )
        tables.remove(table)
        head = names.get(id(model.get_output_embeddings())) if hasattr(model, "get_output_embeddings") else None
        linears = [path for path, child in around.items() if is_linear(child) and path != head]
        scores = self._scores(linears) if head is None else ()
        self._linears = [path for path in linears if path not in scores]
        self._check_linears(head)
        for path, child in around.items():
            self._note_norm(path, child, None)
        return [table, *tables], head, scores

    def _scores(self, linears: list[str]) -> tuple[str, ...]:
        model = self._model
        outside = [path for path in linears if is_above_base(model, path)]
        number = model.config.num_labels
        if number == self._width:  # as many as in a layer before them
            outside = outside[-1:]
        return tuple(path for path in outside if features_of(model.get_submodule(path))[1] == number)

    def _check_linears(self, head: str | None) -> None:
        """Raises ValueError if a linear layer computes an output of the model of another kind."""
        model = self._model
        widths = {self._width} | ({features_of(model.get_submodule(head))[0]} if head else set())
        for path in self._linears:
            if features_of(model.get_submodule(path))[1] not in widths:
                raise refused(
                    model,
                    f"{path} computes an output of another kind than those that have a form: logits of a causal or "
                    "masked language model, scores of a classifier of sequences or of tokens",
                )

    def _check_covered(self, structure: Structure) -> None:
        model, named = self._model, [*structure.norms, *structure.inner_norms, *structure.head_norms]
        named += [*structure.mixtures, structure.table, *structure.small_tables, *structure.linears]
        named += [path for pair in structure.pairs for path in (*pair.firsts, pair.second)]
        named += [*structure.scores, *([] if structure.head is None else [structure.head])]
        covered = {id(param) for path in named for param in model.get_submodule(path).parameters()}
        for name, param in model.named_parameters():
            if id(param) not in covered:
                owner = name.rpartition(".")[0]
                kind = type(model.get_submodule(owner)).__name__
                raise refused(
                    model,
                    f"module {owner!r} ({kind}), whose parameter {name} is {list(param.shape)}, is no attention, MLP, "
                    "mixture, norm, table or head",
                )


def _layers(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The elements of the outermost ModuleLists, if one of them attends."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            if any(map(_attends, child.modules())):
                yield from ((f"{prefix}{name}.{index}", layer) for index, layer in child.named_children())
        else:
            yield from _layers(child, f"{prefix}{name}.")


def _walk(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """``module`` and all modules in it, but none inside a linear layer with adapters."""
    yield name, module
    if not is_adapted(module):
        for key, child in module.named_children():
            yield from _walk(child, f"{name}.{key}" if name else key)


def _attends(module: nn.Module) -> bool:
    return hasattr(module, "is_causal") and any(is_linear(child) for child in module.children())


def _is_mixture(module: nn.Module) -> bool:
    """True for a module with experts, which are one parameter of three dimensions or a list of MLPs."""
    if any(map(_attends, module.modules())):
        return False
    parts = [part for part in (module, *module.children()) if not isinstance(part, nn.modules.conv._ConvNd)]
    if any(param is not None and param.dim() == 3 for part in parts for param in part._parameters.values()):
        return True
    lists = [child for child in module.children() if isinstance(child, nn.ModuleList)]
    return any(len(found) > 1 and sum(map(is_linear, found[0].modules())) > 1 for found in lists)


def _is_within(path: str, outer: Any) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in outer)


def _attribute(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name, None)
    except RuntimeError:  # transformers has it per layer
        return None


def _fitting(shapes: Mapping[str, tuple[int, int]], heads: int, key_heads: int, width: int) -> tuple[str, int] | None:
    """The output layer's name and the features of a head; None: shapes are not those of an attention."""
    fitting = {}
    for path, (inputs, outputs) in shapes.items():
        others = [shape for other, shape in shapes.items() if other != path]
        head_dim = inputs // heads
        if outputs != width or inputs % heads or not others or any(shape[0] != width for shape in others):
            continue
        sizes = sorted(shape[1] for shape in others)
        possible = ([key_heads * head_dim] * 2 + [inputs], [(heads + 2 * key_heads) * head_dim])
        if sizes in map(sorted, possible):
            fitting[path] = head_dim
    return next(reversed(fitting.items())) if fitting else None
