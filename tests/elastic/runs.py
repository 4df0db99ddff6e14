"""Functions that processes of an elastic run execute."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import patrickstar
from patrickstar import _C, RankFailure
from patrickstar.elastic import (
    ElasticLoader,
    ElasticRun,
    ElasticSampler,
    Membership,
    MicroBatches,
    Next,
    Orders,
    Rendezvous,
    ResizeError,
    ResizePhase,
    serve_rendezvous,
)
from patrickstar.ranks.run_secret import default_secret_file
from patrickstar.resize import memory as resize_room
from patrickstar.runtime import initialize_engine
from tests.training import make_config

NUM_SAMPLES, GLOBAL_BATCH, WIDTH = 120, 12, 96
DEVICE_MEMORY = 384 * 1024


def build() -> nn.Module:
    """Several chunks of 16 K elements, so that two and more ranks have shards of them."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(16, 4 * WIDTH),
        nn.GELU(),
        nn.Linear(4 * WIDTH, WIDTH),
        nn.GELU(),
        nn.Dropout(0.0),
        nn.Linear(WIDTH, 1),
    )


def samples() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(NUM_SAMPLES, 16, generator=generator)
    return torch.utils.data.TensorDataset(torch.arange(NUM_SAMPLES), inputs, inputs.sin().sum(1, keepdim=True))


def state_of(engine: Any, optimizer: Any) -> dict[str, Any]:
    found = {name: value.cpu().clone() for name, value in engine.state_dict().items()}
    state = optimizer.state_dict()
    for index, entry in state["state"].items():
        found |= {f"{index} {key}": value.cpu().clone() for key, value in entry.items()}
    found["scaler"] = torch.tensor([float(value) for value in state.get("loss_scaler", {}).values()])
    found["steps"] = torch.tensor(engine._session.num_steps)
    found["lr"] = torch.tensor(state["param_groups"][0]["lr"])
    return found


def joining_steps(plan: list[int]) -> list[int]:
    """By process, the step before which it joins a run whose step k has ``plan[k]`` ranks; 0 for the first
    processes.
    """
    steps = [0]
    for step, (before, now) in enumerate(zip(plan, plan[1:], strict=False), 1):
        steps += [step] * (now - before)
    return steps


