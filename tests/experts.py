"""Experts of transformers, and the errors of their implementations."""

import copy
from collections.abc import Iterator

import torch

from patrickstar.module.fused_experts import fuse_experts

HIDDEN, INTERMEDIATE, EXPERTS, CHOSEN = 64, 48, 8, 3


def gpt_oss_experts() -> torch.nn.Module:
    """Experts in float32 whose gates and up projections are often clamped."""
    import transformers
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    sizes = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_local_experts": EXPERTS}
    return _initialized(GptOssExperts, transformers.GptOssConfig(**sizes, swiglu_limit=2.0))


def qwen_experts() -> torch.nn.Module:
    """Experts in float32 that compute SwiGLU without biases."""
    import transformers
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": INTERMEDIATE, "num_experts": EXPERTS}
    return _initialized(Qwen3MoeExperts, transformers.Qwen3MoeConfig(**sizes))


def _initialized(experts_class: type[torch.nn.Module], config: object) -> torch.nn.Module:
    config._experts_implementation = "grouped_mm"
    experts = experts_class(config)
    for name, param in experts.named_parameters():
        torch.nn.init.normal_(param, std=1.0 if name.endswith("bias") else 0.2)
    return experts


def routed(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Chosen experts, of which the last gets no token, and routing weights."""
    index = torch.stack([torch.randperm(EXPERTS - 1)[:CHOSEN] for _ in range(num_tokens)])
    return index, torch.rand(num_tokens, CHOSEN).softmax(1)


def errors(
    experts: torch.nn.Module, device: str, dtype: torch.dtype, num_tokens: int
) -> Iterator[tuple[str, float, float, float]]:
    """Relative errors of the output and of each gradient: of eager experts, of ``grouped_mm`` and of fused experts.

    The reference computes eagerly in float64.
    """
    experts = experts.to(device, dtype)
    index, weights = (each.to(device) for each in routed(num_tokens))
    weights = weights.to(dtype)
    hidden, direction = (torch.randn(num_tokens, HIDDEN).to(device, dtype) for _ in range(2))
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
