"""AdamW with moments of 8 bits step by step beside bitsandbytes' and torchao's, given the same gradients.

A GPT-2 trains on CPython's language reference with ``torch.optim.AdamW`` in float32. Each other optimizer begins with
the same values and gets the gradients of its matrices other than embeddings. So only their own rounding makes them
differ. Packages that are not installed are left out (``pip install bitsandbytes torchao``).

* distance: root mean square of the parameters' difference to PyTorch's, over that of PyTorch's total change so far.
* momentum, variance: the same for the moments after the last step, over PyTorch's moments.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import itertools
import pydoc_data.topics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from benchmark.common import GptShape, provenance, table
from patrickstar import initialize_engine

_SHAPE = GptShape(hidden=256, layers=4, heads=4, vocab=256, length=128, checkpointing=False)  # tokens are bytes
_BATCH = 8
_HYPERPARAMETERS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
Moments = list[tuple[torch.Tensor, torch.Tensor]]


class Updated(Protocol):
    """Parameters and their optimizer; all tensors are float32."""

    params: Sequence[nn.Parameter]

    def step(self, grads: Sequence[torch.Tensor]) -> None:
        """One gradient per parameter."""
        ...

    def values(self) -> list[torch.Tensor]: ...

    def moments(self) -> Moments:
        """Momentum and variance of each parameter."""
        ...


class ByTorch:
    """An optimizer with the interface of ``torch.optim``; ``moments_of`` reads a parameter's state."""

    def __init__(
        self,
        values: Sequence[torch.Tensor],
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        moments_of: Callable[[dict[str, Any]], tuple[torch.Tensor, torch.Tensor]],
    ):
        self.params = [nn.Parameter(value.clone()) for value in values]
        self._optimizer, self._moments_of = make(self.params), moments_of

    def step(self, grads: Sequence[torch.Tensor]) -> None:
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad.clone()
        self._optimizer.step()

    def values(self) -> list[torch.Tensor]:
        return [param.detach() for param in self.params]

    def moments(self) -> Moments:
        return [self._moments_of(self._optimizer.state[param]) for param in self.params]


