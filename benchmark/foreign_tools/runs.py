"""Runs of PatrickStar, jobs on several ranks, and the comparison of two runs."""

from __future__ import annotations

import dataclasses
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from patrickstar.runtime import initialize_engine
from tests.checkpoint.foreign.plain_run import ADAM, Net, batches, groups_of

KINDS = ("exp_avg", "exp_avg_sq")
OTHER = {**ADAM, "lr": 1.0}  # of an optimizer that loads: overwritten
STEPS, MORE = 3, 2
State = dict[str, dict[str, torch.Tensor]]


@dataclasses.dataclass
class Trained:
    """A run after :data:`STEPS` steps, and losses of :data:`MORE` more."""

    state: State
    """Master values and Adam's states by parameter, in float32."""
    losses: list[float]

    def rounded(self) -> Trained:
        """The same with values and states rounded to bfloat16."""
        state = {
            name: {kind: value.bfloat16().float() for kind, value in held.items()} for name, held in self.state.items()
        }
        return Trained(state, self.losses)


def engine_of(dtype: str, params: dict[str, Any]) -> Any:
    """An engine of PatrickStar in this process."""
    torch.manual_seed(9)
    config = {"optimizer": {"type": "AdamW", "params": params}, "default_chunk_size": 1024, "steps_per_print": 0}
    config |= {"bf16": {"enabled": True}} if dtype == "bf16" else {}
    return initialize_engine(Net, 0, config, model_parameters=groups_of)


def own_state(engine: Any, optimizer: Any) -> State:
    """Masters and states of an engine."""
    values = engine.state_dict()
    names = [name for group in groups_by_name() for name in group]
    states = optimizer.state_dict()["state"]
    return {
        name: {"fp32": values[name].float(), **{kind: states[index][kind] for kind in KINDS}}
        for index, name in enumerate(names)
    }


def groups_by_name() -> list[list[str]]:
    """Names of the trained parameters by group, in the optimizer's order."""
    trained = [(name, param.dim()) for name, param in Net().named_parameters() if param.requires_grad]
    return [[name for name, dim in trained if dim == 2], [name for name, dim in trained if dim != 2]]


def own_steps(engine: Any, optimizer: Any, number: int, seed: int) -> list[float]:
    """Losses of some steps of an engine."""
    losses = []
    for tokens in batches(number, seed):
        loss = engine(tokens)
        engine.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def exported(folder: Path, dtype: str) -> Trained:
    """Trains an engine, and exports it in both formats below ``folder``."""
    engine, optimizer = engine_of(dtype, ADAM)
    with engine:
        own_steps(engine, optimizer, STEPS, 1)
        engine.export_checkpoint(folder / "universal" / "global_step3", "universal", {"epoch": 3})
        engine.export_checkpoint(folder / "dcp" / "step-3", "dcp", {"epoch": 3})
        state = own_state(engine, optimizer)
        return Trained(state, own_steps(engine, optimizer, MORE, 2))


def loaded(folder: Path, dtype: str) -> Trained:
    """Loads a checkpoint of another tool into an engine, and trains on."""
    engine, optimizer = engine_of(dtype, OTHER)
    with engine:
        engine.load_checkpoint(folder)
        state = own_state(engine, optimizer)
        return Trained(state, own_steps(engine, optimizer, MORE, 2))


def _rank(rank: int, ranks: int, port: int, result: str, job: Callable[..., Trained], arguments: tuple[Any, ...]):
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in where.items()})
    torch.set_num_threads(1)
    trained = job(ranks, *arguments)
    if rank == 0:
        torch.save(dataclasses.asdict(trained), result)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()  # its threads end before the process does


def on_ranks(ranks: int, job: Callable[..., Trained], *arguments: Any) -> Trained:
    """Runs ``job(ranks, *arguments)`` on ranks, and returns the first one's result."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        result = f"{folder}/result.pt"
        mp.spawn(_rank, args=(ranks, port, result, job, arguments), nprocs=ranks)
        return Trained(**torch.load(result))


def compare(name: str, found: Trained, expected: Trained, num_losses: int = MORE) -> bool:
    """Prints a line; True if values and states have the same bits, and ``num_losses`` losses agree within 1e-6."""
    different = [
        f"{param} {kind}"
        for param, held in expected.state.items()
        for kind, value in held.items()
        if not torch.equal(found.state[param][kind].reshape(-1), value.reshape(-1))
    ]
    bits = "same bits" if not different else f"DIFFERENT: {', '.join(different[:3])} and {len(different)} in all"
    gaps = [abs(own - other) / abs(other) for own, other in zip(found.losses, expected.losses, strict=True)]
    print(f"| {name} | {bits} | {', '.join('same' if gap == 0 else f'{gap:.0e}' for gap in gaps)} |", flush=True)
    return not different and all(gap <= 1e-6 for gap in gaps[:num_losses])
