"""Opening of a session, and its change to other ranks: core, parameters in chunks, parts in the module.

Order: :func:`make_session`, then the parameters move into chunks, then :func:`complete`. A resize calls
:func:`evict_all` and :func:`reopen`. Whatever fails after :func:`make_session`, ``closing.abandon_session`` restores
the module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

from torch import nn

from patrickstar import _C
from patrickstar.config import Config
from patrickstar.machine.budgets import Budgets
from patrickstar.module.adoption import AdoptedParams
from patrickstar.module.materialize import DeferredInit
from patrickstar.module.observer import Observer
from patrickstar.parallel.sharded_matrices import Matrices
from patrickstar.planning.step_plan import Plan
from patrickstar.ranks.chunk_ranks import ChunkRanks
from patrickstar.ranks.mesh import MeshRanks
from patrickstar.session.background_save import BackgroundSave
from patrickstar.session.core_setup import AllEvicted, build_core
from patrickstar.session.kept_plan import adopt_plan
from patrickstar.session.quiet_log import NoRunLog
from patrickstar.session.registry import note_open_session
from patrickstar.session.session import Session
from patrickstar.session.session_parts import build_parts
from patrickstar.session.wholeness import Wholeness


def make_session(
    module: nn.Module,
    config: Config,
    mesh: MeshRanks,
    chunk_ranks: ChunkRanks,
    matrices: Matrices,
    budgets: Budgets,
    in_groups: Collection[nn.Parameter],
    deferred: DeferredInit | None,
) -> Session:
    """A session with a core; nothing of ``module`` is changed yet.

    Args:
        module: the user's.
        config: checked.
        mesh: the ranks that train together.
        chunk_ranks: the ranks that share chunks with this one.
        matrices: this rank's part of each matrix.
        budgets: of memory.
        in_groups: the optimizer's parameters at first. Gradients of other parameters are dropped.
        deferred: initialises parameters on the meta device.

    Raises:
        MemoryBudgetError: the model cannot fit the budgets.
    """
    session = Session(module, config, mesh, chunk_ranks, matrices, in_groups)
    _open_core(session, budgets, None, deferred)
    note_open_session(session)
    return session


def _open_core(
    session: Session,
    budgets: Budgets,
    chunk_numel: int | None,
    deferred: DeferredInit | None,
    kept_memory: _C.KeptRegions | None = None,
) -> None:
    core = build_core(
        session.module,
        session.plan_of_params,
        session.config,
        session.ranks.context,
        session.chunk_ranks,
        budgets,
        chunk_numel,
        kept_memory,
    )
    teardown = session.teardown
    teardown.callback(session.matrices.close)
    teardown.callback(core.segments.close)
    teardown.callback(core.runtime.close)
    observer = Observer(core.runtime)
    params = AdoptedParams(session.plan_of_params, core.layout, core.runtime, observer, session.device, deferred)
    session.set_core(core, params, observer)
    teardown.callback(params.release)


def complete(session: Session, saved_plan: Plan | None) -> None:
    """Builds the parts once all parameters are in chunks. From then on the module is used in place.

    Args:
        session: with a core.
        saved_plan: the first step's plan, the same on all ranks; None: the plan kept from an earlier run like this one.
    """
    session.set_parts(build_parts(session, session.teardown, session.core.largest_module_bytes))
    session.teardown.callback(session.saves.wait)  # before the core's memory goes
    if saved_plan is not None:
        adopt_plan(session.runtime, session.parts.recompute_choice, saved_plan)


def evict_all(session: Session, set_aside: Callable[[], _C.KeptRegions]) -> AllEvicted:
    """Closes the core and everything that depends on the present ranks. Collective over all ranks.

    The module's parameters have no memory until :func:`reopen`.

    Args:
        session: between two steps.
        set_aside: called last before the core closes; returns the core's memory that the next core may use.
    """
    session.saves.wait()
    session.saves = BackgroundSave()
    session.kept_plan.close()
    session.plan_of_params = session.params_now()
    memory = set_aside()
    former = session.params.evict_all()
    session.evicted = AllEvicted(former, memory, session.core.segments.keep())
    session.teardown.close()
    session.ranks.close()
    return session.evicted


def suspend(session: Session, error: BaseException) -> None:
    """Closes the core at any point of a step, or of a change of ranks, because of ``error``. Waits for no other rank.

    All values are dropped: the module's parameters have no memory until :meth:`reopen`.
    """
    session.ranks.fail(error)
    session.saves.wait()
    session.saves = BackgroundSave()
    if session.evicted is None:
        session.kept_plan.close()
        session.plan_of_params = session.params_now()
        former = session.params.evict_all()
        session.evicted = AllEvicted(former, _C.KeptRegions(), session.core.segments.keep())
    elif not session.teardown.is_empty:  # within `reopen`
        session.params.take_back()
        kept = dataclasses.replace(session.evicted, memory=_C.KeptRegions(), segments=session.core.segments.keep())
        session.evicted = kept
    session.teardown.close()
    session.ranks.leave(error)
    session.unfinished = None
    session.whole = Wholeness()


def reopen(
    session: Session,
    mesh: MeshRanks,
    chunk_ranks: ChunkRanks,
    matrices: Matrices,
    budgets: Budgets,
    chunk_numel: int,
    all_evicted: AllEvicted,
    expect: Callable[[], None],
    fill: Callable[[], None],
) -> None:
    """Opens a core with other ranks after :func:`evict_all`. Collective over the new ranks.

    Args:
        expect: gives the new core the accesses of the coming step, so that states get their tiers before they arrive.
        fill: writes the values of all parameters.
    """
    session.set_ranks(mesh, chunk_ranks, matrices)
    _open_core(session, budgets, chunk_numel, None, all_evicted.memory)
    all_evicted.segments.close()
    expect()
    session.params.take_over(all_evicted.params, fill)
    complete(session, None)
    session.course.end()
    session.optimizer.tell_groups()
    session.run_log = session.run_log if session.ranks.context.rank == 0 else NoRunLog()
    session.run_log.change_ranks()
    session.evicted = None