class _Products(nn.Module):
    """A module whose gradients are its arguments."""

    def __init__(self, values: Sequence[torch.Tensor]):
        super().__init__()
        self.params = nn.ParameterList(nn.Parameter(value.clone()) for value in values)

    def forward(self, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        return sum(((param * grad).sum() for param, grad in zip(self.params, grads, strict=True)), torch.zeros(()))


class ByEngine:
    def __init__(self, values: Sequence[torch.Tensor], states: str):
        optimizer = {"type": "AdamW", "params": _HYPERPARAMETERS, "states": states}
        self._module = _Products(values)
        self._engine, self._optimizer = initialize_engine(lambda: self._module, config={"optimizer": optimizer})
        self.params = list(self._module.params)

    def step(self, grads: Sequence[torch.Tensor]) -> None:
        self._optimizer.zero_grad()
        self._engine.backward(self._engine(list(grads)))
        self._optimizer.step()

    def values(self) -> list[torch.Tensor]:
        return list(self._engine.state_dict().values())

    def moments(self) -> Moments:
        states = self._optimizer.state_dict()["state"]
        return [(state["exp_avg"], state["exp_avg_sq"]) for _, state in sorted(states.items())]


def _of_torch(state: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return state["exp_avg"], state["exp_avg_sq"]


def _of_torchao(state: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return state["exp_avg"].dequantize(), state["exp_avg_sq"].dequantize()


def _of_bitsandbytes(state: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    functional = importlib.import_module("bitsandbytes.functional")
    pairs = ((state[f"state{i}"], state[f"absmax{i}"], state[f"qmap{i}"]) for i in (1, 2))
    first, second = (
        functional.dequantize_blockwise(codes, absmax=absmax, code=code, blocksize=256) for codes, absmax, code in pairs
    )
    return first, second


def _others(values: Sequence[torch.Tensor]) -> Iterator[tuple[str, Updated]]:
    yield "PatrickStar, fp32", ByEngine(values, "fp32")
    yield "PatrickStar, bf16", ByEngine(values, "bf16")
    yield "PatrickStar, 8bit", ByEngine(values, "8bit")
    for package, module, of_state in (
        ("bitsandbytes", "bitsandbytes.optim", _of_bitsandbytes),
        ("torchao", "torchao.optim", _of_torchao),
    ):
        try:
            optimizers = importlib.import_module(module)
        except ImportError:
            continue
        name = f"{package} {importlib.metadata.version(package)}, AdamW8bit"
        yield name, ByTorch(values, lambda params, of=optimizers: of.AdamW8bit(params, **_HYPERPARAMETERS), of_state)


def byte_rows(length: int) -> torch.Tensor:
    """CPython's language reference as rows of ``length`` bytes, int64."""
    text = "\n\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    tokens = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    return tokens[: len(tokens) // length * length].view(-1, length)


def distance(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], scale: Sequence[torch.Tensor]) -> float:
    """Root mean square of the difference, over that of ``scale``."""
    squares = [sum(float((part.double() ** 2).sum()) for part in parts) for parts in (differences(ours, theirs), scale)]
    return (squares[0] / squares[1]) ** 0.5


def differences(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``ones - others``, one by one."""
    return [one - other.view_as(one) for one, other in zip(ones, others, strict=True)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=200)


def run(args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    model = _SHAPE.build()
    rows = byte_rows(_SHAPE.length)
    order = torch.randint(len(rows), (args.steps, _BATCH), generator=torch.Generator().manual_seed(1))
    exact = torch.optim.AdamW(model.parameters(), **_HYPERPARAMETERS)
    embeddings = {model.get_input_embeddings().weight, model.transformer.wpe.weight}
    matrices = [param for param in model.parameters() if param.dim() == 2 and param not in embeddings]
    begin = [param.detach().clone() for param in matrices]
    others = dict(_others(begin))
    shown = sorted({1, 10, args.steps // 4, args.steps // 2, args.steps} & set(range(1, args.steps + 1)))
    distances: dict[str, dict[int, float]] = {name: {} for name in others}
    for step, chosen in enumerate(order, start=1):
        exact.zero_grad()
        model(input_ids=rows[chosen], labels=rows[chosen]).loss.backward()
        grads = [param.grad.clone() for param in matrices]
        exact.step()
        for name, other in others.items():
            other.step(grads)
            if step in shown:
                values = [param.detach() for param in matrices]
                distances[name][step] = distance(other.values(), values, differences(values, begin))
    true = list(zip(*(_of_torch(exact.state[param]) for param in matrices), strict=True))
    found = []
    for name, other in others.items():
        moments = list(zip(*other.moments(), strict=True))
        gaps = [distance(mine, its, its) for mine, its in zip(moments, true, strict=True)]
        found.append({"name": name, "distance": distances[name], "momentum": gaps[0], "variance": gaps[1]})
    numel = sum(map(torch.numel, itertools.chain(matrices)))
    return {"case": "eight_bit", "steps": args.steps, "numel": numel, "rows": found, **provenance()}


def format_table(result: dict[str, Any]) -> str:
    steps = list(result["rows"][0]["distance"])
    columns = [("", -36, ""), *((f"step {step}", 11, ".2e") for step in steps)]
    columns += [("momentum", 12, ".2e"), ("variance", 12, ".2e")]
    rows = ([row["name"], *row["distance"].values(), row["momentum"], row["variance"]] for row in result["rows"])
    head = (
        f"{result['numel']:,} parameters, {result['steps']} steps, lr {_HYPERPARAMETERS['lr']}; distances to "
        "torch.optim.AdamW in float32 over its total change"
    )
    return "\n".join([head, *table(columns, rows)])
