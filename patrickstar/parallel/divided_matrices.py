"""Matrices that several ranks share: an engine's part of it (`tensor_parallel` in the configuration).

    matrices = make_matrices(config, mesh)
    replaced = matrices.divide(module)             # before its parameters go into chunks
    ...
    total = matrices.total(squares)                # of gradients, over blocks

A model of Hugging Face is divided in place, in one way or another (:mod:`patrickstar.parallel.matrix_ways`): its
parameters are this rank's blocks from then on, ordinary ones that go into chunks of the ranks with the same blocks.
Each rank is called with whole batches, and computes the samples of its row, or its tokens of all samples.

[Note: panels out of chunks] A product sends panels of its weight's view of the chunk, which the module's hook has
acquired, wherever the chunk was before. So ranks of a mesh may keep other chunks on their devices, and replay other
plans: what they must do alike are the products, which the model does.

[Note: what a division undoes] Nothing. When the engine is closed the module keeps this rank's blocks in layers that
have nobody to talk to, so that its calls and its ``state_dict`` raise from then on, and say what to do: what is wanted
of it is saved, exported or read by the engine's ``state_dict``, whose tensors are whole, before.
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
from patrickstar.parallel.divided_values import DividedNames, divide_attached_values
from patrickstar.parallel.matrix_ways import ChosenWay, choose_way
from patrickstar.ranks.mesh import Axis, MeshRanks
from patrickstar.ranks.messages import reading
from patrickstar.sequence.hugging_face import find_model
from patrickstar.tensor2d import Layer2D, MeshGroup, Split

logger = logging.getLogger("patrickstar")

_SQUARES = struct.Struct("<d")


class Matrices(Protocol):
    """Which part of each matrix this rank has."""

    names: DividedNames | None
    """Of the parameters that the module had before; None: it has them."""
    shown: str
    """Over what they are divided, for people; empty: they are not."""
    reason: str
    """Why so; empty: it was asked for."""

    def mode_for(self, module: nn.Module) -> MatrixMode:
        """How the module's matrices will be divided.

        Raises:
            ValueError: there is no plan for the model.
        """
        ...

    def divide(self, module: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        """Replaces the module's matrices by this rank's blocks. Speaks to no other rank.

        Returns:
            The parameters that the module had, and those that have their values now.

        Raises:
            ValueError: the model cannot be divided; it may be divided in part then.
        """
        ...

    def check_same_values(self) -> None:
        """All ranks had the same model before they divided it, or raise DisagreementError."""
        ...

    def num_elements(self, params: Iterable[nn.Parameter]) -> int:
        """Of the whole parameters of which ``params`` of the module have this rank's part."""
        ...

    def left_out(self, params: SortedParams) -> list[int]:
        """Ids of parameters whose gradients another rank counts in the norm."""
        ...

    def total(self, squares: float) -> float:
        """The sum over all blocks, in one order and with the same bits on all ranks, of what the ranks of each have."""
        ...

    def calls(self, meet: Callable[[], object]) -> Calls:
        """How ranks share calls of the divided module; ``meet``: [Note: ranks that meet]."""
        ...

    def close(self) -> None:
        """The ranks talk to each other no more ([Note: what a division undoes])."""
        ...


