"""A stand-in for vLLM, which the tests do not install: the part of its interface that TRL's colocated mode calls.

Weights come by ``load_weights`` alone, and are lost in each sleep of level 2.
"""

import contextlib
import dataclasses
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from transformers import AutoConfig, AutoModelForCausalLM
from trl.generation import vllm_generation

from tests.distributed import free_port


@dataclasses.dataclass
class SamplingParams:
    n: int
    repetition_penalty: float
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_tokens: int
    logprobs: int


class Model:
    """A model as vLLM's worker has it; knows the buckets that it was given."""

    def __init__(self, folder: str):
        self.module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
        self.buckets: list[int] = []

    def load_weights(self, weights: Any) -> None:
        given = dict(weights)
        self.module.load_state_dict(given, strict=False)
        self.buckets.append(len(given))

    @torch.no_grad()
    def discard(self) -> None:
        for param in self.module.parameters():
            param.fill_(float("nan"))


class LLM:
    """``while_awake`` is called at each generation."""

    def __init__(self, model: str, seed: int, enable_sleep_mode: bool, **_options: Any):
        self.model = Model(model)
        self.model.discard()
        worker = types.SimpleNamespace(model_runner=types.SimpleNamespace(model=self.model))
        self.llm_engine = types.SimpleNamespace(model_executor=types.SimpleNamespace(driver_worker=worker))
        self.generator = torch.Generator().manual_seed(seed)
        self.awake = set() if enable_sleep_mode else {"weights", "kv_cache"}
        self.while_awake = lambda: None

    def sleep(self, level: int) -> None:
        assert level == 2
        self.awake.clear()
        self.model.discard()

    def wake_up(self, tags: list[str]) -> None:
        self.awake.update(tags)

    def reset_prefix_cache(self) -> None:
        assert "weights" in self.awake

    @torch.no_grad()
    def generate(self, prompts: list[dict[str, Any]], sampling_params: SamplingParams, use_tqdm: bool) -> list[Any]:
        assert self.awake == {"weights", "kv_cache"}
        self.while_awake()
        return [self._complete(prompt["prompt_token_ids"], sampling_params) for prompt in prompts]

    def _complete(self, prompt: list[int], sampling: SamplingParams) -> Any:
        tokens, logprobs = list(prompt), []
        end = self.model.module.config.eos_token_id
        while len(logprobs) < sampling.max_tokens and (not logprobs or tokens[-1] != end):
            logits = self.model.module(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            chances = (logits / sampling.temperature).log_softmax(-1)
            (token,) = chances.exp().multinomial(1, generator=self.generator).tolist()
            tokens.append(token)
            logprobs.append({token: types.SimpleNamespace(rank=1, logprob=chances[token].item())})
        output = types.SimpleNamespace(token_ids=tokens[len(prompt) :], logprobs=logprobs)
        return types.SimpleNamespace(prompt_token_ids=prompt, outputs=[output])


@contextlib.contextmanager
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gives TRL the stand-in. Ends the process group that Accelerate makes for it."""
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_generation, "LLM", LLM, raising=False)
    monkeypatch.setattr(vllm_generation, "SamplingParams", SamplingParams, raising=False)
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in place.items():  # as TRL sets them, for good
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else Accelerate changes PyTorch's threads, and with them the bits
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    dist.destroy_process_group()
