"""Lets allocations of the core fail one after the other. A run that repeats the failed call has the bits of a run
without failures.

``make prove-memory`` runs this with proofs/failing_memory.cpp preloaded. In each step one allocation of forward, one of
backward and one of the optimizer's step fails, each ``stride`` further than in the step before.
"""

from __future__ import annotations

import collections
import ctypes
import enum
import gc
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from patrickstar import _C, StateError
from patrickstar.runtime import initialize_engine

TOKENS = 31
STEPS_BEFORE = 2


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 2 * hidden)
        self.down = nn.Linear(2 * hidden, hidden)

    def forward(self, x):
        """The layer's output."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """A small model; its forward gives the loss."""

    def __init__(self, hidden=32):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, hidden)
        self.blocks = nn.Sequential(*(Block(hidden) for _ in range(3)))
        self.head = nn.Linear(hidden, TOKENS)

    def forward(self, tokens):
        """The mean loss."""
        logits = self.head(self.blocks(self.embed(tokens)))
        return F.cross_entropy(logits.float().flatten(0, 1), tokens.roll(-1).flatten())


def config(*, on_device=True, speculation="auto", **more):
    """An engine's configuration."""
    return {
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 2e-3, "weight_decay": 0.01, "use_hybrid_adam": on_device},
            "speculation": speculation,
        },
        "default_chunk_size": 2048,
        **more,
    }


BF16 = {"bf16": {"enabled": True}}
ON_HOST = {"on_device": False, **BF16}
SCENARIOS = {
    "device": config(**BF16),
    "scarce": config(device_memory=110_000),
    "host": config(on_device=False),
    "ahead": config(speculation="always", **ON_HOST),
    "settled": config(speculation="always", gradient_clipping=0.05, **ON_HOST),
    "commit": config(speculation="commit", **ON_HOST),
    "commit on device": config(speculation="commit", **BF16),
    "disk": config(on_device=False, device_memory=200_000, host_memory=200_000),
}


class Run:
    """A run in which calls whose allocations failed are made again."""

    def __init__(self, scenario: str, folder: Path):
        options = dict(SCENARIOS[scenario])
        if scenario == "disk":
            (folder / "disk").mkdir(parents=True, exist_ok=True)
            options["disk_memory"] = {"path": str(folder / "disk"), "size": "1GiB", "io": "threads"}
        torch.manual_seed(1)
        self.engine, self.optimizer = initialize_engine(Net, 0, options)
        self.checkpoint = folder / "checkpoint" if options["optimizer"]["speculation"] == "commit" else None
        self._folder = folder
        self.losses: list[str] = []
        self.outcomes: collections.Counter[str] = collections.Counter()

    def step(self, step: int, failing: Failing) -> None:
        """One step; step n has the same batch in each run."""
        batch = torch.randint(0, TOKENS, (2, 4), generator=torch.Generator().manual_seed(step))
        if self.checkpoint is not None:
            self.engine.save_checkpoint(self.checkpoint, tag="last")
        loss = self._repeat("forward", failing, lambda: self.engine(batch))
        self.losses.append(loss.item().hex())
        self._repeat("backward", failing, lambda: self.engine.backward(loss), lambda: self._redo(batch))
        self._repeat("step", failing, self.optimizer.step)
        self.optimizer.zero_grad()
        if failing.counts("save"):
            self._save_and_load(failing)
        states = {
            self.engine._session.runtime.chunk_state(chunk) for chunk in range(self.engine.report()["num_chunks"])
        }
        assert states <= {"HOLD", "FREE"}, states

    def _repeat(self, what: str, failing: Failing, call, again=None):
        try:
            with failing.one_of(what):
                return call()
        except (MemoryError, RuntimeError):
            pass
        try:
            result, outcome = (again or call)(), "repeated"
        except StateError as error:
            assert "had been updated" in str(error), error
            self.engine.load_checkpoint(self.checkpoint)
            result, outcome = (again or call)(), "refused until a checkpoint was loaded"
        self.outcomes[f"{what} {outcome}"] += 1
        return result

    def _save_and_load(self, failing: Failing) -> None:
        folder = self._folder / "saves"
        for what, call in (("save", self.engine.save_checkpoint), ("load", self.engine.load_checkpoint)):
            try:
                with failing.one_of(what):
                    call(folder, "last")
            except (MemoryError, RuntimeError):
                call(folder, "last")
                self.outcomes[f"{what} repeated"] += 1

    def _redo(self, batch):
        self.optimizer.zero_grad()
        self.engine.backward(self.engine(batch))

    def end(self):
        """Closes the engine; losses and states."""
        gc.collect()  # tracebacks hold tensors
        report = self.engine.report()
        assert report["num_steps"] == self.engine._session.num_steps == len(self.losses)
        assert report["device_activation_bytes"] == 0  # failed allocations are not counted
        state = {"model": self.engine.state_dict(), "optimizer": self.optimizer.state_dict()["state"]}
        self.engine.close()
        return self.losses, state


class Kinds(enum.IntFlag):
    """Allocations, as in proofs/failing_memory.cpp."""

    NEW = 1
    MAP = 2
    MALLOC = 4
    TENSOR = 8
    THREAD = 16


class Failing:
    """Makes one allocation fail within a block, the next one each time, until there are no more. With ``and_on`` all
    later ones of the block fail too.
    """

    def __init__(self, calls, *, kinds: Kinds = Kinds.NEW, and_on: bool = False):
        self._process = ctypes.CDLL(None)
        self._process.fail_for.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t]
        self._process.fail_nth.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int]
        self._process.stop_failing.restype = ctypes.c_int64
        self._process.fail_for(0, *_code_of(_C.__file__))
        self._process.fail_for(1, *_code_of(str(Path(torch.__file__).parent / "lib" / "libc10.so")))
        self._kinds, self._and_on = kinds, and_on
        self._next = dict.fromkeys(calls, 1)
        self._what = ""
        self.num_failed = 0

    def __str__(self) -> str:
        return ", ".join(f"allocation {number} of {what}" for what, number in self._next.items())

    @property
    def is_over(self) -> bool:
        """True if all allocations of all calls have failed."""
        return not self._next

    def counts(self, what: str) -> bool:
        """True if allocations of this call fail."""
        return what in self._next

    def one_of(self, what: str) -> Failing:
        """The block's allocations are those of this call."""
        self._what = what
        return self

    def __enter__(self) -> None:
        if self._what in self._next:
            self._process.fail_nth(int(self._kinds), self._next[self._what], int(self._and_on))

    def __exit__(self, *_error: object) -> None:
        num_asked = self._process.stop_failing()
        if self._what in self._next:
            if num_asked < self._next[self._what]:
                del self._next[self._what]
            else:
                self._next[self._what] += 1
                self.num_failed += 1


class Never:
    """No allocation fails."""

    def counts(self, _what: str) -> bool:
        """False."""
        return False

    def one_of(self, _what: str) -> Never:
        """This."""
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_error: object) -> None:
        pass


def _code_of(library: str) -> tuple[int, int]:
    """The address range of the library's instructions."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, mode, *_, path = line.split()
        if path == library and "x" in mode:
            begin, end = addresses.split("-")
            return int(begin, 16), int(end, 16)
    raise AssertionError(f"{library} is not loaded")
