"""Tensor parallelism of an engine (`tensor_parallel` in the configuration).

matrices = make_matrices(config, mesh)
replaced = matrices.divide(module)             # before its parameters go into chunks
...
total = matrices.total(squares)                # of gradients, over all blocks
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from torch import nn

from patrickstar import _C
from patrickstar.config import Config, MatrixMode
from patrickstar.module.adapters import draw_adapters
from patrickstar.module.aliases import find_aliases
from patrickstar.module.first_rank_values import digest
from patrickstar.module.materialize import attached_values
from patrickstar.module.preprocess import SortedParams
from patrickstar.parallel.calls import Calls, OwnCalls
from patrickstar.parallel.matrix_strategies import ChosenWay, choose_way
from patrickstar.parallel.sharded_experts import ShardedExperts
from patrickstar.parallel.sharded_values import ShardedNames, divide_attached_values
from patrickstar.ranks.mesh import Axis, MeshRanks
from patrickstar.ranks.messages import reading
from patrickstar.sequence.hugging_face import find_model
from patrickstar.tensor2d import Layer2D, MeshGroup

logger = logging.getLogger("patrickstar")

_SQUARES = struct.Struct("<d")


class Matrices(Protocol):
    """This rank's part of each matrix of a module."""

    names: ShardedNames | None
    """The parameters before sharding; None: the module is not sharded."""
    shown: str
    """Sharding as text for logs; empty: not sharded."""
    reason: str
    """Why this strategy; empty: the configuration asked for it."""

    def mode_for(self, module: nn.Module) -> MatrixMode:
        """The strategy that will shard the module's matrices.

        Raises:
            ValueError: the model has no form over the mesh.
        """
        ...

    def divide(self, module: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        """Replaces the module's matrices by this rank's blocks. No communication.

        Returns:
            A map from the module's former parameters to the parameters that hold their values now.

        Raises:
            ValueError: the model cannot be sharded; it may be sharded partly.
        """
        ...

    def check_same_values(self) -> None:
        """Raises DisagreementError unless all ranks had the same model before sharding."""
        ...

    def num_elements(self, params: Iterable[nn.Parameter]) -> int:
        """Elements of the full parameters behind ``params`` of the module."""
        ...

    def left_out(self, params: SortedParams) -> list[int]:
        """Ids of parameters whose gradients another rank counts in the norm."""
        ...

    def total(self, squares: float) -> float:
        """Sum of ``squares`` over all blocks, in a fixed order and with the same bits on all ranks."""
        ...

    def calls(self, meet: Callable[[], object]) -> Calls:
        """How ranks share calls of the sharded module; ``meet``: ``Runtime.meet_ranks``."""
        ...

    def undo(self) -> None:
        """Undoes :meth:`divide` as far as possible, after a start that failed before parameters moved into chunks."""
        ...

    def close(self) -> None:
        """Ends the communication between blocks (see :meth:`ShardedMatrices.close`)."""
        ...


class WholeMatrices:
    """Replicated matrices: each rank has whole ones."""

    names: ShardedNames | None = None
    shown = ""
    reason = ""

    def mode_for(self, module: nn.Module) -> MatrixMode:
        """A value without effect, since nothing is sharded."""
        return MatrixMode.TWO

    def divide(self, module: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        """Replaces nothing."""
        return {}

    def check_same_values(self) -> None:
        """Does nothing: the first rank's values are sent to all."""

    def num_elements(self, params: Iterable[nn.Parameter]) -> int:
        """Elements of ``params``."""
        return sum(param.numel() for param in params)

    def left_out(self, params: SortedParams) -> list[int]:
        """An empty list."""
        return []

    def total(self, squares: float) -> float:
        """Returns ``squares``."""
        return squares

    def calls(self, meet: Callable[[], object]) -> Calls:
        """Unshared calls."""
        return OwnCalls()

    def undo(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


class ShardedMatrices:
    """Shards a Hugging Face model in place by one of the strategies of ``matrix_strategies.py``. Collective over the
    mesh.

    The module's parameters become this rank's blocks. They are ordinary parameters, whose chunks are shared by the
    ranks with the same blocks. Each rank is called with whole batches and computes its row's samples, or its tokens of
    all samples.

    A product sends panels of its weight's view of the chunk, which the module's hook has acquired from any tier. So
    ranks of a mesh may keep different chunks on their devices and replay different plans. Only their products must
    match.

    Args:
        config: whose ``tensor_parallel`` names the strategy.
        mesh: of the run.
    """

    def __init__(self, config: Config, mesh: MeshRanks):
        self._config, self._mesh = config, mesh
        self._group = MeshGroup.of_ranks(mesh)
        self._chosen: ChosenWay | None = None
        self._module: nn.Module | None = None
        self.names: ShardedNames | None = None
        self._digests = ""

    @property
    def chosen(self) -> ChosenWay:
        """The strategy; raises RuntimeError before :meth:`divide`."""
        if self._chosen is None:
            raise RuntimeError("a module's matrices are not divided yet")
        return self._chosen

    @property
    def shown(self) -> str:
        """See :class:`Matrices`."""
        return f"matrices divided {self.chosen.way.shown}"

    @property
    def reason(self) -> str:
        """See :class:`Matrices`."""
        return self.chosen.reason

    def mode_for(self, module: nn.Module) -> MatrixMode:
        """See :class:`Matrices`."""
        model = find_model(module) or module
        way = choose_way(self._config, self._mesh, self._group, model).way
        way.check(model)
        return way.mode

    def divide(self, module: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        """See :class:`Matrices`. Frees the memory of replaced parameters."""
        model = find_model(module) or module
        if any(isinstance(child, Layer2D) for child in model.modules()):
            raise ValueError(
                f"{type(model).__name__} has blocks of its matrices, which an engine that was closed has left; build "
                "the model again, and load what that engine's state_dict() gave, or a checkpoint"
            )
        find_aliases(module, [param for param in module.parameters() if param.requires_grad])
        sharded = set(model.parameters())
        others = [name for name, param in module.named_parameters() if param not in sharded]
        if others:
            raise ValueError(
                f"{type(module).__name__} has parameters beside those of its {type(model).__name__}, whose matrices "
                f"were to be divided ({others[0]}); put them into one model of Hugging Face, or leave tensor_parallel "
                "out"
            )
        if self._config.use_cpu_embedding:
            logger.info("use_cpu_embedding: tables that ranks share are sharded over them, and stay in chunks")
        before = dict(module.named_parameters(remove_duplicate=False))
        values = attached_values(module)
        draw_adapters(module)
        self._digests = "; ".join(f"{name} {_digest(param)}" for name, param in module.named_parameters())
        self._chosen = choose_way(self._config, self._mesh, self._group, model)
        way = self._chosen.way
        self._module = module
        way.divide(model)
        self.names = ShardedNames.of(module, model, before, way.group)
        divide_attached_values(module, self.names, values)
        replaced = {before[name]: part.param for part in self.names.parts for name in part.sources}
        for old, new in replaced.items():
            if old is not new and not old.is_meta:
                old.data = old.new_empty(0)
        return replaced

    def check_same_values(self) -> None:
        """See :class:`Matrices`. Values on the meta device come from the same files on all ranks."""
        self._mesh.world_group.check_agreement("the model's values before it is divided", self._digests)

    def num_elements(self, params: Iterable[nn.Parameter]) -> int:
        """See :class:`Matrices`."""
        parts = {} if self.names is None else self.names.of_params
        return sum(math.prod(shape) for param in params for shape in parts[param].shapes.values())

    def left_out(self, params: SortedParams) -> list[int]:
        """Replicated parameters are counted by the first rank that has them."""
        parts, place = {} if self.names is None else self.names.of_params, self.chosen.way.group.place
        return [i for i, spec in enumerate(params.chunked) if not parts[spec.param].placement.is_first_at(place)]

    def total(self, squares: float) -> float:
        """See :class:`Matrices`. One exchange."""
        what = "the gradients' norm over the mesh"
        said = self._mesh.world_group.control.exchange(_SQUARES.pack(squares), what)
        blocks = self._mesh.mesh.sharing(0, Axis.ROWS, Axis.COLUMNS)  # the first rank of each block
        with reading(what):
            return sum(_SQUARES.unpack(said[rank])[0] for rank in blocks)

    def calls(self, meet: Callable[[], object]) -> Calls:
        """Calls with whole batches, the same on all ranks."""
        self._group.meet_before_messages(meet)
        return self.chosen.way.calls(self._mesh)

    def undo(self) -> None:
        """Does nothing: blocks have replaced the module's matrices."""

    def close(self) -> None:
        """See :class:`Matrices`. Sharding is not undone: the module keeps this rank's blocks without communication.

        From then on its calls and its ``state_dict`` raise StateError and name the remedy. Before closing, the engine's
        ``state_dict``, checkpoints and exports give full tensors.
        """
        if self._module is not None:
            for child in self._module.modules():
                child.register_forward_pre_hook(_refuse_call, prepend=True)
                child.register_state_dict_pre_hook(_refuse_state)


def _refuse_call(module: nn.Module, args: object) -> None:
    raise _C.StateError(_left(module, "be called"))


def _refuse_state(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    raise _C.StateError(_left(module, "give whole values"))


def _left(module: nn.Module, what: str) -> str:
    return (
        f"{type(module).__name__} has this rank's blocks of matrices, and the engine that shared them is closed, so it "
        f"cannot {what}; before closing read engine.state_dict(), whose tensors are whole, or save a checkpoint, or "
        "engine.export_weights(path), and load that into a model that is built anew"
    )


def make_matrices(config: Config, mesh: MeshRanks) -> Matrices:
    """The matrices that the configuration asks for. Collective over all ranks."""
    if config.expert_parallel.size > 1:
        return ShardedExperts(mesh, config.expert_parallel.size)
    return ShardedMatrices(config, mesh) if config.tensor_parallel.num_ranks > 1 else WholeMatrices()


def _digest(param: nn.Parameter) -> str:
    data = param.detach()
    return f"{list(data.shape)} " + ("without values" if data.is_meta else digest(data.contiguous().view(-1)))
