"""Proof at start that the rewritten model computes the same as the model that was given.

    survey = prove_rewrites(module, config, mode)      # on one rank, before the parameters are in chunks

Sharded sequences, sharded matrices, divided experts, modules in tiles and the fused loss replace code of the user's
model. Whether they fit is shown only by computing. A copy of the first layers (``module/specimen.py``) computes a few
tokens forward and backward, once unchanged and once rewritten by the classes that training uses. Ranks are threads
(``ranks/emulated.py``). Losses, the influence of the first token and gradients must agree up to rounding in float32.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from patrickstar import _C
from patrickstar.activations.remedies import change_activations
from patrickstar.config import Config, ExpertParallelConfig, LossComputation, MatrixMode, SequenceMode
from patrickstar.module.specimen import copy_specimen, take_specimen
from patrickstar.parallel.axes import make_calls, mesh_of
from patrickstar.parallel.computed import Computed, differences, gradient_of, gradients_of
from patrickstar.parallel.expert_proof import prove_experts
from patrickstar.parallel.sharded_matrices import make_matrices
from patrickstar.parallel.sharded_values import ShardedNames
from patrickstar.parallel.tile_proof import prove_tiles
from patrickstar.parallel.trial_batch import cut_vocabulary, has_loss, trial_batches, with_another_first_token
from patrickstar.ranks.distributed import RankGroups
from patrickstar.ranks.emulated import run_emulated
from patrickstar.ranks.mesh import MeshRanks
from patrickstar.sequence.hugging_face import check_model, find_model
from patrickstar.sequence.survey import Survey, output_of, survey_model

_LEAST_LENGTH = 8
_MOST_RANKS = 8
_TILE_TOKENS = 5


class Rewrite(enum.Enum):
    """A rewritten part of a model; the value is its key in the configuration."""

    SEQUENCES = "sequence_parallel"
    MATRICES = "tensor_parallel"
    TILES = "activations.tile_tokens"
    LOSS = "activations.loss"


_SHOWN_AS = {
    Rewrite.SEQUENCES: "sequences that ranks share",
    Rewrite.MATRICES: "matrices sharded over ranks",
    Rewrite.TILES: "modules computed in tiles",
    Rewrite.LOSS: "the fused loss",
}


def rewrites_of(config: Config) -> list[Rewrite]:
    """The rewrites that the configuration asks for."""
    asked = {
        Rewrite.SEQUENCES: config.sequence_parallel.size > 1,
        Rewrite.MATRICES: config.tensor_parallel.num_ranks > 1,
        Rewrite.TILES: config.activations.tile_tokens > 0,
        Rewrite.LOSS: config.activations.loss is LossComputation.FUSED and config.tensor_parallel.num_ranks == 1,
    }
    return [rewrite for rewrite, is_asked in asked.items() if is_asked]


def prove_rewrites(module: nn.Module, config: Config, mode: MatrixMode) -> Survey:
    """Compares the rewritten module with ``module``, which is left unchanged.

    Args:
        module: the user's, as built; its values may be on the meta device.
        config: of the engine. With ``prove_rewrites`` false nothing is compared.
        mode: strategy of tensor parallelism.

    Returns:
        The survey that sequence parallelism needs.

    Raises:
        ValueError: the rewritten module computes something else, or the module cannot be called with tokens.
    """
    if config.expert_parallel.size > 1 and config.prove_rewrites:
        with _as_it_was(module), _C.HostAllocations():
            prove_experts(module, config.expert_parallel.size)
    model, rewrites = find_model(module), rewrites_of(config)
    is_shared = Rewrite.SEQUENCES in rewrites
    if not rewrites or not (config.prove_rewrites or is_shared):
        return Survey()
    if model is None or rewrites == [Rewrite.TILES]:  # modules in tiles are proven one by one
        with _as_it_was(module), _C.HostAllocations():
            prove_tiles(module, config.activations.tile_tokens)
        return Survey()
    if is_shared:
        check_model(model)
    with _as_it_was(module), _C.HostAllocations():
        try:
            trial = _find_trial(module, config, mode, rewrites)
        except _CannotBeCalledError:
            if config.prove_rewrites:
                raise
            return Survey()
        survey = trial.survey() if is_shared else Survey()
        if config.prove_rewrites:
            trial.prove(rewrites, survey)
        return survey


class _CannotBeCalledError(ValueError):
    """The unchanged model cannot be called; the cause says why."""


def _find_trial(module: nn.Module, config: Config, mode: MatrixMode, rewrites: list[Rewrite]) -> _Trial:
    """The first trial in which the unchanged module can be called.

    Some models index layers by the number in their configuration. Others have no finite gradient for a padding token.
    """
    smallest = _trial_config(config, rewrites, mode)
    unit = 2 * smallest.sequence_parallel.size * smallest.tensor_parallel.columns
    shape = max(smallest.tensor_parallel.rows, 2), unit * math.ceil(_LEAST_LENGTH / unit)
    failure: Exception | None = None
    for take in (lambda: take_specimen(module, cut=cut_vocabulary), lambda: take_specimen(module, all_layers=True)):
        try:
            specimen = take()
        except Exception as error:  # copying may raise anything
            failure = failure or error
            continue
        _attend_on_the_host(_model_of(specimen))
        for batch in trial_batches(_model_of(specimen), *shape):
            try:
                return _Trial(specimen, config, mode, batch)
            except Exception as error:  # the user's code may raise anything
                failure = failure or error
    raise _CannotBeCalledError(
        f"{type(find_model(module)).__name__} could not be called with tokens ({type(failure).__name__}: {failure}), "
        f"which {_listed(rewrites)} would be compared by; leave {_keys(rewrites)} out, or set "
        '"prove_rewrites" to false where you know it to be right'
    ) from failure


class _Trial:
    """A copy of one module, called unchanged when the trial is made.

    Raises:
        Exception: the copy cannot be called.
    """

    def __init__(self, specimen: nn.Module, config: Config, mode: MatrixMode, batch: dict[str, Any]):
        self._specimen = specimen
        self._config = config
        self._mode = mode
        self._batch = batch
        self._name = type(_model_of(specimen)).__name__
        self._plain = self._compute_plainly()
        if not all(gradient.sum().isfinite() for gradient in self._plain.gradients.values()):
            raise ValueError("its gradients are not finite")

    def survey(self) -> Survey:
        """The model's survey.

        Raises:
            ValueError: its sequences cannot be sharded.
        """
        inputs = {name: value for name, value in self._batch.items() if name != "labels"}
        return survey_model(_model_of(copy_specimen(self._specimen)), inputs)

    def prove(self, rewrites: list[Rewrite], survey: Survey) -> None:
        """Raises ValueError, which names the differing rewrite, unless all results agree."""
        found = self._differences(rewrites, survey)
        if not found:
            return
        for rewrite in rewrites if len(rewrites) > 1 else []:
            alone = self._differences([rewrite], survey)
            if alone:
                rewrites, found = [rewrite], alone
                break
        raise ValueError(
            f"{self._name} computes something else with {_listed(rewrites)}: {'; '.join(found)}. Leave "
            f'{_keys(rewrites)} out (or set "prove_rewrites" to false where you know that this is no fault)'
        )

    def _differences(self, rewrites: list[Rewrite], survey: Survey) -> list[str]:
        try:
            return differences(self._plain, self._compute_rewritten(rewrites, survey))
        except (ValueError, _C.StateError):
            raise
        except Exception as error:
            return [f"it fails with {type(error).__name__}: {error}"]

    def _compute_plainly(self) -> Computed:
        module = copy_specimen(self._specimen)
        model = _model_of(module)
        loss = _loss_of(model(**self._batch))
        loss.backward()
        with torch.no_grad():
            other = _loss_of(model(**with_another_first_token(self._batch)))
        gradients = gradients_of(module)
        return Computed(loss.item(), other.item(), gradients)

    def _compute_rewritten(self, rewrites: list[Rewrite], survey: Survey) -> Computed:
        config = _trial_config(self._config, rewrites, self._mode)
        modules = [copy_specimen(self._specimen) for _ in range(config.ranks_per_sample)]

        def compute(ranks: RankGroups) -> Computed:
            module = modules[ranks.context.rank]
            return _compute_on_rank(module, config, ranks, survey, self._batch)

        parts = run_emulated(config.ranks_per_sample, compute)
        num_matrices = config.tensor_parallel.num_ranks
        first, *others = parts[::num_matrices]  # one rank of each sequence shard
        gradients = {
            name: functools.reduce(torch.add, (part.gradients[name] for part in others), gradient)
            for name, gradient in first.gradients.items()
        }
        if has_loss(_model_of(self._specimen)):
            return Computed(parts[0].loss, parts[0].other_loss, gradients)
        return Computed(sum(part.loss for part in parts), sum(part.other_loss for part in parts), gradients)


def _compute_on_rank(
    module: nn.Module, config: Config, ranks: RankGroups, survey: Survey, batch: dict[str, Any]
) -> Computed:
    """One rank's results, by the engine's own classes; gradients are those of full parameters."""
    mesh = MeshRanks(ranks, mesh_of(config, len(ranks.members)))
    matrices = make_matrices(config, mesh)
    matrices.divide(module)
    change_activations(module, config.activations, len(ranks.members))
    calls = make_calls(module, config, mesh, matrices, lambda: None, lambda: 0, survey)
    model = _model_of(module)

    def call(given: dict[str, Any]) -> torch.Tensor:
        with calls.call((), given) as mine:
            return _loss_of(mine.result(model(*mine.args, **mine.kwargs)))

    loss = call(batch)
    loss.backward()
    # With autograd: without it fewer parts are rewritten.
    other = call(with_another_first_token(batch)).detach()
    return Computed(loss.item(), other.item(), _whole_gradients(module, matrices.names))


def _whole_gradients(module: nn.Module, names: ShardedNames | None) -> dict[str, torch.Tensor]:
    """Gradients by the names before sharding. Collective over all ranks."""
    if names is None:
        return gradients_of(module)
    wholes: dict[str, torch.Tensor] = {}
    for part in names.parts:
        if part.param.requires_grad:
            wholes |= names.wholes_of(part, gradient_of, torch.device("cpu"))
    return {**wholes, **{name: wholes[known] for name, known in names.tied.items() if known in wholes}}


def _trial_config(config: Config, rewrites: list[Rewrite], mode: MatrixMode) -> Config:
    """The configuration with ``rewrites`` alone, for the fewest ranks that show a fault."""
    sequence, matrices, activations = config.sequence_parallel, config.tensor_parallel, config.activations
    size = _smallest_factor(sequence.size) if Rewrite.SEQUENCES in rewrites else 1
    heads = None
    if sequence.mode is SequenceMode.HYBRID and size > 1:
        heads = _smallest_factor(sequence.ulysses_size or size)
        size = heads * _smallest_factor(max(sequence.size // (sequence.ulysses_size or sequence.size), 1))
    rows, columns = (matrices.rows, matrices.columns) if Rewrite.MATRICES in rewrites else (1, 1)
    if rows * columns * size > _MOST_RANKS:
        rows, columns = _smallest_factor(rows), _smallest_factor(columns)
    return config.model_copy(
        update={
            "sequence_parallel": sequence.model_copy(update={"size": size, "ulysses_size": heads}),
            "tensor_parallel": matrices.model_copy(update={"rows": rows, "columns": columns, "mode": mode}),
            "expert_parallel": ExpertParallelConfig(),
            "activations": activations.model_copy(
                update={
                    "loss": activations.loss if Rewrite.LOSS in rewrites else LossComputation.WHOLE,
                    "tile_tokens": min(activations.tile_tokens, _TILE_TOKENS) if Rewrite.TILES in rewrites else 0,
                }
            ),
        }
    )


def _smallest_factor(number: int) -> int:
    return next((factor for factor in range(2, number + 1) if number % factor == 0), 1)


def _model_of(specimen: nn.Module) -> nn.Module:
    model = find_model(specimen)
    assert model is not None
    return model


def _attend_on_the_host(model: Any) -> None:
    """Replaces an attention implementation that the CPU lacks."""
    if model.config._attn_implementation not in ("eager", "sdpa", None):
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")


def _loss_of(output: Any) -> torch.Tensor:
    """The model's loss, or the sum of squares of its output."""
    loss = output[0] if isinstance(output, tuple) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.dim() == 0:
        return loss
    return output_of(output).float().square().sum()


@contextlib.contextmanager
def _as_it_was(module: nn.Module) -> Iterator[None]:
    """Restores the host's random number generators and the gradients.

    Gradients change if a user's function in a copy uses parameters of the original module.
    """
    states = random.getstate(), np.random.get_state()
    gradients = {param: param.grad for param in module.parameters()}
    for param in gradients:
        param.grad = None
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            yield
    finally:
        for param, gradient in gradients.items():
            param.grad = gradient
        random.setstate(states[0])
        np.random.set_state(states[1])


def _listed(rewrites: list[Rewrite]) -> str:
    return " and ".join(_SHOWN_AS[rewrite] for rewrite in rewrites)


def _keys(rewrites: list[Rewrite]) -> str:
    return " or ".join(rewrite.value for rewrite in rewrites)
