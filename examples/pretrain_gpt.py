"""Pre-trains GPT or BERT of any size on random tokens, text, or token ids. Nothing is downloaded.

Usage:
    python examples/pretrain_gpt.py                                            # a tiny GPT on random tokens
    python examples/pretrain_gpt.py --size 4.3b --batch-size 16 --checkpointing --device-memory 24GiB
    python examples/pretrain_gpt.py --model bert --data book.txt --vocab 8192 --steps 1000 --save-folder run --resume
    torchrun --nproc_per_node=4 examples/pretrain_gpt.py --size 68b --batch-size 16 --checkpointing

The model is built without memory, initialised on the training device, and never whole in any memory. A run resumed from
a checkpoint (--save-folder, --resume) has bitwise the numbers of an uninterrupted one. The number of ranks may change:
if ranks x batch size x accumulation is equal, each step sees the same data. Ctrl-C finishes the step, saves the run
(with --save-folder) and prints the command that resumes it.

--data: a text file or a folder of *.txt is tokenised at each start, by rank 0, within its memory; token 0 ends a text.
Other token ids, or those written by --save-tokens, are read from a .bin file: consecutive little-endian uint16,
memory-mapped by each rank. --help lists all flags; docs/config.md describes the configuration.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable

import environment  # noqa: F401 (first)
import numpy as np
import torch
from pretraining import Pretraining
from pretraining.arguments import RunOptions, parse_arguments
from pretraining.batches import Batches
from pretraining.log import StepFigures, summary_json, summary_text
from pretraining.models import build_model
from pretraining.tokens import Corpus, RandomTokens, TokenSource, make_byte_tokens, map_tokens, text_files, train_bpe
from tqdm import tqdm

from patrickstar import CheckpointError
from patrickstar.command.flags import UsageError
from patrickstar.finetune.ranks import Ranks, joined_ranks
from patrickstar.finetune.recipe import decay_groups
from patrickstar.finetune.usage import StoppedError, make_writable, run_command, shown_path, stop_requests


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """The data of a run."""

    source: TokenSource
    """Source of sequences."""
    tokenizer: str | None = None
    """Tokenizer of a text, as JSON, on rank 0."""


def open_data(options: RunOptions, ranks: Ranks) -> Data:
    """The data that the flags request; rank 0 tokenises a text and broadcasts the tokens.

    Raises:
        ValueError: it is not usable.
    """
    shape = options.shape
    if options.data is None:
        return Data(source=RandomTokens(shape.num_data_tokens, shape.length, options.seed))
    tokenizer = None
    if options.reads_text:
        tokens = None
        if ranks.is_first:
            tokens, tokenizer = make_tokens(options)
        shared = ranks.from_first(None if tokens is None else torch.from_numpy(tokens.view(np.uint8)))
        tokens = shared.numpy().view("<u2")
    else:
        tokens = map_tokens(options.data)
    source = Corpus(tokens, shape.num_data_tokens, shape.length, options.seed, str(options.data))
    return Data(source=source, tokenizer=tokenizer)


def make_tokens(options: RunOptions) -> tuple[np.ndarray, str | None]:
    """A text's tokens and tokenizer; written to ``--save-tokens``."""
    files = text_files(options.data)
    if options.tokenizer == "bytes":
        tokens, tokenizer = make_byte_tokens(files), None
    else:
        tokens, tokenizer = train_bpe(files, options.shape.num_data_tokens)
    if options.save_tokens is not None:
        tokens.tofile(options.save_tokens)
        if tokenizer is not None:
            options.save_tokens.with_suffix(".tokenizer.json").write_text(tokenizer, encoding="utf-8")
    return tokens, tokenizer


class Progress:
    """Collects figures since the last line, and prints a line every ``--log-every`` steps."""

    def __init__(self, options: RunOptions, batches: Batches, ranks: Ranks, say: Callable[[str], None]):
        """``say`` prints a line on rank 0."""
        self._options = options
        self._batches = batches
        self._ranks = ranks
        self._say = say
        self._losses: list[torch.Tensor] = []
        self._started = time.perf_counter()

    def restart_clock(self) -> None:
        """Excludes the time since the last line from the following steps."""
        self._started = time.perf_counter()

    def add(self, step: int, loss: torch.Tensor, lr: float, training: Pretraining) -> None:
        """Call after each step, on all ranks."""
        self._losses.append(loss)
        options, ranks = self._options, self._ranks
        if step % options.log_every and step != options.steps and not saves_after(options, step):
            return
        loss_here = torch.stack(self._losses).double().mean().item()  # waits for the device
        seconds = (time.perf_counter() - self._started) / len(self._losses)
        report = training.report()
        samples = self._batches.samples_per_step
        flops = options.shape.model_flops(report["num_parameters"], self._batches.num_rows)
        figures = StepFigures(
            step=step,
            loss=ranks.means(loss_here)[0],
            grad_norm=report["grad_norm"],
            lr=lr,
            seconds=seconds,
            tokens_per_second=samples * options.shape.length / seconds,
            model_tflops_per_gpu=flops / seconds / 1e12,
        )
        self._say(figures.as_json() if options.json else figures.as_text())
        self._losses.clear()
        self.restart_clock()


