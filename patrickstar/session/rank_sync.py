"""State that ranks share beside chunks: configuration, random numbers, budgets, buffers, gradients that stay with
PyTorch.

With one rank nothing happens here.
"""

from __future__ import annotations

import contextlib
import io
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from patrickstar import _C
from patrickstar.config import ALL_OPTIONS, Config
from patrickstar.machine.budgets import Budgets
from patrickstar.module.first_rank_values import bytes_of_tensor, copy_bytes, num_bytes_of
from patrickstar.module.managed import real_parts, wide_dtype
from patrickstar.module.observed_buffers import ObservedBuffer, buffer_places
from patrickstar.ranks.chunk_ranks import ChunkRanks
from patrickstar.ranks.distributed import RankGroups
from patrickstar.ranks.failures import first_line
from patrickstar.ranks.messages import reading
from patrickstar.sequence.survey import Survey

_BUFFER_HEAD = struct.Struct("<QQ")  # index and bytes of a buffer


@contextlib.contextmanager
def common_random_numbers(ranks: RankGroups) -> Iterator[None]:
    """Sets PyTorch's CPU and CUDA generators to rank 0's states within the block, and restores them afterwards.

    So a model gets the same random initial values on every rank and for any number of ranks. A CPU generator that had
    rank 0's state goes on from the block's end, as on one rank.
    """
    if len(ranks.members) == 1:
        yield
        return
    with ranks.guard("opening the engine"):
        seeds = ranks.control.exchange(str(torch.initial_seed()).encode(), "the seed")
        states = ranks.control.exchange(_bytes(torch.get_rng_state()), "random numbers")
    devices = [ranks.context.device] if ranks.context.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        with reading("the random number generator"):
            seed = int(seeds[0])
            torch.set_rng_state(torch.frombuffer(bytearray(states[0]), dtype=torch.uint8))
        for device in devices:
            torch.cuda.manual_seed(seed)
            torch.cuda.set_device(device)
        yield
        advanced = torch.get_rng_state()
    if states[ranks.members.index(ranks.context.rank)] == states[0]:
        torch.set_rng_state(advanced)


class Turn:
    """A rank's turn to build its model and move it into chunks; see :func:`take_turns`."""

    def __init__(self, ranks: RankGroups, num_before: int, num_after: int):
        self._ranks = ranks
        self._num_after = num_after
        self._wait(num_before)

    def end(self) -> None:
        """Lets the next rank begin. Returns when all ranks had their turns, unless this turn had ended already."""
        num_after, self._num_after = self._num_after, 0
        self._wait(num_after)

    def _wait(self, num_turns: int) -> None:
        for _ in range(num_turns):
            with self._ranks.guard("waiting while another rank builds its model"):
                self._ranks.control.exchange(b"", "the next turn")


@contextlib.contextmanager
def take_turns(ranks: RankGroups, config: Config) -> Iterator[Turn]:
    """Wraps the building of this rank's model; no other rank of its machine builds one meanwhile.

    So at most one whole model exists in a machine's host memory beside the shards of finished ranks. Together they take
    at most 8 bytes per parameter, of the 14 of training. The first rank is last, since its values are sent to all
    (``module/first_rank_values.py``) and it holds its whole model while it compares. With ``release_after_init`` all
    ranks build at once. One turn may take ``rank_timeout_seconds``.
    """
    here = ranks.context
    if len(ranks.members) == 1 or config.release_after_init:
        yield Turn(ranks, 0, 0)
        return
    with ranks.guard("opening the engine"):
        sizes = ranks.control.exchange(str(here.local_world_size).encode(), "ranks per machine")
    with reading("the number of ranks per machine"):
        most = max(map(int, sizes))
        if not here.local_world_size <= most <= ranks.context.world_size:
            raise ValueError(f"{most} of {ranks.context.world_size}")
    index = most - 1 - min(here.local_rank, most - 1)
    turn = Turn(ranks, index, most - index)
    yield turn
    turn.end()


def check_same_config(ranks: RankGroups, config: Config) -> None:
    """Checks that every rank has the same configuration.

    Raises:
        DisagreementError: on every rank; the message shows each rank's configuration.
    """
    shared = config.model_copy(update={"profile": None, "plan": None, "plan_cache": None})
    ranks.check_agreement("the configuration", repr(shared))


