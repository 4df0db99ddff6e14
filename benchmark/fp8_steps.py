"""FP8 step by step beside torchao's layers and bfloat16: losses and parameters of a Llama on a CPU.

The Llama trains on bytes of CPython's language reference with an engine and exact AdamW, once for each way of
multiplying: bfloat16, the engine's recipes, and torchao's ``Float8Linear`` in an engine without ``fp8``, emulated as it
offers. All begin with the same values and get the same batches.

* loss: of a step's batch, before the step.
* distance: root mean square of the parameters' difference after a step, over that of bfloat16's total change so far.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmark.common import LlamaShape, provenance, table
from benchmark.eight_bit import byte_rows, differences, distance
from patrickstar import initialize_engine
from patrickstar.choices import Fp8Recipe

_SHAPE = LlamaShape(768, 2, 12, 12, 2048, 256, 128, checkpointing=False)  # tokens are bytes
_RECIPES = (Fp8Recipe.ROWWISE.value, Fp8Recipe.TENSORWISE.value)
"""Recipes of both projects."""
_HYPERPARAMETERS: dict[str, Any] = {"lr": 5e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
Values = list[torch.Tensor]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=4)


@dataclasses.dataclass
class _Run:
    """A training's losses by step, and its float32 parameters before the first step and after the shown ones."""

    losses: list[float]
    values: dict[int, Values]


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Trains one after another.

    Raises:
        SystemExit: torchao is not installed.
    """
    try:
        version = importlib.metadata.version("torchao")
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit("torchao is not installed; pip install torchao") from None
    shown = sorted({1, 2, 5, 10, 20, 50, args.steps} & set(range(1, args.steps + 1)))
    exact = _train(args, shown, lambda model: model, {})
    rows = [{"name": "bfloat16", "losses": {step: exact.losses[step - 1] for step in shown}}]
    for recipe in Fp8Recipe:
        ours = _train(args, shown, lambda model: model, {"fp8": {"recipe": recipe.value}})
        rows.append(_row(f"PatrickStar, {recipe.value}", ours, exact, shown))
        if recipe.value not in _RECIPES:
            continue
        theirs = _train(args, shown, _converter(recipe.value), {})
        rows.append(_row(f"torchao {version}, {recipe.value}", theirs, exact, shown))
        rows[-2]["to_torchao"] = _distances(ours, theirs, exact, shown)
    return {"case": "fp8_steps", "steps": args.steps, "batch_size": args.batch_size, "rows": rows, **provenance()}


def _train(args: argparse.Namespace, shown: list[int], change: Callable[[nn.Module], nn.Module], section: Any) -> _Run:
    torch.manual_seed(0)
    model = change(_SHAPE.build())
    rows = byte_rows(_SHAPE.length)
    order = torch.randint(len(rows), (args.steps, args.batch_size), generator=torch.Generator().manual_seed(1))
    config = {"optimizer": {"type": "AdamW", "params": _HYPERPARAMETERS}, "bf16": {"enabled": True}, **section}
    engine, optimizer = initialize_engine(lambda: model, config=config | {"gradient_clipping": 1.0})
    found = _Run([], {0: _values(engine)})
    for step, chosen in enumerate(order, start=1):
        loss = engine(input_ids=rows[chosen], labels=rows[chosen]).loss
        engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.losses.append(loss.item())
        if step in shown:
            found.values[step] = _values(engine)
    engine.close()
    return found


def _values(engine: Any) -> Values:
    return [value.float().clone() for value in engine.state_dict().values()]


def _converter(recipe: str) -> Callable[[nn.Module], nn.Module]:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    return lambda model: convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: name != "lm_head"
    )


def _row(name: str, one: _Run, exact: _Run, shown: list[int]) -> dict[str, Any]:
    losses = {step: one.losses[step - 1] for step in shown}
    return {"name": name, "losses": losses, "to_bfloat16": _distances(one, exact, exact, shown)}


def _distances(one: _Run, other: _Run, exact: _Run, shown: list[int]) -> dict[int, float]:
    return {
        step: distance(one.values[step], other.values[step], differences(exact.values[step], exact.values[0]))
        for step in shown
    }


def format_table(result: dict[str, Any]) -> str:
    steps = list(result["rows"][0]["losses"])
    columns = [("", -44, ""), *((f"step {step}", 10, "") for step in steps)]
    lines = []
    for row in result["rows"]:
        lines.append([row["name"] + ": loss", *(f"{loss:.4f}" for loss in row["losses"].values())])
        for key, title in (("to_bfloat16", "distance to bfloat16"), ("to_torchao", "distance to torchao")):
            if key in row:
                lines.append(["    " + title, *(f"{value:.2g}" for value in row[key].values())])
    head = f"Llama of {_SHAPE.num_parameters():,} parameters, batches of {result['batch_size']} x {_SHAPE.length} bytes"
    return "\n".join([head, *table(columns, lines)])
