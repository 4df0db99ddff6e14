"""Proof that experts which ranks divide give the same results, one module of each kind at a time."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from patrickstar.experts.exchange import ExpertRanks
from patrickstar.experts.exchanged import ExchangedExperts, expert_params, find_experts
from patrickstar.module.specimen import copy_specimen, kind_of, take_specimen
from patrickstar.parallel.computed import Computed, differences, gradient_of, not_callable, not_equal
from patrickstar.ranks.distributed import RankGroups
from patrickstar.ranks.emulated import run_emulated
from patrickstar.ranks.mesh import Axis, Mesh, MeshRanks

_KEY = "expert_parallel"
_INPUTS = ("its input", "its routing weights")
_TOKENS_PER_RANK = 6
_NUM_CHOSEN = 2


def prove_experts(module: nn.Module, size: int) -> None:
    """Raises ValueError, which names a module, if its experts compute something else once divided. Changes nothing.

    Args:
        module: the user's.
        size: ranks that divide the experts in training; so many are emulated as the smallest divisor above 1.
    """
    size = next(factor for factor in range(2, size + 1) if size % factor == 0)
    kinds = {kind_of(child): (name, child) for name, child in find_experts(module, size).items()}
    for name, child in kinds.values():
        try:
            specimen = take_specimen(child)
            trial = _Trial(specimen, size)
            plain = trial.compute_whole()
        except Exception as error:  # the user's code may raise anything
            raise not_callable(name, child, error, "experts that ranks divide", _KEY) from error
        found = trial.differences(plain)
        if found:
            raise not_equal(name, child, found, "once ranks divide it", _KEY)


class _Trial:
    """Calls of one module with random tokens."""

    def __init__(self, specimen: nn.Module, size: int):
        self._specimen, self._size = specimen, size
        num_tokens, num_experts = _TOKENS_PER_RANK * size, specimen.num_experts
        generator = torch.Generator().manual_seed(0)
        self._hidden = torch.randn(num_tokens, _width(specimen), generator=generator, device="cpu")
        scores = torch.rand(num_tokens, num_experts, generator=generator, device="cpu")
        weights, self._index = scores.topk(min(_NUM_CHOSEN, num_experts))
        self._weights = weights
        self._factors = torch.randn(num_tokens, 1, generator=generator, device="cpu")

    def compute_whole(self) -> Computed:
        """All tokens, by the module as it is."""
        module = copy_specimen(self._specimen)
        return self._compute(module, slice(None))

    def differences(self, plain: Computed) -> list[str]:
        """A text for each difference between ``plain`` and each rank's tokens by experts of all ranks."""
        try:
            return differences(plain, self._compute_divided())
        except Exception as error:  # the user's code may raise anything
            return [f"it fails with {type(error).__name__}: {error}"]

    def _compute_divided(self) -> Computed:
        parts = run_emulated(self._size, self._compute_on_rank)
        names = parts[0].gradients
        joined = {name: torch.cat([part.gradients[name] for part in parts]) for name in names}
        scaled = {name: value if name in _INPUTS else value * self._size for name, value in joined.items()}
        return Computed(sum(part.loss for part in parts), sum(part.other_loss for part in parts), scaled)

    def _compute_on_rank(self, ranks: RankGroups) -> Computed:
        experts = ExpertRanks(MeshRanks(ranks, Mesh(data=self._size)).along(Axis.DATA))
        module = copy_specimen(self._specimen)
        for name, param in expert_params(module).items():
            own = param.detach().chunk(self._size)[experts.index]
            module._parameters[name] = nn.Parameter(own, requires_grad=param.requires_grad)
        ExchangedExperts(experts).add(module)
        begin = experts.index * _TOKENS_PER_RANK
        return self._compute(module, slice(begin, begin + _TOKENS_PER_RANK))

    def _compute(self, module: nn.Module, tokens: slice) -> Computed:
        hidden = self._hidden[tokens].clone().requires_grad_()
        weights = self._weights[tokens].clone().requires_grad_()
        index, factors = self._index[tokens], self._factors[tokens]

        def loss_of(hidden: Tensor) -> Tensor:
            return (module(hidden, index, weights) * factors).square().sum()

        loss = loss_of(hidden)
        loss.backward()
        other = loss_of(2 * hidden.detach())
        gradients = dict(zip(_INPUTS, (hidden.grad, weights.grad), strict=True))
        trained = {name: param for name, param in expert_params(module).items() if param.requires_grad}
        gradients |= {name: gradient_of(param) for name, param in trained.items()}
        return Computed(loss.item(), other.item(), gradients)


def _width(experts: nn.Module) -> int:
    """Features of a token."""
    first = next(param for name, param in expert_params(experts).items() if not name.endswith("_bias"))
    return first.shape[1 if experts.is_transposed else 2]
