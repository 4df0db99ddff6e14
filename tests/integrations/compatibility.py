"""The rows of docs/compatibility.md on PEFT, each with the run that shows it.

``python -m tests.integrations.compatibility`` writes the table; test_peft.py runs every row and compares the page.
"""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peft import IA3Config, LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, TaskType, get_peft_model
from torch import nn

from patrickstar import _C
from patrickstar.integrations.weights import adapter_state
from patrickstar.runtime import initialize_engine
from tests.models import llama, token_batch
from tests.training import ADAM, make_config

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
STEPS = 4
_ATTENTION = ["q_proj", "v_proj"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    """PEFT's names."""
    adapt: Callable[[nn.Module], PeftModel]
    """Adapts a new model."""
    precision: str = "fp32"
    """``"bf16"``: losses agree to 1 %, otherwise to 1e-6."""
    checkpointing: bool = False
    """Activation checkpointing."""
    note: str = ""


def _lora(**options: Any) -> Callable[[nn.Module], PeftModel]:
    options = {"r": 4, "lora_alpha": 8, "target_modules": _ATTENTION, **options}
    return lambda model: get_peft_model(model, LoraConfig(task_type=TaskType.CAUSAL_LM, **options))


def _several(model: nn.Module) -> PeftModel:
    adapted = _lora()(model)
    adapted.add_adapter("second", LoraConfig(task_type=TaskType.CAUSAL_LM, r=2, target_modules=["o_proj"]))
    adapted.set_adapter("second")
    return adapted


def _ia3(model: nn.Module) -> PeftModel:
    config = IA3Config(
        task_type=TaskType.CAUSAL_LM, target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    )
    return get_peft_model(model, config)


def _prompt(model: nn.Module) -> PeftModel:
    return get_peft_model(model, PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4))


def _prefix(model: nn.Module) -> PeftModel:
    return get_peft_model(model, PrefixTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4))


ROWS = [
    Row(name="LoRA on linear layers", adapt=_lora()),
    Row(name="LoRA on all linear layers", adapt=_lora(target_modules="all-linear", use_rslora=True)),
    Row(
        name="LoRA on embeddings",
        adapt=_lora(target_modules=["embed_tokens", *_ATTENTION]),
        note="the embedding itself is saved with the adapter, as PEFT does it",
    ),
    Row(name="LoRA with `modules_to_save`", adapt=_lora(modules_to_save=["lm_head"])),
    Row(name='LoRA with biases (`bias="lora_only"`)', adapt=_lora(bias="lora_only")),
    Row(
        name="Several adapters",
        adapt=_several,
        note="all are in the engine; which one trains is settled when the engine is made",
    ),
    Row(name="DoRA", adapt=_lora(use_dora=True)),
    Row(name="IA³", adapt=_ia3),
    Row(name="Prompt tuning", adapt=_prompt),
    Row(name="Prefix tuning", adapt=_prefix),
    Row(name="LoRA, activation checkpointing", adapt=_lora(), checkpointing=True),
    Row(name="LoRA, bfloat16", adapt=_lora(), precision="bf16", note="adapters are kept and saved in float32"),
]

MORE = [
    ("`generate` between steps", "as without an engine", "test_generation_between_steps"),
    ("AdaLoRA, `update_and_allocate` after each step", "as without an engine", "test_ranks_that_adapt_to_gradients"),
    ("`merge_and_unload` after `engine.close()`", "as without an engine", "test_merging_after_the_engine"),
    ("Trainer on two ranks, resumed", "bit-equal; adapters are saved once, in PEFT's form", "test_two_ranks"),
    (
        "Trainer, best adapter loaded at the end; `model.add_adapter` of transformers",
        "adapters alone are saved, and read back into the engine",
        "test_the_best_adapter_under_the_trainer",
    ),
    ("Frozen base", "no optimizer state, never copied back to the host", "test_the_base_is_only_read"),
    (
        "Base in 4 or 8 bits: `quantization` ([guides/qlora.md](guides/qlora.md))",
        "LoRA and DoRA train as on the dequantised values; `tests/integrations/test_qlora.py`",
        "",
    ),
    (
        "Base that bitsandbytes has quantised",
        "not tested: its weights stay with PyTorch on the GPU, outside of the budget's chunks",
        "",
    ),
]
"""Rows beside the ways of adapting, each with its test."""


def batches(count: int = STEPS) -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield token_batch(generator)


def build(row: Row) -> PeftModel:
    torch.manual_seed(0)
    base = llama()
    torch.manual_seed(1)
    model = row.adapt(base)
    if row.checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    return model


@dataclasses.dataclass
class Adapted:
    losses: list[float]
    adapters: dict[str, torch.Tensor]
    report: dict[str, Any]


def train_plain(row: Row) -> Adapted:
    model = build(row)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], **ADAM)
    losses = []
    for batch in batches():
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Adapted(losses, {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}, {})


def train_in_engine(row: Row, folder: Path) -> Adapted:
    config = make_config(row.precision, gradient_clipping=0.1, default_chunk_size=4096, device_memory=600_000)
    engine, optimizer = initialize_engine(
        lambda: build(row), 0, config, lambda model: [param for param in model.parameters() if param.requires_grad]
    )
    with engine:
        losses = []
        for batch in batches():
            loss = engine.module(**batch).loss
            engine.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        with _C.HostAllocations():
            engine.module.save_pretrained(folder, state_dict=adapter_state(engine))
        values = {name: engine.full_value(p) for name, p in engine.named_parameters() if p.requires_grad}
        return Adapted(losses, values, engine.report())


def page() -> str:
    rows = [f"| {row.name} | {'1 %' if row.precision == 'bf16' else '1e-6'} | yes | {row.note} |" for row in ROWS]
    more = [f"| {name} | {what} | {f'`{test}`' if test else ''} |" for name, what, test in MORE]
    return "\n".join(
        [
            "# Compatibility with PEFT",
            "",
            "Written by `python -m tests.integrations.compatibility`; each row of the first table is a run of",
            "`tests/integrations/test_peft.py`: losses are compared with plain AdamW, adapters are saved from the open",
            "engine and loaded by `PeftModel.from_pretrained`.",
            "",
            "| method | losses equal plain training to | saved and reloaded bit for bit | note |",
            "|---|---|---|---|",
            *rows,
            "",
            "| with them | what holds | test in `test_peft.py` |",
            "|---|---|---|",
            *more,
            "",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(page())
