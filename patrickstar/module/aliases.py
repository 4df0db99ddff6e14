"""Tensors that share memory with a parameter: another parameter over the same memory (tied with ``.data =``, or made of
a slice), or a buffer or attribute that keeps ``weight.data``.

In plain PyTorch they follow each update. In an engine the parameter gets other memory, so they would keep old values.
The rules are:

* A frozen parameter over the whole memory of another one becomes a *tie* and moves with it.
* Two trained parameters over one memory are refused: PyTorch would update the memory twice, with two states.
* Anything else that shares memory with a trained parameter is refused.
* Memory shared with frozen parameters alone keeps its values and may stay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from patrickstar.module.attributes import held_values


@dataclasses.dataclass(frozen=True, slots=True)
class _Span:
    """A tensor and the byte range from its first to its last element."""

    name: str
    tensor: torch.Tensor
    place: tuple[object, ...]
    """Spans with equal ``place`` have comparable addresses."""
    begin: int
    end: int
    is_param: bool


@dataclasses.dataclass(frozen=True)
class Aliases:
    """Parameters of one module that share memory with something else."""

    ties: dict[nn.Parameter, nn.Parameter]
    """Maps a frozen parameter to the parameter whose chunk memory it uses."""
    untrainable: dict[nn.Parameter, str]
    """Other frozen parameters that share memory. The text is the error to raise if the parameter becomes trained."""


MayTie = Callable[[nn.Parameter, nn.Parameter], bool]


def _never(one: nn.Parameter, other: nn.Parameter) -> bool:
    return False


def find_aliases(module: nn.Module, trained: Iterable[nn.Parameter], may_tie: MayTie = _never) -> Aliases:
    """Searches the parameters, buffers and attributes of ``module`` and its submodules.

    Args:
        module: the user's module.
        trained: the parameters that the optimizer has.
        may_tie: tells whether two parameters over one memory can share one place in a chunk. At least one is frozen.

    Raises:
        ValueError: one of ``trained`` shares memory with a tensor that cannot become a tie.
    """
    trained = set(trained)
    spans = list(_spans(module))
    ties = _ties(spans, trained, may_tie)
    untrainable: dict[nn.Parameter, str] = {}
    for one, other in _overlaps(span for span in spans if span.tensor not in ties):
        text = _refusal(one, other)
        for span in (one, other):
            if span.is_param:
                untrainable.setdefault(span.tensor, text)  # type: ignore[arg-type]
                if span.tensor in trained:
                    raise ValueError(text)
    return Aliases(ties, untrainable)


def _ties(spans: Iterable[_Span], trained: set[nn.Parameter], may_tie: MayTie) -> dict[nn.Parameter, nn.Parameter]:
    by_memory: dict[tuple[object, ...], list[nn.Parameter]] = {}
    for span in spans:
        if span.is_param and not span.tensor.is_meta:
            tensor = span.tensor
            memory = (span.place, span.begin, tensor.dtype, tensor.shape, tensor.stride())
            by_memory.setdefault(memory, []).append(tensor)  # type: ignore[arg-type]
    ties: dict[nn.Parameter, nn.Parameter] = {}
    for params in by_memory.values():
        owner = next((param for param in params if param in trained), params[0])
        others = [param for param in params if param is not owner]
        if not any(param.requires_grad for param in others) and all(may_tie(owner, param) for param in others):
            ties.update(dict.fromkeys(others, owner))
    return ties


def _spans(module: nn.Module) -> Iterator[_Span]:
    params = {id(param) for param in module.parameters()}
    buffers = {id(buffer) for buffer in module.buffers()}
    for name, param in module.named_parameters():
        yield from _span(name, param, is_param=True)
    for name, buffer in module.named_buffers():
        yield from _span(f"the buffer {name}", buffer, is_param=False)
    seen: set[int] = set()
    for held in held_values(module):
        if not isinstance(held.value, torch.Tensor) or id(held.value) in params | buffers | seen:
            continue
        seen.add(id(held.value))
        # torch.nn.utils.spectral_norm and prune keep the parameter as NAME_orig, and set NAME before each forward.
        if f"{held.attribute}_orig" not in held.owner._parameters:
            yield from _span(f"the attribute {held.name}", held.value, is_param=False)


def _span(name: str, tensor: torch.Tensor, *, is_param: bool) -> Iterator[_Span]:
    has_memory = tensor.layout == torch.strided and torch._C._has_storage(tensor) and tensor.numel() > 0
    if not has_memory or torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor):
        return
    if tensor.is_meta:
        place, begin = ("meta", tensor.untyped_storage()._cdata), tensor.storage_offset() * tensor.itemsize
    else:
        place, begin = (tensor.device,), tensor.data_ptr()
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    yield _Span(name, tensor, place, begin, begin + (steps + 1) * tensor.itemsize, is_param)


def _overlaps(spans: Iterable[_Span]) -> Iterator[tuple[_Span, _Span]]:
    """Pairs that share an element; one of each pair is a parameter."""
    by_place: dict[tuple[object, ...], list[_Span]] = {}
    for span in spans:
        by_place.setdefault(span.place, []).append(span)
    for alike in by_place.values():
        alike.sort(key=lambda span: span.begin)
        reaching: list[_Span] = []
        for span in alike:
            reaching = [other for other in reaching if other.end > span.begin]
            for other in reaching:
                if (span.is_param or other.is_param) and _share_elements(other, span):
                    yield (other, span) if other.is_param else (span, other)
            reaching.append(span)


def _share_elements(one: _Span, other: _Span) -> bool:
    """Compares overlapping spans element by element; two columns of one matrix share none."""
    if all(_is_dense(span) for span in (one, other)):
        return True
    begin, end = min(one.begin, other.begin), max(one.end, other.end)
    touched = torch.zeros(end - begin, dtype=torch.bool, device="cpu")
    _bytes_of(touched, one, begin).fill_(True)
    return bool(_bytes_of(touched, other, begin).any())


def _is_dense(span: _Span) -> bool:
    return span.tensor.numel() * span.tensor.itemsize == span.end - span.begin


def _bytes_of(memory: torch.Tensor, span: _Span, begin: int) -> torch.Tensor:
    size = span.tensor.itemsize
    strides = [stride * size for stride in span.tensor.stride()]
    return memory.as_strided((*span.tensor.shape, size), (*strides, 1), span.begin - begin)


def _refusal(param: _Span, other: _Span) -> str:
    if other.is_param:
        return (
            f"{param.name} and {other.name} are two parameters over one memory, which training in an engine would take "
            f"apart. If they are one weight, assign the parameter itself ({other.name} = {param.name}); else give one "
            "of them memory of its own (param.data = param.data.clone())"
        )
    return (
        f"{other.name} has memory of {param.name}, and would keep old values when an engine trains that. Read the "
        "parameter itself, or give the other memory of its own (clone())"
    )
