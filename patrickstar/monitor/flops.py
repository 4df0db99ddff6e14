"""The floating point operations of one step, counted in its forward as PyTorch dispatches them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from torch.utils.flop_counter import FlopCounterMode

from patrickstar.config.monitors import FlopsProfilerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfiledStep:
    """Facts about the profiled step, beside its forward."""

    step: int
    """Number of the optimizer step, counted from 1."""
    seconds: float
    """Time from its first forward to the end of its optimizer step."""
    num_tokens: int
    """Tokens of this rank in the step, over all its micro-batches."""
    num_parameters: int
    """Number of elements in all parameters of the model."""
    num_trainable: int
    """Number of these elements that require a gradient."""


class FlopsProfiler:
    """Counts the forwards of one step. Operations without a formula in PyTorch (element-wise work, kernels of other
    packages) count as zero; ``torch.utils.flop_counter`` lists the formulas.
    """

    def __init__(self, options: FlopsProfilerConfig):
        self._options = options
        self._by_module: dict[str, int] = {}
        self._num_forwards = 0

    @contextlib.contextmanager
    def count(self) -> Iterator[None]:
        """Context around each forward of the step."""
        with FlopCounterMode(display=False) as counter:
            yield
        self._num_forwards += 1
        for module, by_operator in counter.get_flop_counts().items():
            self._by_module[module] = self._by_module.get(module, 0) + sum(by_operator.values())

    @property
    def forward_flops(self) -> int:
        """Operations of all forwards so far."""
        return self._by_module.get("Global", 0)

    def text(self, step: ProfiledStep) -> str:
        """A summary of a few lines. Backward counts as twice the forward, as if all parameters train, plus
        ``recompute_fwd_factor`` times the forward.
        """
        flops = self.forward_flops * (3 + self._options.recompute_fwd_factor)
        estimate = (4 * step.num_parameters + 2 * step.num_trainable) * step.num_tokens
        lines = [
            f"flops of step {step.step}: {_tera(flops)} in {step.seconds:.3f} s, {flops / step.seconds / 1e12:.3g} "
            "TFLOPS on this rank (counting keeps the host busy: the step is longer than others)",
            f"  parameters   {step.num_parameters}, of which {step.num_trainable} train",
            f"  forward      {_tera(self.forward_flops)} in {self._num_forwards} micro-batches",
        ]
        if step.num_tokens > 0:
            lines.append(f"  by formula   {_tera(estimate)}: 6 per parameter and token, 4 where it does not train")
        if self._options.detailed:
            lines += self._module_lines()
        return "\n".join(lines) + "\n"

    def write(self, text: str) -> None:
        """Writes to ``output_file``, or to standard output."""
        if self._options.output_file is None:
            print(text, end="", flush=True)
            return
        path = Path(self._options.output_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def _module_lines(self) -> list[str]:
        modules = [
            (name.split("."), flops) for name, flops in self._by_module.items() if name != "Global" and flops > 0
        ]
        root = _root([path for path, _ in modules])
        by_depth: dict[int, list[tuple[int, str]]] = {}
        for path, flops in modules:
            if len(path) > len(root):
                by_depth.setdefault(len(path) - len(root), []).append((flops, ".".join(path[len(root) :])))
        lines = []
        for depth, found in sorted(by_depth.items()):
            if 0 <= self._options.module_depth < depth:
                break
            for flops, name in sorted(found, key=lambda item: -item[0])[: self._options.top_modules]:
                share = 100 * flops / self.forward_flops
                lines.append(f"  depth {depth:<6} {name}: {_tera(flops)} in forward, {share:.1f} %")
        return lines


def _root(paths: list[list[str]]) -> list[str]:
    """The module that contains all of the operations; wrappers of the model are left out of module names."""
    root: list[str] = []
    while len(inside := {path[len(root)] for path in paths if len(path) > len(root)}) == 1:
        root += inside
    return root


def _tera(flops: float) -> str:
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if flops >= unit:
            return f"{flops / unit:.4g} {name}FLOP"
    return f"{flops:.4g} FLOP"