class WholeMatrices:
    """Each rank has whole ones."""

    names: DividedNames | None = None
    shown = ""
    reason = ""

    def mode_for(self, module: nn.Module) -> MatrixMode:
        """Nothing is divided."""
        return MatrixMode.TWO

    def divide(self, module: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        """Nothing is replaced."""
        return {}

    def check_same_values(self) -> None:
        """They are the first rank's in any case."""

    def num_elements(self, params: Iterable[nn.Parameter]) -> int:
        """Their own."""
        return sum(param.numel() for param in params)

    def left_out(self, params: SortedParams) -> list[int]:
        """None."""
        return []

    def total(self, squares: float) -> float:
        """It is that."""
        return squares

    def calls(self, meet: Callable[[], object]) -> Calls:
        """Each rank has its own."""
        return OwnCalls()

    def close(self) -> None:
        """They are as before."""


class DividedMatrices:
    """See the module's docstring. All ranks of the mesh make one at the same point.

    Args:
        config: whose ``tensor_parallel`` says how.
        mesh: of the run.
    """

    def __init__(self, config: Config, mesh: MeshRanks):
        self._config, self._mesh = config, mesh
        self._group = MeshGroup.of_ranks(mesh)
        self._chosen: ChosenWay | None = None
        self._module: nn.Module | None = None
        self.names: DividedNames | None = None
        self._digests = ""

    @property
    def chosen(self) -> ChosenWay:
        """The way; raises RuntimeError before :meth:`divide`."""
        if self._chosen is None:
            raise RuntimeError("a module's matrices are not divided yet")
        return self._chosen

    @property
    def shown(self) -> str:
        """See :class:`Matrices`."""
        return self.chosen.way.shown

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
        """See :class:`Matrices`; the memory of what is replaced is free afterwards."""
        model = find_model(module) or module
        if any(isinstance(child, Layer2D) for child in model.modules()):
            raise ValueError(
                f"{type(model).__name__} has blocks of its matrices, which an engine that was closed has left; build "
                "the model again, and load what that engine's state_dict() gave, or a checkpoint"
            )
        find_aliases(module, [param for param in module.parameters() if param.requires_grad])
        divided = set(model.parameters())
        others = [name for name, param in module.named_parameters() if param not in divided]
        if others:
            raise ValueError(
                f"{type(module).__name__} has parameters beside those of its {type(model).__name__}, whose matrices "
                f"were to be divided ({others[0]}); put them into one model of Hugging Face, or leave tensor_parallel "
                "out"
            )
        if self._config.use_cpu_embedding:
            logger.info("use_cpu_embedding: tables that ranks share are divided over them, and stay in chunks")
        before = dict(module.named_parameters(remove_duplicate=False))
        values = attached_values(module)
        draw_adapters(module)
        self._digests = "; ".join(f"{name} {_digest(param)}" for name, param in module.named_parameters())
        self._chosen = choose_way(self._config, self._mesh, self._group, model)
        way = self._chosen.way
        self._module = module
        way.divide(model)
        self.names = DividedNames.of(module, model, before, way.group)
        divide_attached_values(module, self.names, values)
        replaced = {before[name]: part.param for part in self.names.parts for name in part.sources}
        for old in replaced:
            if not old.is_meta:
                old.data = old.new_empty(0)
        return replaced

    def check_same_values(self) -> None:
        """See :class:`Matrices`; values on the meta device are those of the same files."""
        self._mesh.everybody.check_agreement("the model's values before it is divided", self._digests)

    def num_elements(self, params: Iterable[nn.Parameter]) -> int:
        """See :class:`Matrices`."""
        parts = {} if self.names is None else self.names.of_params
        return sum(math.prod(shape) for param in params for shape in parts[param].shapes.values())

    def left_out(self, params: SortedParams) -> list[int]:
        """Those that all rows have, but in the first of them."""
        if self.chosen.way.group.place.row == 0 or self.names is None:
            return []
        parts = self.names.of_params
        return [i for i, spec in enumerate(params.chunked) if parts[spec.param].placement.split is Split.COLUMNS]

    def total(self, squares: float) -> float:
        """See :class:`Matrices`. One exchange."""
        what = "the gradients' norm over the mesh"
        said = self._mesh.everybody.control.exchange(_SQUARES.pack(squares), what)
        blocks = self._mesh.mesh.sharing(0, Axis.ROWS, Axis.COLUMNS)  # of the first ranks that have them
        with reading(what):
            return sum(_SQUARES.unpack(said[rank])[0] for rank in blocks)

    def calls(self, meet: Callable[[], object]) -> Calls:
        """Of whole batches, which are the same on all ranks."""
        self._group.meet_before_messages(meet)
        return self.chosen.way.calls(self._mesh)

    def close(self) -> None:
        """See :class:`Matrices`."""
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
    """What the configuration asks for. All ranks call it at the same point."""
    return DividedMatrices(config, mesh) if config.tensor_parallel.num_ranks > 1 else WholeMatrices()


def _digest(param: nn.Parameter) -> str:
    data = param.detach()
    return f"{list(data.shape)} " + ("without values" if data.is_meta else digest(data.contiguous().view(-1)))
