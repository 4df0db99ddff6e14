"""What ranks must have in common beside chunks: initial values, the model's shape, buffers, and the gradients of
parameters that stay with PyTorch. With one rank nothing happens here.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import nn

from patrickstar.config import Config
from patrickstar.distributed import RankGroups
from patrickstar.memory import Budgets
from patrickstar.preprocess import ParamPlan


@contextlib.contextmanager
def common_random_numbers(ranks: RankGroups) -> Iterator[None]:
    """PyTorch's CPU and CUDA generators stand where rank 0's do, and go on from where they stood afterwards.

    So a model gets the same random initial values on every rank, and for any number of ranks.
    """
    if len(ranks.members) == 1:
        yield
        return
    seed = int(ranks.control.exchange(str(torch.initial_seed()).encode())[0])
    state = torch.frombuffer(bytearray(ranks.control.exchange(_bytes(torch.get_rng_state()))[0]), dtype=torch.uint8)
    devices = [ranks.context.device] if ranks.context.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.set_rng_state(state)
        for device in devices:
            torch.cuda.manual_seed(seed)
            torch.cuda.set_device(device)
        yield


class Turn:
    """A rank's turn to build its model; see :func:`take_turns`."""

    def __init__(self, ranks: RankGroups, num_before: int, num_after: int):
        self._ranks = ranks
        self._num_after = num_after
        self._wait(num_before)

    def end(self) -> None:
        """The next rank may begin. Returns when all have had their turns, unless this one had ended already."""
        num_after, self._num_after = self._num_after, 0
        self._wait(num_after)

    def _wait(self, num_turns: int) -> None:
        for _ in range(num_turns):
            with self._ranks.guard("waiting while another rank builds its model"):
                self._ranks.control.exchange(b"")


@contextlib.contextmanager
def take_turns(ranks: RankGroups, config: Config) -> Iterator[Turn]:
    """Within it this rank builds its model, while no other rank of its machine does; it ends the turn at the latest.

    So of a model built in host memory, whole as it is, one at a time exists on a machine beside the shards that ranks
    have taken already: together they never take more than 8 bytes per parameter, of the 14 of training. With
    ``release_after_init`` all ranks build at once. One turn may take up to ``rank_timeout_seconds``.
    """
    here = ranks.context
    if len(ranks.members) == 1 or config.release_after_init:
        yield Turn(ranks, 0, 0)
        return
    most = max(int(size) for size in ranks.control.exchange(str(here.local_world_size).encode()))
    index = min(here.local_rank, most - 1)
    turn = Turn(ranks, index, most - index)
    yield turn
    turn.end()


def check_same_config(ranks: RankGroups, config: Config) -> None:
    """Every rank has the same configuration.

    Raises:
        DisagreementError: they have not; on every rank, and it says which rank has what.
    """
    shared = config.model_copy(update={"profile": None, "plan": None})
    ranks.check_agreement("the configuration", repr(shared))


def check_same_model(ranks: RankGroups, plan: ParamPlan) -> None:
    """The same for parameters, in order: their names, shapes, dtypes, and which of them are trained."""
    chunked = [f"{s.name} {tuple(s.param.shape)} {s.compute_dtype} {s.param.requires_grad}" for s in plan.chunked]
    ranks.check_agreement("the model's parameters, in order,", "; ".join(chunked))


def common_budgets(ranks: RankGroups, budgets: Budgets) -> Budgets:
    """The least of all ranks': decisions that follow from them are the same everywhere."""
    if len(ranks.members) == 1:
        return budgets
    messages = ranks.control.exchange(f"{budgets.device_bytes} {budgets.host_bytes}".encode())
    devices, hosts = zip(*(map(int, message.split()) for message in messages), strict=True)
    return Budgets(device_bytes=min(devices), host_bytes=min(hosts))


def mean_over_ranks(ranks: RankGroups, params: Sequence[nn.Parameter]) -> None:
    """Each parameter's gradient becomes the ranks' mean, as in DDP; where a rank has none, zeros count.

    The sum is made in float32 in the order of ranks, so its bits are the same on all of them.
    """
    if len(ranks.members) == 1 or not params:
        return
    for param in params:
        if param.grad is not None and param.grad.is_sparse:
            param.grad = param.grad.to_dense()
        mine = b"" if param.grad is None else _bytes(param.grad.detach().float().cpu().contiguous())
        messages = [message for message in ranks.control.exchange(mine) if message]
        if not messages:
            continue
        total = np.zeros(param.numel(), dtype=np.float32)
        for message in messages:
            total += np.frombuffer(message, dtype=np.float32)
        mean = torch.from_numpy(total / len(ranks.members)).view(param.shape)
        param.grad = mean.to(device=param.device, dtype=param.dtype)


class BufferSync:
    """Buffers that a forward changes (running statistics) are rank 0's before each training forward, as in DDP."""

    def __init__(self, ranks: RankGroups, module: nn.Module):
        self._ranks = ranks
        self._buffers = list(module.buffers()) if len(ranks.members) > 1 else []
        self._versions = [buffer._version for buffer in self._buffers]

    def run(self) -> None:
        """To be called by all ranks, before a training forward."""
        if not self._buffers:
            return
        message = io.BytesIO()
        if self._ranks.context.rank == self._ranks.members[0]:
            for index, buffer in enumerate(self._buffers):
                if buffer._version != self._versions[index]:
                    np.save(message, np.array([index]), allow_pickle=False)
                    np.save(message, buffer.detach().cpu().numpy(), allow_pickle=False)
        received = self._ranks.control.exchange(message.getvalue())[0]
        source = io.BytesIO(received)
        with torch.no_grad():
            while source.tell() < len(received):
                index = int(np.load(source, allow_pickle=False)[0])
                self._buffers[index].copy_(torch.from_numpy(np.load(source, allow_pickle=False)))
        self._versions = [buffer._version for buffer in self._buffers]


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()