def train(
    address: str, plan: list[int], folder: str, precision: str = "fp32", optimizer_section: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Runs one process of a run whose step k has ``plan[k]`` ranks; the first process begins the run. Shards go through
    ``folder``, in which {} stands for the process's number. ``optimizer_section`` replaces AdamW.
    """
    number = int(os.environ["RANK"])
    folder = folder.format(number)
    joins_before = joining_steps(plan)[number]
    config = make_config(precision, default_chunk_size=16384, rank_timeout_seconds=60)
    config["optimizer"] = optimizer_section or config["optimizer"]
    engine, optimizer = initialize_engine(build, int(os.environ["LOCAL_RANK"]), config)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    sampler = ElasticSampler(NUM_SAMPLES, GLOBAL_BATCH, 3, seed=1)
    user_state = {"schedule": schedule, "sampler": sampler}
    result: dict[str, Any] = {"losses": {}, "seen": {}, "before": {}, "after": {}, "resized": []}
    result["device"] = engine.device.type

    step = joins_before
    if joins_before > 0:
        result["resized"].append(engine.join(user_state=user_state, rendezvous=address, folder=folder))
        step = engine._session.num_steps  # processes are taken as they come
        result["after"][step] = (state_of(engine, optimizer), torch.get_rng_state())
    loader = iter(ElasticLoader(samples(), sampler))
    while step < len(plan):
        if plan[step] != engine._session.chunk_ranks.size:
            result["before"][step] = (state_of(engine, optimizer), torch.get_rng_state())
            resized = engine.resize(plan[step], user_state=user_state, rendezvous=address, folder=folder)
            result["resized"].append(resized)
            if resized.membership is Membership.LEFT:
                return result
            result["after"][step] = (state_of(engine, optimizer), torch.get_rng_state())
        micro_batches = next(loader)
        optimizer.zero_grad()
        for indices, inputs, targets in micro_batches:
            outputs = engine(inputs).float()
            loss = nn.functional.mse_loss(outputs, targets.to(outputs.device))
            engine.backward(loss / len(micro_batches))
            result["losses"].setdefault(step, []).append(loss.item())
            result["seen"].setdefault(step, []).extend(indices.tolist())
        optimizer.step()
        schedule.step()
        torch.rand(number + 1)  # processes' generators stand at different places
        step += 1
    result["state"] = state_of(engine, optimizer)
    engine.close()
    return result


def train_across_nodes(address: str, port: int, plan: list[int], folder: str) -> dict[str, Any]:
    store = serve_rendezvous(address, port) if os.environ["RANK"] == "0" else None
    deadline = time.monotonic() + 60
    while not default_secret_file(address, port).exists() and time.monotonic() < deadline:
        time.sleep(0.05)  # the first process may begin later
    try:
        return train(f"{address}:{port}", plan, folder)
    finally:
        del store


def kill_and_go_on(
    address: str, plan: list[int], kill: tuple[int, ResizePhase], folder: str, shards: str
) -> dict[str, Any]:
    """Runs one process of three steps with a resize before the second and the third, in which a process is killed as a
    phase begins. The result's ``end`` says how the others ended.
    """
    number = int(os.environ["RANK"])
    shards = shards.format(number)
    joins_before = joining_steps(plan)[number]
    engine, optimizer = initialize_engine(
        build, 0, make_config("fp32", default_chunk_size=16384, rank_timeout_seconds=25)
    )
    sampler = ElasticSampler(NUM_SAMPLES, GLOBAL_BATCH, 12, seed=1)
    options = {"user_state": {"sampler": sampler}, "rendezvous": address}
    result: dict[str, Any] = {"end": "trained"}

    def note(phase: ResizePhase) -> None:
        if kill == (number, phase) and armed:
            os.kill(os.getpid(), signal.SIGKILL)

    def one_step() -> None:
        optimizer.zero_grad()
        indices, inputs, targets = next(iter(ElasticLoader(samples(), sampler)))[0]
        engine.backward(nn.functional.mse_loss(engine(inputs).float(), targets))
        optimizer.step()

    armed = joins_before != 1
    step = 0
    try:
        if joins_before > 0:
            if joins_before == 2:
                wait_for(Path(folder, "second"))  # the first resize is not its
            engine.join(**options, folder=shards, note_phase=note)
            step = joins_before
            one_step()
            step += 1
        while step < len(plan):
            if step == 2:
                armed = True
                result["before"] = state_of(engine, optimizer)
                engine.save_checkpoint(folder)
                Path(folder, "second").touch()
            elif step == 1:
                armed = False
            if step > 0:
                resized = engine.resize(plan[step], **options, folder=shards, timeout_seconds=12, note_phase=note)
                result["end"] = "resized"
                if resized.membership is Membership.LEFT:
                    return {**result, "end": "left"}
            one_step()
            step += 1
        engine.close()
    except ResizeError:
        if joins_before == 2:
            return {"end": "not joined"}
        result |= {"end": "stayed", "after": state_of(engine, optimizer)}
        one_step()
        result["num_steps"] = engine._session.num_steps
        engine.close()
    except RankFailure:
        result["end"] = "failed"
    return result


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.05)


def join_another_run(address: str, difference: str) -> dict[str, Any]:
    joins = os.environ["RANK"] == "1"
    differs = difference if joins else ""
    engine, optimizer = initialize_engine(
        (lambda: nn.Linear(16, 1)) if differs == "model" else build, 0, make_config("fp32", default_chunk_size=16384)
    )
    user_state = {"sampler": ElasticSampler(60 if differs == "data" else NUM_SAMPLES, GLOBAL_BATCH, 3)}
    with engine:
        before = state_of(engine, optimizer)
        options = {"rendezvous": address, "user_state": user_state}
        try:
            engine.join(**options, timeout_seconds=60) if joins else engine.resize(2, **options)
        except ResizeError as error:
            return {"error": str(error), "before": before, "after": state_of(engine, optimizer)}
        return {"error": ""}


def follow_orders(address: str, folder: str, num_steps: int) -> dict[str, Any]:
    engine, optimizer = initialize_engine(build, 0, make_config("fp32", default_chunk_size=16384))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    sampler = ElasticSampler(NUM_SAMPLES, GLOBAL_BATCH, 3, seed=1)
    run = ElasticRun(
        engine, {"schedule": schedule, "sampler": sampler}, checkpoint=folder, look_seconds=0.05, rendezvous=address
    )
    result: dict[str, Any] = {"losses": {}, "seen": {}, "end": None}
    while run.num_steps < num_steps and result["end"] is None:
        for micro_batches in ElasticLoader(samples(), sampler):
            step = run.num_steps
            optimizer.zero_grad()
            for indices, inputs, targets in micro_batches:
                loss = nn.functional.mse_loss(engine(inputs).float(), targets)
                engine.backward(loss / len(micro_batches))
                result["losses"].setdefault(step, []).append(loss.item())
                result["seen"].setdefault(step, []).extend(indices.tolist())
            optimizer.step()
            schedule.step()
            time.sleep(0.02)
            following = run.step_done(loss.item())
            if following is not Next.TRAIN:
                result["end"] = following
                break
            if run.num_steps == num_steps:
                break
    result["num_steps"] = run.num_steps
    if result["end"] is Next.LEAVE:
        return result
    run.end()
    result["state"] = state_of(engine, optimizer)
    engine.close()
    return result


Order = int | tuple[int, int] | dict[str, Any] | None  # ranks, or ranks and batch, or arguments; None: a stop


def give(orders: Orders, order: Order) -> None:
    """Returns when the order is in place: a written order gets no answer, a requested one does."""
    if isinstance(order, tuple):
        order = {"num_ranks": order[0], "global_batch": order[1]}
    if isinstance(order, int):
        order = {"num_ranks": order}
    number = orders.stop() if order is None else orders.resize(**order)
    assert orders.outcome(number) is None


def follow_with_initialize(address: str | None, plan: dict[int, int], folder: str) -> dict[str, Any]:
    """A DeepSpeed script with the elastic line; ``plan`` gives numbers of ranks by step."""
    config = {
        "train_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 6}},
        "zero_optimization": {"stage": 3},
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "run"},
        "gradient_clipping": 0.5,
        "default_chunk_size": 16384,
        "rank_timeout_seconds": 60,
    }
    engine, optimizer, _, schedule = patrickstar.initialize(model=build(), config=config)
    sampler = ElasticSampler(NUM_SAMPLES, engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), seed=1)
    options = {"look_seconds": 1e-9, "rendezvous": address, "resize_options": {"folder": folder}}
    run = ElasticRun(engine, {"sampler": sampler}, **options)
    result: dict[str, Any] = {"losses": {}, "lr": {}, "counts": {}, "refused": ""}
    for micro_batches in ElasticLoader(samples(), sampler):
        step = run.num_steps
        for _, inputs, targets in micro_batches:
            assert len(inputs) == 2
            loss = nn.functional.mse_loss(engine(inputs), targets)
            engine.backward(loss)
            if step == 0 and not result["refused"]:
                with pytest.raises(patrickstar.StateError) as refused:
                    engine.resize(1)
                result["refused"] = str(refused.value)
            engine.step()
            result["losses"].setdefault(step, []).append(loss.item())
        result["lr"][step] = schedule.get_last_lr()
        found = (engine.global_steps, engine.global_samples, engine.micro_steps, engine.gradient_accumulation_steps())
        result["counts"][step] = (*found, engine.train_batch_size(), engine.module[0].weight.ds_tensor.numel())
        if engine.global_rank == 0 and step + 1 in plan:
            give(Orders(Rendezvous.at(address).store), plan[step + 1])
        if run.step_done() is not Next.TRAIN:
            return result
    run.end()
    result["state"] = state_of(engine, optimizer)
    engine.close()
    return result


def tidal_engine(device_memory: int) -> Any:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(6)]
    config = make_config(default_chunk_size=2048, device_memory=device_memory)
    return initialize_engine(lambda: nn.Sequential(*layers), 0, config | {"rank_timeout_seconds": 60})


def tidal() -> torch.utils.data.TensorDataset:
    with _C.HostAllocations():
        inputs = torch.randn(96, 16, 32, generator=torch.Generator().manual_seed(7))
        return torch.utils.data.TensorDataset(inputs, inputs.sin())


def tidal_steps(sampler: ElasticSampler) -> Iterator[list[Any]]:
    steps = iter(ElasticLoader(tidal(), sampler))
    while True:
        with _C.HostAllocations():
            batches = next(steps, None)
        if batches is None:
            return
        yield batches


def train_with_the_activation_memory(address: str, folder: str) -> list[int]:
    joins = os.environ["RANK"] == "1"
    engine, optimizer = tidal_engine(600_000)
    sizes: list[int] = []
    sampler = ElasticSampler(96, 24, 3 if joins else 2, micro_batches=MicroBatches.BY_ACTIVATIONS)
    user_state = {"sampler": sampler}
    if joins:
        engine.join(user_state=user_state, rendezvous=address)
    for batches in tidal_steps(sampler):
        for inputs, targets in batches:
            engine.backward(nn.functional.mse_loss(engine(inputs), targets) / len(batches))
        optimizer.step()
        sizes.append(len(batches[0][0]))
        if len(sizes) == 2 and not joins:
            engine.resize(2, user_state=user_state, rendezvous=address, folder=folder)
    engine.close()
    return sizes


def shrink_into_too_little(host_memory: int | None, folder: str, available: int | None = None) -> dict[str, Any]:
    """Runs one of two ranks that shall become one whose share exceeds its budgets: given ones, or the available host
    memory.
    """
    config = make_config(default_chunk_size=16384, device_memory=DEVICE_MEMORY, host_memory=host_memory)
    config["rank_timeout_seconds"] = 60
    if available is not None:
        resize_room.available_bytes = lambda: available
    layers = [nn.Linear(128, 128, bias=False) for _ in range(8)]
    engine, optimizer = initialize_engine(lambda: nn.Sequential(*layers), 0, config)
    with engine:
        phases: list[ResizePhase] = []
        result: dict[str, Any] = {"error": "", "before": state_of(engine, optimizer)}
        try:
            engine.resize(1, folder=folder, note_phase=phases.append)
        except ResizeError as error:
            result["error"] = str(error)
        result |= {"phases": phases, "after": state_of(engine, optimizer)}
        return result


class Preempted(Exception):  # noqa: N818 (it is no error)
    pass


def raise_preempted(*_: Any) -> None:
    raise Preempted


def preempt_twice() -> None:
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR1)


def interrupt_the_second_rank(folder: str) -> dict[str, Any]:
    """Interrupts the second rank in each phase of a resize and in a save. By phase: the exception, and whether all
    state is as before.
    """
    rank = int(os.environ["RANK"])
    signal.signal(signal.SIGUSR1, raise_preempted)
    config = make_config(default_chunk_size=16384, rank_timeout_seconds=60)
    engine, optimizer = initialize_engine(build, rank, config)
    result: dict[str, Any] = {}

    def one_step() -> None:
        engine.backward(engine(torch.ones(2, 16)).square().mean())
        optimizer.step()

    class Scheduler:
        def state_dict(self) -> dict[str, Any]:
            if rank == 1:
                preempt_twice()
            return {}

    def note_in(wanted: ResizePhase | None) -> Any:
        return lambda phase: preempt_twice() if phase is wanted and rank == 1 else None

    calls = {
        phase: lambda phase=phase: engine.resize(2, folder=folder, timeout_seconds=20, note_phase=note_in(phase))
        for phase in ResizePhase
    }
    calls["save"] = lambda: engine.save_checkpoint(f"{folder}/checkpoint", lr_scheduler=Scheduler())
    for name, call in calls.items():
        one_step()
        before, raised = state_of(engine, optimizer), ""
        try:
            call()
        except (Preempted, RuntimeError) as error:
            raised = f"{type(error).__name__}: {error}"
        after = state_of(engine, optimizer)
        result[str(name)] = raised, all(torch.equal(value, after[key]) for key, value in before.items())
    one_step()
    engine.close()
    return result
