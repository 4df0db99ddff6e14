import random
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, Trainer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from patrickstar.integrations.transformers import PatrickStarTrainerMixin
from tests.integrations.trainer_runs import Run, train
from tests.models import llama as tiny_llama

WORDS = [f"w{number}" for number in range(60)]
SPECIAL = ["<pad>", "<end>", "<unknown>"]


class PatrickStarSFTTrainer(PatrickStarTrainerMixin, SFTTrainer):
    pass


class PatrickStarDPOTrainer(PatrickStarTrainerMixin, DPOTrainer):
    pass


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    tokens = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    return tiny_llama(vocab=len(SPECIAL) + len(WORDS), length=64, **tokens)


def tokenizer() -> PreTrainedTokenizerFast:
    tokens = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*SPECIAL, *WORDS])}, SPECIAL[2]))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokens, **names)


def sentences(count: int, longest: int, seed: int) -> list[str]:
    chosen = random.Random(seed)
    return [" ".join(chosen.choices(WORDS, k=chosen.randint(3, longest))) for _ in range(count)]


def prompts(count: int, longest: int, seed: int) -> list[str]:
    return [f"{sentence} " for sentence in sentences(count, longest, seed)]


def options(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "learning_rate": 3e-3,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }


def sft(cls: type[Trainer], folder: Path, **own: Any) -> Run:
    """Prompts are so long that a rank of a sequence may have no token that counts."""
    data = Dataset.from_dict({"prompt": prompts(16, 20, 1), "completion": sentences(16, 9, 2)})
    args = SFTConfig(**options(folder), max_length=32)
    return train(cls(llama(), args, train_dataset=data, eval_dataset=data.select(range(6)),
                     processing_class=tokenizer(), **own))  # fmt: skip


def dpo(cls: type[Trainer], folder: Path, *, lora: bool = False, **own: Any) -> Run:
    """With a reference model, or with the model without its adapters as reference."""
    kinds = {"prompt": prompts(16, 9, 1), "chosen": sentences(16, 9, 2), "rejected": sentences(16, 14, 3)}
    data, model = Dataset.from_dict(kinds), llama()
    if lora:
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    args = DPOConfig(**options(folder), max_length=32)
    return train(cls(model, None if lora else llama(), args, train_dataset=data, eval_dataset=data.select(range(6)),
                     processing_class=tokenizer(), **own))  # fmt: skip


def run_shared(folder: Path) -> dict[str, Run]:
    own = {"patrickstar_config": {"sequence_parallel": {"size": 2, "mode": "zigzag"}, "default_chunk_size": 8192}}
    return {
        "sft": sft(PatrickStarSFTTrainer, folder / "sft", **own),
        "dpo": dpo(PatrickStarDPOTrainer, folder / "dpo", **own),
        "dpo_lora": dpo(PatrickStarDPOTrainer, folder / "dpo_lora", lora=True, **own),
    }
