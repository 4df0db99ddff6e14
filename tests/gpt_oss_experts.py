"""Experts of transformers' gpt-oss, and the errors of their implementations."""

import copy
from collections.abc import Iterator

import torch

from patrickstar.module.fused_experts import fuse_experts

HIDDEN, INTERMEDIATE, EXPERTS, CHOSEN = 64, 48, 8, 3


def make_experts(implementation: str = "grouped_mm") -> torch.nn.Module:
    """Experts in float32 whose gates and up projections are often clamped."""
    import transformers
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = transformers.GptOssConfig(
        hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN,
        swiglu_limit=2.0,
    )  # fmt: skip
    config._experts_implementation = implementation
    experts = GptOssExperts(config)
    for name, param in experts.named_parameters():
        torch.nn.init.normal_(param, std=1.0 if name.endswith("bias") else 0.2)
    return experts


def errors(device: str, dtype: torch.dtype, num_tokens: int) -> Iterator[tuple[str, float, float, float]]:
    """Relative errors of the output and of each gradient: of eager experts, of ``grouped_mm`` and of fused experts.

    The reference computes eagerly in float64. One expert gets no token.
    """
    experts = make_experts().to(device, dtype)
    index = torch.stack([torch.randperm(EXPERTS - 1)[:CHOSEN] for _ in range(num_tokens)]).to(device)
    hidden, direction = (torch.randn(num_tokens, HIDDEN).to(device, dtype) for _ in range(2))
    weights = torch.rand(num_tokens, CHOSEN).softmax(1).to(device, dtype)
    found = []
    for implementation in ("exact", "eager", "grouped_mm", "fused"):
        module, to = copy.deepcopy(experts), torch.float64 if implementation == "exact" else dtype
        module.config = copy.deepcopy(module.config)
        module.config._experts_implementation = "eager" if implementation in ("exact", "eager") else "grouped_mm"
        if implementation == "fused":
            assert fuse_experts(module).names == [""]
        leaves = {"hidden": hidden.to(to).requires_grad_(), "weights": weights.to(to).requires_grad_()}
        leaves.update(module.to(to).named_parameters())
        out = module(leaves["hidden"], index, leaves["weights"])
        gradients = torch.autograd.grad(out, list(leaves.values()), direction.to(to))
        found.append({"output": out.detach(), **dict(zip(leaves, gradients, strict=True))})
    exact, *others = found
    for name, right in exact.items():
        eager, grouped, fused = (((each[name].double() - right).norm() / right.norm()).item() for each in others)
        yield name, eager, grouped, fused
