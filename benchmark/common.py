"""What the benchmarks share: a GPT to train, and where a figure comes from."""

from __future__ import annotations

import dataclasses
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from patrickstar import _C


@dataclasses.dataclass(frozen=True)
class GptShape:
    """Hidden size, layers, heads, vocabulary, sequence length."""

    hidden: int
    layers: int
    heads: int
    vocab: int
    length: int
    checkpointing: bool

    def num_parameters(self) -> int:
        """Of an untied Hugging Face GPT-2 of this shape."""
        block = 12 * self.hidden**2 + 13 * self.hidden
        return self.layers * block + (2 * self.vocab + self.length + 2) * self.hidden

    def model_flops(self, batch: int) -> float:
        """Floating point operations of forward and backward of one step: 6 per parameter and token, and 6 per layer,
        hidden unit, position and token for attention (causal masks counted by half, recomputation not counted).
        """
        tokens = batch * self.length
        return 6.0 * self.num_parameters() * tokens + 6.0 * self.layers * self.hidden * self.length * tokens


SHAPES = {
    "tiny": GptShape(128, 4, 4, 1024, 64, checkpointing=True),
    "0.1b": GptShape(768, 12, 12, 50304, 1024, checkpointing=True),
    "1.5b": GptShape(1600, 48, 25, 50304, 1024, checkpointing=True),
    "4.3b": GptShape(2304, 64, 16, 50304, 1024, checkpointing=True),
    "6.3b": GptShape(3072, 53, 16, 50304, 1024, checkpointing=True),
    "10.5b": GptShape(4096, 50, 16, 50304, 1024, checkpointing=True),
    "16.1b": GptShape(4096, 78, 16, 50304, 1024, checkpointing=True),
    "18.5b": GptShape(4096, 90, 16, 50304, 1024, checkpointing=True),
    "21b": GptShape(8192, 25, 64, 50304, 1024, checkpointing=True),
    "68b": GptShape(9216, 66, 72, 50304, 1024, checkpointing=True),
}


def build_gpt(shape: GptShape) -> nn.Module:
    """A Hugging Face GPT-2 with an output layer of its own and no dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=shape.vocab,
        n_positions=shape.length,
        n_embd=shape.hidden,
        n_layer=shape.layers,
        n_head=shape.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=False,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    config._attn_implementation = "sdpa"
    model = GPT2LMHeadModel(config)
    if shape.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def token_batch(shape: GptShape, batch: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random tokens, which are their own labels."""
    tokens = torch.randint(0, shape.vocab, (batch, shape.length), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def command_line(module: str) -> str:
    """The command that runs ``module`` with this process's arguments."""
    return f"python -m {module} {shlex.join(sys.argv[1:])}"


def provenance(command: str | None = None) -> dict[str, Any]:
    """Hardware, versions, command (default: this one) and commit. ``PATRICKSTAR_COMMIT`` names the commit where there
    is no git. Opens the GPU if there is one.
    """
    return {
        "command": command or command_line("benchmark.run"),
        "commit": os.environ.get("PATRICKSTAR_COMMIT") or _commit(),
        "cpu": _cpu_model(),
        "num_cpus": _C.num_available_cpus(),
        "host_memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "isa": _C.optim.isa(),
        "torch_version": torch.__version__,
        "cuda_version": torch.version.cuda or "none",
        "python_version": platform.python_version(),
    }


def _commit() -> str:
    """The checkout's commit, marked when files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return done.stdout.strip() or "unknown"


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
