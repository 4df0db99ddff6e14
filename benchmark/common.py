"""Shared by the benchmarks: models, batches, tables, and the provenance of a figure."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from patrickstar import _C
from patrickstar.planning.models import enable_checkpointing

_COMMON = {"tie_word_embeddings": False, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}


class Shape(Protocol):
    """Sizes of a causal language model of Hugging Face."""

    hidden: int
    layers: int
    vocab: int
    length: int
    """Tokens per sequence."""

    def num_parameters(self) -> int: ...

    def num_active_parameters(self) -> int:
        """Parameters that a token uses."""
        return self.num_parameters()

    def build(self) -> nn.Module:
        """The model with random weights, without dropout, with ``sdpa`` attention."""
        ...


def model_flops(shape: Shape, batch: int) -> float:
    """Floating point operations of forward and backward of one step, without recomputation.

    6 per token and parameter that it uses, and 6 per layer, hidden unit, position and token for attention (half of it
    is masked).
    """
    tokens = batch * shape.length
    return 6.0 * shape.num_active_parameters() * tokens + 6.0 * shape.layers * shape.hidden * shape.length * tokens


@dataclasses.dataclass(frozen=True)
class GptShape(Shape):
    """A GPT-2 with an untied output layer."""

    hidden: int
    layers: int
    heads: int
    vocab: int
    length: int
    checkpointing: bool

    def num_parameters(self) -> int:
        block = 12 * self.hidden**2 + 13 * self.hidden
        return self.layers * block + (2 * self.vocab + self.length + 2) * self.hidden

    def build(self) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=self.vocab, n_positions=self.length, n_embd=self.hidden, n_layer=self.layers, n_head=self.heads,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **_COMMON,
        )  # fmt: skip
        return _trainable(GPT2LMHeadModel, config, self.checkpointing)


@dataclasses.dataclass(frozen=True)
class LlamaShape(Shape):
    """A Llama or, with biases in attention, a Qwen2: grouped queries, gated MLP, untied output layer."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    length: int
    checkpointing: bool
    attention_bias: bool = False

    def num_parameters(self) -> int:
        keys = self.hidden // self.heads * self.kv_heads
        attention = 2 * self.hidden**2 + 2 * self.hidden * keys + self.attention_bias * (self.hidden + 2 * keys)
        block = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * block + (2 * self.vocab + 1) * self.hidden

    def build(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

        kind, model = (Qwen2Config, Qwen2ForCausalLM) if self.attention_bias else (LlamaConfig, LlamaForCausalLM)
        config = kind(
            vocab_size=self.vocab, hidden_size=self.hidden, intermediate_size=self.intermediate,
            num_hidden_layers=self.layers, num_attention_heads=self.heads, num_key_value_heads=self.kv_heads,
            max_position_embeddings=self.length, **_COMMON,
        )  # fmt: skip
        return _trainable(model, config, self.checkpointing)


@dataclasses.dataclass(frozen=True)
class MixtureShape(Shape):
    """A Qwen3-MoE: grouped queries with norms, gated experts in every layer, untied output layer."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    active_experts: int
    intermediate: int
    """Hidden units of an expert."""
    vocab: int
    length: int
    checkpointing: bool

    def num_parameters(self) -> int:
        return self._with_experts(self.experts)

    def num_active_parameters(self) -> int:
        return self._with_experts(self.active_experts)

    def _with_experts(self, count: int) -> int:
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim + 2 * self.head_dim
        router = self.hidden * self.experts
        block = attention + router + 3 * count * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * block + (2 * self.vocab + 1) * self.hidden

    def build(self) -> nn.Module:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        config = Qwen3MoeConfig(
            vocab_size=self.vocab, hidden_size=self.hidden, num_hidden_layers=self.layers, head_dim=self.head_dim,
            num_attention_heads=self.heads, num_key_value_heads=self.kv_heads, num_experts=self.experts,
            num_experts_per_tok=self.active_experts, moe_intermediate_size=self.intermediate, norm_topk_prob=True,
            max_position_embeddings=self.length, **_COMMON,
        )  # fmt: skip
        return _trainable(Qwen3MoeForCausalLM, config, self.checkpointing)


@dataclasses.dataclass(frozen=True)
class GptOssShape(MixtureShape):
    """A gpt-oss: biases, attention sinks, a sliding window in every other layer, FlexAttention."""

    def _with_experts(self, count: int) -> int:
        width = self.heads * self.head_dim
        keys = self.kv_heads * self.head_dim
        attention = 2 * self.hidden * (width + keys) + width + 2 * keys + self.hidden + self.heads
        router = (self.hidden + 1) * self.experts
        expert = (self.hidden + 1) * 2 * self.intermediate + (self.intermediate + 1) * self.hidden
        block = attention + router + count * expert + 2 * self.hidden
        return self.layers * block + (2 * self.vocab + 1) * self.hidden

    def build(self) -> nn.Module:
        from transformers import GptOssConfig, GptOssForCausalLM

        config = GptOssConfig(
            vocab_size=self.vocab, hidden_size=self.hidden, num_hidden_layers=self.layers, head_dim=self.head_dim,
            num_attention_heads=self.heads, num_key_value_heads=self.kv_heads, num_local_experts=self.experts,
            num_experts_per_tok=self.active_experts, intermediate_size=self.intermediate, **_COMMON,
        )  # fmt: skip
        return _trainable(GptOssForCausalLM, config, self.checkpointing, "flex_attention")


def _llama_8b(layers: int) -> LlamaShape:
    return LlamaShape(4096, layers, 32, 8, 14336, 128256, 4096, checkpointing=True)


def _qwen3_30b(layers: int) -> MixtureShape:
    return MixtureShape(2048, layers, 32, 4, 128, 128, 8, 768, 151936, 4096, checkpointing=True)


def _trainable(model_class: Any, config: Any, checkpointing: bool, attention: str = "sdpa") -> nn.Module:
    config._attn_implementation = attention
    model = model_class(config)
    if checkpointing:
        enable_checkpointing(model)
    return model


SHAPES: dict[str, GptShape | LlamaShape | MixtureShape] = {
    "tiny": GptShape(128, 4, 4, 1024, 64, checkpointing=True),
    "tiny-llama": LlamaShape(128, 4, 4, 2, 384, 1024, 64, checkpointing=True),
    "tiny-mixture": MixtureShape(128, 4, 4, 2, 32, 8, 2, 64, 1024, 64, checkpointing=True),
    "0.1b": GptShape(768, 12, 12, 50304, 1024, checkpointing=True),
    "0.4b": GptShape(1024, 24, 16, 50304, 1024, checkpointing=True),
    "1.5b": GptShape(1600, 48, 25, 50304, 1024, checkpointing=True),
    "4.3b": GptShape(2304, 64, 16, 50304, 1024, checkpointing=True),
    "6.3b": GptShape(3072, 53, 16, 50304, 1024, checkpointing=True),
    # Llama-3.1-8B, and its first layers, of which a disk of 64 GiB has room for a checkpoint
    "llama-8b": _llama_8b(32),
    "llama-8b-14-layers": _llama_8b(14),
    "10.5b": GptShape(4096, 50, 16, 50304, 1024, checkpointing=True),
    "qwen-14b": LlamaShape(
        5120, 48, 40, 8, 13824, 152064, 4096, checkpointing=True, attention_bias=True
    ),  # Qwen2.5-14B
    "16.1b": GptShape(4096, 78, 16, 50304, 1024, checkpointing=True),
    "18.5b": GptShape(4096, 90, 16, 50304, 1024, checkpointing=True),
    "21b": GptShape(8192, 25, 64, 50304, 1024, checkpointing=True),
    "25b": GptShape(8192, 30, 64, 50304, 1024, checkpointing=True),
    "31b": GptShape(8192, 37, 64, 50304, 1024, checkpointing=True),
    "42b": GptShape(8192, 51, 64, 50304, 1024, checkpointing=True),
    "60b": GptShape(9216, 58, 72, 50304, 1024, checkpointing=True),
    "68b": GptShape(9216, 66, 72, 50304, 1024, checkpointing=True),
    "110b": GptShape(9216, 107, 72, 50304, 1024, checkpointing=True),
    # Qwen3-30B-A3B, and its first layers
    "qwen3-30b-a3b": _qwen3_30b(48),
    "qwen3-30b-8-layers": _qwen3_30b(8),
    "gpt-oss-20b": GptOssShape(2880, 24, 64, 8, 64, 32, 4, 2880, 201088, 4096, checkpointing=True),
    # Llama-3.1-70B
    "llama-70b": LlamaShape(8192, 80, 64, 8, 28672, 128256, 4096, checkpointing=True),
}
LLAMAS = [name for name, shape in SHAPES.items() if isinstance(shape, LlamaShape)]


def token_batch(shape: Shape, batch: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random tokens as inputs and labels."""
    tokens = torch.randint(0, shape.vocab, (batch, shape.length), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def table(columns: Sequence[tuple[str, int, str]], rows: Iterable[Sequence[Any]]) -> list[str]:
    """A line of titles and a line per row.

    A column is (title, width, format); a width below 0 aligns left. None is an empty cell.
    """

    def line(cells: Iterable[str]) -> str:
        pairs = zip(cells, columns, strict=True)
        return "".join(f"{cell:{'<' if width < 0 else '>'}{abs(width)}}" for cell, (_, width, _) in pairs).rstrip()

    def cells(row: Sequence[Any]) -> Iterable[str]:
        return ("" if value is None else format(value, kind) for value, (*_, kind) in zip(row, columns, strict=True))

    return [line(title for title, *_ in columns), *(line(cells(row)) for row in rows)]


def gib(num_bytes: float | None) -> float | None:
    """GiB, for a cell of :func:`table`."""
    return None if num_bytes is None else num_bytes / 2**30


def show(text: str) -> None:
    """Prints progress to stderr at once, so that a run that ends early leaves its figures."""
    print(text, file=sys.stderr, flush=True)


def command_line(module: str) -> str:
    """The command of this process, which runs ``module``."""
    return f"python -m {module} {shlex.join(sys.argv[1:])}"


def synchronize() -> None:
    """Waits for the GPU's computing stream, if there is a GPU. Copies in other streams may go on into the next step."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def provenance() -> dict[str, Any]:
    """Hardware, versions, this process's command and commit. Opens the GPU if there is one.

    ``PATRICKSTAR_COMMIT`` names the commit where there is no git.
    """
    return {
        "command": command_line("benchmark.run"),
        "commit": os.environ.get("PATRICKSTAR_COMMIT") or _commit(), "cpu": _cpu_model(),
        "num_cpus": _C.num_available_cpus(),
        "host_memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none", "isa": _C.optim.isa(),
        "torch_version": torch.__version__, "cuda_version": torch.version.cuda or "none",
        "python_version": platform.python_version(),
    }  # fmt: skip


def _commit() -> str:
    """The checkout's commit, with a mark if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return done.stdout.strip() or "unknown"


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    """Returns ``function(*args)`` from a new process; function, arguments and result are pickled.

    Raises:
        RuntimeError: the process ended before it returned; its traceback is on stderr.
    """
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_send, args=(sender, function, args))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"its process ended with {process.exitcode}") from None
    finally:
        process.join()


def _send(sender: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    sender.send(function(*args))
    sender.close()
    sys.stderr.flush()
    os._exit(0)  # closing an engine would first copy the model out of its chunks