def saves_after(options: RunOptions, step: int) -> bool:
    """True if a checkpoint is due."""
    return options.save_folder is not None and (
        step == options.steps or (options.save_every is not None and step % options.save_every == 0)
    )


def pretrain(options: RunOptions, data: Data, ranks: Ranks) -> None:
    """Trains to ``--steps`` and writes the requested output.

    Raises:
        CheckpointError: the run in ``--save-folder`` is another one, or was longer.
        MemoryBudgetError: the model does not fit.
        StoppedError: the user ended the run; it was saved if there is a ``--save-folder``.
    """
    torch.manual_seed(options.seed + ranks.rank)  # the model is rank 0's; each rank has its own dropout
    training = Pretraining(
        lambda: build_model(options.shape),
        options.training,
        model_parameters=decay_groups(options.training.weight_decay),
    )
    batches = Batches(
        source=data.source,
        shape=options.shape,
        num_rows=options.batch * options.training.accumulate,
        rank=ranks.rank,
        num_ranks=ranks.size,
        seed=options.seed,
    )
    state = {"num_steps": 0, "num_samples": 0, "seed": options.seed}
    if options.resume:
        state = training.resume(options.save_folder)
        if state["seed"] != options.seed:
            raise CheckpointError(f"--resume: the run began with --seed {state['seed']}, not {options.seed}; give that")
        if state["num_steps"] >= options.steps:
            made = state["num_steps"]
            raise CheckpointError(f"--resume: {made} steps were made, --steps is {options.steps}; give more")
    first = state["num_steps"] + 1
    shows_bar = ranks.is_first and not options.json
    bar = tqdm(total=options.steps, initial=first - 1, unit="step", mininterval=1.0, disable=not shows_bar)
    progress = Progress(options, batches, ranks, bar.write if shows_bar else ranks.say)
    with bar, stop_requests() as stop:
        for step in range(first, options.steps + 1):
            lr = training.lr
            loss = training.step(batches.after(state["num_samples"]))
            state |= {"num_steps": step, "num_samples": state["num_samples"] + batches.samples_per_step}
            progress.add(step, loss, lr, training)
            bar.update()
            stopped = ranks.sums(stop.is_made)[0] > 0  # all ranks end after the same step
            if saves_after(options, step) or (stopped and options.save_folder is not None):
                training.save(options.save_folder, state)
                progress.restart_clock()
            if stopped and step < options.steps:
                raise StoppedError(step, options.save_folder, by_user=ranks.sums(stop.is_by_user)[0] > 0)
    finish(options, training, data, ranks, num_steps=options.steps - first + 1)


def finish(options: RunOptions, training: Pretraining, data: Data, ranks: Ranks, *, num_steps: int) -> None:
    """Writes plan, weights and summary of a run of ``num_steps``."""
    if options.save_plan is not None and ranks.is_first:
        training.save_plan(options.save_plan)
    if options.export is not None:
        training.export(options.export)
        if ranks.is_first and data.tokenizer is not None:
            (options.export / "tokenizer.json").write_text(data.tokenizer, encoding="utf-8")
    report = training.report()
    ranks.say(summary_json(report, ranks.size) if options.json else summary_text(report, num_steps, ranks.size))
    training.discard()


def main(argv: list[str]) -> int:
    """Runs the script; returns 2 for a wrong argument, 1 if the model or a checkpoint does not fit."""

    def body() -> int:
        try:
            options = parse_arguments(argv, __doc__)
        except ValueError as error:
            raise UsageError(error) from error
        for flag, folder in (("--save-folder", options.save_folder), ("--export", options.export)):
            if folder is not None:
                make_writable(flag, folder)
        with joined_ranks() as ranks:
            try:
                data = open_data(options, ranks)
            except ValueError as error:
                raise UsageError(error) from error
            pretrain(options, data, ranks)
        return 0

    return run_command(body, [shown_path(__file__)], argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
