"""Loss at equal samples: a global batch that follows the measured gradient noise scale, beside fixed batches.

    python -m benchmark.elastic_batches --samples 24576 --seeds 3 --text docs

A small GPT (bytes, AdamW, cosine schedule) on this repository's text trains on one CPU rank. Every ``LOOK_STEPS`` steps
the changing runs are ordered the largest batch up to the noise scale, through the orders that a scheduler gives. The
evaluation is the mean loss of held-out text.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from patrickstar import _C, initialize_engine
from patrickstar.elastic import (
    BatchRange,
    ElasticLoader,
    ElasticRun,
    ElasticSampler,
    LearningRateRule,
    Orders,
    ScaledRates,
    serve_rendezvous,
)

LENGTH, WIDTH, LAYERS, HEADS = 64, 96, 2, 4
MICRO_BATCH, BASE, MOST = 8, 16, 128
LR, WARMUP_STEPS, RISE_STEPS = 2e-3, 50, 20
LOOK_STEPS = 20


@dataclasses.dataclass(frozen=True)
class Case:
    """Batches of a run."""

    name: str
    first: int
    """The batch at the start; rates are given for :data:`BASE` and follow ``rule``."""
    most: int
    rule: LearningRateRule


CASES = (
    Case("16, fixed", BASE, BASE, LearningRateRule.NONE),
    Case("16 to 128 by noise, square root", BASE, MOST, LearningRateRule.SQUARE_ROOT),
    Case("16 to 128 by noise, rate stays", BASE, MOST, LearningRateRule.NONE),
    Case("128 from the start, square root", MOST, MOST, LearningRateRule.SQUARE_ROOT),
)


@dataclasses.dataclass
class Curve:
    """Results of a run by processed samples."""

    losses: dict[int, float] = dataclasses.field(default_factory=dict)
    """Evaluations."""
    batches: dict[int, int] = dataclasses.field(default_factory=dict)
    noise: dict[int, float | None] = dataclasses.field(default_factory=dict)
    num_steps: int = 0


class SmallGpt(nn.Module):
    """A causal transformer over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean loss of the next bytes; ``tokens``: int64 [batch, LENGTH + 1]."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        hidden = self.tokens(inputs) + self.places(torch.arange(LENGTH))
        logits = self.head(self.layers(hidden, mask=mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_text(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """(training rows, held-out rows) of the folder's Markdown: int64 [rows, LENGTH + 1]; a tenth is held out."""
    text = b"".join(path.read_bytes() for path in sorted(folder.rglob("*.md")))
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    rows = rows[: len(rows) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    held = torch.arange(len(rows)) % 10 == 0
    return rows[~held], rows[held][:256]


def train(case: Case, seed: int, num_samples: int, rows: torch.Tensor, held: torch.Tensor) -> Curve:
    """Trains until ``num_samples`` samples are processed."""

    def build() -> nn.Module:
        torch.manual_seed(seed)
        return SmallGpt()

    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": (0.9, 0.95), "weight_decay": 0.1}},
        "gradient_clipping": 1.0,
        "steps_per_print": 0,
    }
    engine, optimizer = initialize_engine(build, config=config)
    batches = BatchRange(min=BASE, base=BASE, max=case.most, rule=case.rule, warmup_steps=RISE_STEPS)
    total = num_samples / BASE
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / total))),
    )
    sampler = ElasticSampler(len(rows), batches, MICRO_BATCH, seed)
    rates = ScaledRates(optimizer, batches, schedule)
    store = serve_rendezvous()
    orders = Orders(store)
    run = ElasticRun(
        engine, {"sampler": sampler, "rates": rates}, rendezvous=f"127.0.0.1:{store.port}", look_seconds=1e-9
    )
    run.batch.set(case.first)
    run.batch.set_ranks(0, 1)
    curve, data = Curve(), TensorDataset(rows)
    marks = iter(range(0, num_samples + 1, num_samples // 12))
    mark = next(marks)
    while run.num_samples < num_samples:
        for micro_batches in ElasticLoader(data, sampler):
            if run.num_samples >= mark:
                curve.losses[mark] = evaluate(engine, held)
                curve.batches[mark], curve.noise[mark] = sampler.global_batch, run.batch.noise.scale
                mark = next(marks)
            optimizer.zero_grad()
            for (tokens,) in micro_batches:
                engine.backward(engine(tokens) / len(micro_batches))
            optimizer.step()
            rates.step()
            if case.first < case.most and (run.num_steps + 1) % LOOK_STEPS == 0:
                order(orders, run, case.most)
            run.step_done()
            if run.num_samples >= num_samples:
                break
    curve.losses[num_samples], curve.num_steps = evaluate(engine, held), run.num_steps
    curve.batches[num_samples], curve.noise[num_samples] = sampler.global_batch, run.batch.noise.scale
    run.end()
    engine.close()
    return curve


def order(orders: Orders, run: ElasticRun, most: int) -> None:
    """Orders the largest multiple of two micro-batches up to the noise scale; none while it is unknown."""
    scale = run.batch.noise.scale
    if scale is not None:
        step = 2 * MICRO_BATCH
        orders.resize(1, global_batch=min(most, max(BASE, int(scale) // step * step)))


def evaluate(engine: nn.Module, held: torch.Tensor) -> float:
    """Mean loss of the held-out rows."""
    with torch.no_grad(), _C.HostAllocations():
        return sum(engine(part).item() * len(part) for part in held.split(64)) / len(held)


def show(found: dict[str, list[Curve]], num_samples: int) -> None:
    """Prints losses at equal samples as means over seeds, and the batches and noise scales of each run."""
    marks = sorted(next(iter(found.values()))[0].losses)
    print(f"{num_samples} samples, {len(next(iter(found.values())))} seeds; mean held-out loss (range) by samples\n")
    for name, curves in found.items():
        print(f"{name}: {', '.join(str(curve.num_steps) for curve in curves)} steps")
        for mark in marks:
            losses = [curve.losses[mark] for curve in curves]
            noise = ["unknown" if curve.noise[mark] is None else f"{curve.noise[mark]:.0f}" for curve in curves]
            print(
                f"  {mark:6d}  {sum(losses) / len(losses):.4f} ({min(losses):.4f} to {max(losses):.4f})  batch "
                f"{' '.join(str(curve.batches[mark]) for curve in curves)}  noise scale {' '.join(noise)}"
            )
        print(flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all cases; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmark.elastic_batches", description=__doc__)
    parser.add_argument("--samples", type=int, default=24_576, help="of each run")
    parser.add_argument("--seeds", type=int, default=3, help="of the model and the data's order")
    parser.add_argument("--text", type=Path, default=Path("docs"), help="folder of Markdown files")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows, held = read_text(options.text)
    print(f"{len(rows)} rows of {LENGTH} bytes; {sum(one.numel() for one in SmallGpt().parameters())} parameters\n")
    found: dict[str, list[Curve]] = {}
    for case in CASES:
        found[case.name] = [train(case, seed, options.samples, rows, held) for seed in range(options.seeds)]
        show({case.name: found[case.name]}, options.samples)
    return 0


if __name__ == "__main__":
    sys.exit(main())
