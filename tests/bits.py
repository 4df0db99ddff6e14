"""Bitwise comparison. ``torch.equal`` takes -0.0 for 0.0, NaN for different from itself, and ignores dtypes."""

import struct
from collections.abc import Mapping
from typing import Any

import torch

from patrickstar import _C

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bit patterns of the elements as integers, in the tensor's shape; a complex element is a row of two."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])


def assert_same_bits(actual: Any, expected: Any, what: str = "values") -> None:
    """Compares tensors and plain values, also nested in dicts, lists and tuples: type, dtype, shape and every bit."""
    difference = first_difference(actual, expected, what)
    assert difference is None, difference


def first_difference(actual: Any, expected: Any, what: str = "values") -> str | None:
    """The first difference as one line of text, or None."""
    if isinstance(expected, torch.Tensor) or isinstance(actual, torch.Tensor):
        return _of_tensors(actual, expected, what)
    if isinstance(expected, Mapping):
        if not isinstance(actual, Mapping) or actual.keys() != expected.keys():
            return f"{what}: the keys are {_keys(actual)}, expected {_keys(expected)}"
        pairs = [(f"{what}[{key!r}]", actual[key], expected[key]) for key in expected]
    elif isinstance(expected, (list, tuple)):
        if type(actual) is not type(expected) or len(actual) != len(expected):
            return f"{what}: {actual!r:.200}, expected {expected!r:.200}"
        pairs = [(f"{what}[{index}]", *pair) for index, pair in enumerate(zip(actual, expected, strict=True))]
    elif isinstance(expected, float) and type(actual) is type(expected):
        same = struct.pack("<d", actual) == struct.pack("<d", expected)
        return None if same else f"{what}: {actual!r} ({actual.hex()}), expected {expected!r} ({expected.hex()})"
    else:
        same = type(actual) is type(expected) and actual == expected
        return None if same else f"{what}: {actual!r}, expected {expected!r}"
    found = (first_difference(one, other, name) for name, one, other in pairs)
    return next((line for line in found if line is not None), None)


def _of_tensors(actual: Any, expected: Any, what: str) -> str | None:
    for one in (actual, expected):
        if not isinstance(one, torch.Tensor):
            return f"{what}: {actual!r:.100}, expected {expected!r:.100}"
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        return f"{what}: {actual.dtype} {tuple(actual.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
    with _C.HostAllocations(), torch.no_grad():  # not counted by a simulated device's budget
        pairs = [(tensor, bits(tensor)) for tensor in (_on_host(actual), _on_host(expected))]
        differing = pairs[0][1] != pairs[1][1]
        places = (differing.any(-1) if actual.is_complex() else differing).nonzero()
        if not len(places):
            return None
        place = tuple(places[0].tolist())
        shown = [
            f"{values[place].item()!r} ({', '.join(map(hex, patterns[place].flatten().tolist()))})"
            for values, patterns in pairs
        ]
        return (
            f"{what}: {len(places)} of {actual.numel()} elements differ, first {list(place)}: {shown[0]}, expected "
            f"{shown[1]}"
        )


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copies: a parameter's memory may leave the device while it is compared."""
    return tensor.detach().clone().cpu().as_subclass(torch.Tensor)


def _keys(value: Any) -> str:
    return f"{list(value)!r:.200}" if isinstance(value, Mapping) else f"those of a {type(value).__name__}"
