"""Random number generator states of a run, as tensors: PyTorch's on the CPU and GPU, NumPy's global one if NumPy is
loaded, and Python's.
"""

from __future__ import annotations

import functools
import random
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from patrickstar import _C
from patrickstar.checkpoint.errors import CheckpointError


def rng_states(device: torch.device) -> dict[str, torch.Tensor]:
    """States by generator: ``torch``, ``cuda`` (of ``device``), ``numpy``, ``python``."""
    with _C.HostAllocations():
        states = {"torch": torch.get_rng_state(), "python": _python_state()}
        if device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(device)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            name, key, position, has_gauss, gauss = numpy.random.get_state()
            if name == "MT19937":
                states["numpy"] = _integers([*map(int, key), position, has_gauss, _bits(gauss)])
        return states


def kept_rng_states(device: torch.device) -> Callable[[], None]:
    """A function that sets the generators of :func:`rng_states` to their present states, in this process alone. It
    takes microseconds where the tensors take a millisecond.
    """
    numpy = sys.modules.get("numpy")
    with _C.HostAllocations():
        restores: list[Callable[[], object]] = [
            functools.partial(torch.set_rng_state, torch.get_rng_state()),
            functools.partial(random.setstate, random.getstate()),
        ]
        if device.type == "cuda":
            restores.append(functools.partial(torch.cuda.set_rng_state, torch.cuda.get_rng_state(device), device))
        if numpy is not None:
            restores.append(functools.partial(numpy.random.set_state, numpy.random.get_state()))

    def restore() -> None:
        for call in restores:
            call()

    return restore


def set_rng_states(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Sets the result of :func:`rng_states`. A generator that ``states`` or this process lacks is unchanged.

    Raises:
        CheckpointError: a state does not fit its generator.
    """
    setters: dict[str, Callable[[torch.Tensor], None]] = {"torch": torch.set_rng_state, "python": _set_python_state}
    if device.type == "cuda":
        setters["cuda"] = lambda state: torch.cuda.set_rng_state(state, device)
    if "numpy" in states:
        setters["numpy"] = _set_numpy_state
    for name, setter in setters.items():
        if name in states:
            try:
                setter(states[name])
            except (ImportError, RuntimeError, TypeError, ValueError, OverflowError) as error:
                raise CheckpointError(f"the state of the random numbers of {name} cannot be set: {error}") from error


def _python_state() -> torch.Tensor:
    version, key, gauss = random.getstate()
    return _integers([version, *key, gauss is not None, _bits(gauss or 0.0)])


def _set_python_state(state: torch.Tensor) -> None:
    version, *key, has_gauss, gauss = state.tolist()
    random.setstate((version, tuple(key), _double(gauss) if has_gauss else None))


def _set_numpy_state(state: torch.Tensor) -> None:
    import numpy as np

    *key, position, has_gauss, gauss = state.tolist()
    np.random.set_state(("MT19937", np.array(key, dtype=np.uint32), position, has_gauss, _double(gauss)))


def _integers(values: list[Any]) -> torch.Tensor:
    return torch.tensor([int(value) for value in values], dtype=torch.int64, device="cpu")


def _bits(value: float) -> int:
    return struct.unpack("<q", struct.pack("<d", value))[0]


def _double(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<q", bits))[0]
