"""prove-memory: each allocation of the core and of PyTorch's tensors fails once, or from then on until the call ends.

The calls are the engine's opening, forward, backward, step, save, load and closing. The process preloads
proofs/failing_memory.cpp. A call that failed is made again, and must succeed with the bits of a run without failures;
a backward that had updated something is refused until a checkpoint is loaded. A closing that fails is not repeated: it
raises, and each parameter has its values or no elements. Nothing ends the process, and no thread and no activation
memory is left.

Not covered: allocations of Python objects, and those of the core's bindings while a thread holds the GIL.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from patrickstar import StateError
from patrickstar.runtime import initialize_engine
from patrickstar.session.wholeness import Wholeness
from proofs.cases import Case, Planted, Points, Proof, Setting, replaced
from proofs.failing_allocations import SCENARIOS, STEPS_BEFORE, Failing, Kinds, Net, Never, Run
from proofs.preloaded import preload
from tests.bits import first_difference
from tests.lifetimes import settled_num_threads

OF_STEPS = ("forward", "backward", "step")
OF_SAVES = ("save", "load")
STEPS_PER_RUN = 24
ALL = Kinds.NEW | Kinds.MAP | Kinds.MALLOC | Kinds.TENSOR | Kinds.THREAD
WAYS = {"once": False, "from there on": True}


def training(scenario: str, calls: tuple[str, ...], and_on: bool) -> Callable[[Setting], Points]:
    """Points: allocations in steps of training, or in a save and a load after each."""

    def points(setting: Setting) -> Points:
        kinds = ALL if calls == OF_STEPS else ALL & ~Kinds.THREAD
        failing, number = Failing(calls, kinds=kinds, and_on=and_on), 0
        while not failing.is_over:
            number += 1
            run, step = Run(scenario, setting.folder / f"run {number}"), 0
            while step < STEPS_PER_RUN and not failing.is_over:
                before = failing.num_failed
                setting.note(f"step {step}: {failing}")
                run.step(step, Never() if step < STEPS_BEFORE else failing)
                step += 1
                setting.tried(max(failing.num_failed - before - 1, 0))
                if failing.num_failed > before:
                    yield None
            actual = run.end()
            expected = Run(scenario, setting.folder / f"expected {number}")
            for index in range(step):
                expected.step(index, Never())
            yield first_difference(actual, expected.end(), f"run {number}")

    return points


def lifetimes(and_on: bool) -> Callable[[Setting], Points]:
    """Points: allocations while an engine opens, and while it closes."""

    def points(setting: Setting) -> Points:
        batch = torch.randint(0, 31, (2, 4), generator=torch.Generator().manual_seed(1))

        def opened() -> Any:
            torch.manual_seed(1)
            return initialize_engine(Net, 0, SCENARIOS["scarce"])

        failing, threads = Failing(("open", "close"), kinds=ALL, and_on=and_on), 0
        expected: Any = None
        while not failing.is_over:
            before = failing.num_failed
            setting.note(f"{failing}")
            engine, now = None, failing if expected is not None else Never()
            with contextlib.suppress(MemoryError, RuntimeError, OSError), now.one_of("open"):
                engine, optimizer = opened()
            if engine is None:
                engine, optimizer = opened()
            loss = engine(batch)
            engine.backward(loss)
            optimizer.step()
            result = [loss.item(), engine.state_dict()]
            del loss
            is_whole = True
            try:
                with now.one_of("close"):
                    engine.close()
            except (MemoryError, RuntimeError):
                is_whole = False
                engine.close()
            restored = {name: value.clone() for name, value in engine.module.state_dict().items() if value.numel()}
            expected = expected or (result, restored)
            difference = first_difference(result, expected[0], "an engine")
            if is_whole:
                difference = difference or first_difference(restored, expected[1], "a closed engine's module")
            else:  # a parameter has its values, or no elements
                difference = difference or first_difference(restored, {name: expected[1][name] for name in restored})
            del engine, optimizer
            gc.collect()  # tracebacks held engines that did not open or close
            present = settled_num_threads() if failing.num_failed % 16 == 0 else threads
            threads = threads or present
            if failing.num_failed > before:
                setting.tried(failing.num_failed - before - 1)
            yield difference or (f"{present} threads, {threads} before" if present > threads else None)

    return points


def planted() -> Iterator[Planted]:
    """Bugs in what handles failures of memory."""
    from patrickstar.engine.engine import Engine
    from patrickstar.engine.optim import HybridAdam

    def swallowing(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapped(*arguments: Any, **options: Any) -> Any:
            try:
                return call(*arguments, **options)
            except (MemoryError, RuntimeError):
                return None

        return wrapped

    for name, owner, call in (
        ("a step that failed says nothing", HybridAdam, "step"),
        ("a backward that failed says nothing", Engine, "backward"),
    ):
        bug = functools.partial(replaced, owner, call, swallowing(getattr(owner, call)))
        yield Planted(name, "training, settled, once", bug)
    for call in ("save_checkpoint", "load_checkpoint"):
        bug = functools.partial(replaced, Engine, call, swallowing(getattr(Engine, call)))
        yield Planted(f"a failed {call} says nothing", "saves and loads, scarce, once", bug)

    held: list[Exception] = []

    @functools.wraps(Engine.backward)
    def keeping(self: Engine, *arguments: Any) -> Any:
        try:
            return backward(self, *arguments)
        except (MemoryError, RuntimeError) as error:
            held.append(error)
            raise

    backward = Engine.backward
    yield Planted("memory of a failed backward stays in use", "training, host, once",
                  functools.partial(replaced, Engine, "backward", keeping))  # fmt: skip
    yield Planted("a closing that failed says nothing", "opening and closing, once",
                  functools.partial(replaced, Engine, "close", swallowing(Engine.close)))  # fmt: skip
    yield Planted("a half-updated model trains on", "training, commit, once",
                  lambda: replaced(Wholeness, "check", lambda self, *_: None))  # fmt: skip


PROOF = Proof(
    name="memory",
    claim="An allocation that fails is an error of its call; the call, made again, has the bits of a run without it.",
    points="failing allocations",
    cases=[
        *(
            Case(f"training, {scenario}, {way}", training(scenario, OF_STEPS, and_on))
            for way, and_on in WAYS.items()
            for scenario in SCENARIOS
        ),
        *(
            Case(f"saves and loads, {scenario}, {way}", training(scenario, OF_SAVES, and_on))
            for way, and_on in WAYS.items()
            for scenario in ("scarce", "disk")
        ),
        *(Case(f"opening and closing, {way}", lifetimes(and_on)) for way, and_on in WAYS.items()),
    ],
    planted=list(planted()),
    environment=lambda: preload("proofs/failing_memory.cpp"),
)
_ = StateError
