"""Two ranks whose models differ in every value train rank 0's model."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import patrickstar
from patrickstar import torch_scope
from patrickstar.integrations.accelerate import PatrickStarAccelerator
from patrickstar.integrations.transformers import PatrickStarTrainer
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.integrations.trainer_runs import arguments
from tests.ranks.runs import rank_and_size

OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-2}}
STEPS = 3
WIDTH = 96  # so that each rank keeps parameters of a chunk, and they divide one between them


class Mixed(nn.Module):
    """Parameters in chunks, frozen, and with PyTorch; buffers that forward reads, of which it changes one."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.chunked = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        with torch_scope():
            self.own = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("offset", torch.randn(WIDTH))
        self.register_buffer("passing", torch.randn(WIDTH), persistent=False)
        self.register_buffer("running", torch.randn(WIDTH).bfloat16())

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.own(self.frozen(self.chunked(x) + self.offset) + self.passing)
        if self.training:
            with torch.no_grad():
                self.running.mul_(0.5).add_(hidden.detach().mean(0).bfloat16())
        return {"loss": (hidden + self.running.float()).square().mean()}


class Rows(Dataset):
    def __init__(self) -> None:
        self.rows = torch.randn(4 * STEPS, WIDTH, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.rows[index]}


def batches() -> list[torch.Tensor]:
    rank, size = rank_and_size()
    return [rows[rank::size] for rows in Rows().rows.chunk(STEPS)]


def run_steps(engine: Any, step: Any) -> Any:
    with engine:
        first = whole_state(engine)
        losses = []
        for rows in batches():
            loss = engine(rows)["loss"]
            engine.backward(loss)
            step()
            losses.append(loss.item())
        return first, losses, whole_state(engine)


def whole_state(engine: Any) -> dict[str, torch.Tensor]:
    state = {name: value.clone() for name, value in engine.state_dict().items()}
    return state | {"passing": engine.module.passing.clone()}


def by_runtime(module: nn.Module, _: Path) -> Any:
    engine, optimizer = initialize_engine(lambda: module, 0, {"optimizer": OPTIMIZER, "default_chunk_size": 65536})
    return run_steps(engine, optimizer.step)


def by_a_function(module: nn.Module, _: Path) -> Any:
    def build() -> Mixed:
        built = Mixed(0)
        built.load_state_dict(module.state_dict())
        built.passing.copy_(module.passing)
        return built

    engine, optimizer = initialize_engine(build, 0, {"optimizer": OPTIMIZER, "default_chunk_size": 65536})
    return run_steps(engine, optimizer.step)


def by_initialize(module: nn.Module, _: Path) -> Any:
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": OPTIMIZER, "default_chunk_size": 65536}
    engine, *_ = patrickstar.initialize(model=module, config=config)
    return run_steps(engine, engine.step)


def by_accelerate(module: nn.Module, _: Path) -> Any:
    accelerator = PatrickStarAccelerator(cpu=True, patrickstar_config={"default_chunk_size": 65536})
    _, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
    result = run_steps(accelerator.engine, optimizer.step)
    accelerator.free_memory()
    return result


def by_trainer(module: nn.Module, folder: Path) -> Any:
    args = arguments(folder, num_train_epochs=1, gradient_accumulation_steps=1, per_device_train_batch_size=2)
    trainer = PatrickStarTrainer(module, args, train_dataset=Rows(), patrickstar_config={"default_chunk_size": 65536})
    trainer.train()
    result = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], whole_state(trainer.engine)
    trainer.close()
    return None, *result


WAYS = (by_trainer, by_accelerate, by_runtime, by_a_function, by_initialize)


def run(folder: Path) -> dict[str, Any]:
    rank, _ = rank_and_size()
    return {way.__name__: [way(Mixed(seed), folder) for seed in (5 * rank, 0)] for way in WAYS}


def check(by_rank: list[dict[str, Any]]) -> None:
    plain = Mixed(0)
    initial = plain.state_dict() | {"passing": plain.passing}
    for way in WAYS:
        (different, equal), (other, other_equal) = (results[way.__name__] for results in by_rank)
        assert_same_bits(different, equal, way.__name__)
        assert_same_bits(other, other_equal, way.__name__)
        if different[0] is not None:
            assert_same_bits(dict(different[0]), dict(initial), way.__name__)
            assert_same_bits(dict(other[0]), dict(initial), way.__name__)
        assert len(different[1]) == STEPS
        for name in initial:
            if name != "running":  # changed by each rank's last forward; all ranks take rank 0's in the next forward
                assert_same_bits(different[2][name], other[2][name], f"{way.__name__}: {name}")
