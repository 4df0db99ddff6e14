"""First calls of Triton's kernels, which try configurations: chosen ones, compiled by all cores at once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any


@contextlib.contextmanager
def tuned(preferred: Callable[[Any], bool]) -> Iterator[None]:
    """Kernels that are called meanwhile keep ``preferred`` configurations, all if there are none.

    Does nothing without Triton 3.6, whose interpreter tries none.
    """
    try:
        from triton import knobs
        from triton.runtime._async_compile import AsyncCompileMode
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        yield
        return
    own = Autotuner.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.configs = [config for config in self.configs if preferred(config)] or self.configs
        if knobs.runtime.interpret:
            self.configs = self.configs[:1]
        else:
            given = {name: value for name, value in kwargs.items() if name != "warmup"}
            with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool, ignore_errors=True):
                self.warmup(*args, **given)
        return own(self, *args, **kwargs)

    Autotuner.run = run
    try:
        yield
    finally:
        Autotuner.run = own