class AgreedOptions:
    """Checks that all ranks step with the same options: each rank updates its shards with its own."""

    def __init__(self, ranks: RankGroups):
        self._ranks = ranks
        self._agreed = ""

    def check(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Compares the groups' options if they have changed since the last check.

        Raises:
            DisagreementError: they differ between ranks.
            RankMismatch: they have changed on some ranks alone.
        """
        if len(self._ranks.members) == 1:
            return
        mine = "; ".join(_options_text(group) for group in param_groups)
        if mine != self._agreed:
            self._ranks.check_agreement("the options of the parameter groups", mine)
            self._agreed = mine


def _options_text(group: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={group[key]}" for key in ALL_OPTIONS if key in group)


def failed_ranks(ranks: RankGroups, failure: BaseException | None) -> str:
    """Ranks with a ``failure`` and its text; empty if none failed. Collective over all ranks."""
    mine = "" if failure is None else f"{type(failure).__name__}: {first_line(failure)}"
    if len(ranks.members) == 1:
        return mine
    said = [message.decode(errors="replace") for message in ranks.control.exchange(mine.encode(), "who has failed")]
    return "; ".join(f"rank {member}: {text}" for member, text in zip(ranks.members, said, strict=True) if text)


def common_budgets(ranks: RankGroups, budgets: Budgets) -> Budgets:
    """The smallest budgets of all ranks, so that decisions from them agree."""
    if len(ranks.members) == 1:
        return budgets
    messages = ranks.control.exchange(f"{budgets.device_bytes} {budgets.host_bytes}".encode(), "budgets")
    with reading("budgets"):
        devices, hosts = zip(*(map(int, message.split()) for message in messages), strict=True)
        if min(*devices, *hosts) < 0:
            raise ValueError(f"{messages}")
    return Budgets(device_bytes=min(devices), host_bytes=min(hosts))


def combine_over_ranks(ranks: ChunkRanks, params: Sequence[nn.Parameter], divisor: float) -> None:
    """Replaces each parameter's gradient by the ranks' sum over ``divisor``; a missing gradient counts as zeros.

    With the number of ranks as divisor the result is the mean, as in DDP. The sum runs in rank order, so its bits agree
    on all ranks. It is computed in float32, or in the parameter's dtype if wider. Complex gradients are summed by
    parts.
    """
    if ranks.size == 1 or not params:
        return
    for param in params:
        if param.grad is not None and param.grad.is_sparse:
            param.grad = param.grad.to_dense()
        wide = wide_dtype(param)
        parts = np.float64 if wide in (torch.float64, torch.complex128) else np.float32
        mine = b"" if param.grad is None else _bytes(real_parts(param.grad.detach().to("cpu", wide).contiguous()))
        messages = [message for message in ranks.control.exchange(mine, "gradients that stay with PyTorch") if message]
        if not messages:
            continue
        total = np.zeros(real_parts(param.detach()).numel(), dtype=parts)
        for message in messages:
            with reading("gradients that stay with PyTorch"):
                total += np.frombuffer(message, dtype=parts).reshape(total.shape)
        combined = torch.from_numpy(total / parts(divisor)).view(wide).view(param.shape)
        param.grad = combined.to(device=param.device, dtype=param.dtype)


def first_ranks_survey(ranks: RankGroups, survey: Survey) -> Survey:
    """The first rank's survey, on all ranks. Collective over all ranks."""
    if len(ranks.members) == 1:
        return survey
    message = ranks.control.exchange(survey.to_json().encode(), "what is known of the model")[0]
    with reading("what is known of the model"):
        return Survey.from_json(message.decode())


class BufferSync:
    """Sends rank 0's buffers (running statistics) to all ranks, before each training forward and before the first
    evaluation after one, as DDP does.

    Only buffers travel that a rank has changed or replaced. Those whose size differs from rank 0's stay, such as a mask
    for a rank's own sequence length.
    """

    def __init__(self, ranks: RankGroups, module: nn.Module):
        self._ranks = ranks
        has_any = next(module.buffers(), None) is not None  # a place may be empty
        self._places = buffer_places(module) if has_any and len(ranks.members) > 1 else []
        self._observed = [place.observe() for place in self._places]
        self._has_trained = False
        """A training forward has begun since the last evaluation."""

    def run(self, tracking: _C.Tracking) -> None:
        """Called by all ranks before a forward."""
        is_training = tracking == _C.Tracking.TRAINING
        if not self._places or not (is_training or self._has_trained):
            return
        self._has_trained = is_training
        now = [place.observe() for place in self._places]
        changed = [i for i, pair in enumerate(zip(self._observed, now, strict=True)) if _is_changed(*pair)]
        first, *others = self._ranks.control.exchange(self._packed(changed, now), "buffers")
        with reading("buffers"):
            values = _unpacked(first, len(now))
            missing = sorted({index for message in others for index in _unpacked(message, len(now))} - values.keys())
        if missing:  # all ranks see the same messages
            first = self._ranks.control.exchange(self._packed(missing, now), "buffers of the first rank")[0]
            with reading("buffers"):
                values |= _unpacked(first, len(now))
        for index, value in values.items():
            buffer = now[index]
            if buffer is not None and num_bytes_of(buffer.tensor) == len(value):
                copy_bytes(buffer.tensor, value)
        self._observed = [place.observe() for place in self._places]

    def _packed(self, indices: Sequence[int], buffers: Sequence[ObservedBuffer | None]) -> bytes:
        """The indices; from the first rank with values."""
        is_first = self._ranks.context.rank == self._ranks.members[0]
        message = io.BytesIO()
        for index in indices:
            buffer = buffers[index]
            values = bytes_of_tensor(buffer.tensor) if is_first and buffer is not None else b""
            message.write(_BUFFER_HEAD.pack(index, len(values)))
            message.write(values)
        return message.getvalue()


def _is_changed(before: ObservedBuffer | None, now: ObservedBuffer | None) -> bool:
    if before is None or now is None:
        return before is not now
    return before.tensor is not now.tensor or before.has_changed()


def _unpacked(message: bytes, num_buffers: int) -> dict[int, bytes]:
    """Values by buffer index."""
    values: dict[int, bytes] = {}
    at = 0
    while at < len(message):
        index, num_bytes = _BUFFER_HEAD.unpack_from(message, at)
        at += _BUFFER_HEAD.size
        values[index] = message[at : at + num_bytes]
        at += num_bytes
        if num_bytes != len(values[index]) or index >= num_buffers:
            raise ValueError(f"{num_bytes} bytes of buffer {index}")
    return values


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()
