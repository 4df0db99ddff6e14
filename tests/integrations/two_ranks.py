"""All runs on two ranks of this folder's tests, in one start of the ranks."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Seq2SeqTrainingArguments, Trainer

from patrickstar.integrations.transformers import PatrickStarSeq2SeqTrainer, PatrickStarTrainer
from tests.integrations import first_rank, test_accelerate, trl_runs
from tests.integrations.trainer_runs import (
    PatrickStarSftLikeTrainer,
    SftLikeTrainer,
    Tokens,
    arguments,
    engine_config,
    gpt2,
    make_trainer,
    train,
)
from tests.models import t5


def run_all(folder: Path) -> dict[str, Any]:
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    results = {"trainer": trainers(folder), "loops": test_accelerate.run_pair(folder / "accelerate")}
    results |= {"generated": generated(folder / "generated"), "lora": lora(folder / "lora")}
    results["lora_on_a_mesh"] = lora_on_a_mesh(folder / "lora_on_a_mesh")
    results["first_rank"] = first_rank.run(folder / "first_rank")
    results["trl"] = trl_runs.run_shared(folder / "trl")
    dist.barrier()
    return results


def trainers(folder: Path) -> dict[str, Any]:
    """DDP under the unmodified trainer, ours, ours resumed, and the same for a subclass. Ours evaluates before
    training; transformers 5.23 takes a model that was evaluated for one already in DDP and would not average its
    gradients.
    """
    options = {"eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 4}
    results = {"plain": train(make_trainer(Trainer, folder / "plain", **options | {"save_strategy": "no"}))}
    results["own"] = train(make_trainer(PatrickStarTrainer, folder / "own", **options), evaluate_first=True)
    checkpoint = str(folder / "own" / "checkpoint-4")
    results["resumed"] = train(make_trainer(PatrickStarTrainer, folder / "own", **options), resume=checkpoint)
    options["save_strategy"] = "no"
    shared = {"sequence_parallel": {"size": 2, "mode": "zigzag"}}
    results["shared"] = train(make_trainer(PatrickStarTrainer, folder / "shared", config=shared, **options))
    mesh = {"parallelism_config": ParallelismConfig(tp_size=2)}
    results["matrices"] = train(make_trainer(PatrickStarTrainer, folder / "matrices", **mesh, **options))
    results["sft_plain"] = train(make_trainer(SftLikeTrainer, folder / "sft", **options))
    results["sft"] = train(make_trainer(PatrickStarSftLikeTrainer, folder / "sft", **options))
    return results


def generated(folder: Path) -> list[list[int]]:
    torch.manual_seed(0)
    args = Seq2SeqTrainingArguments(
        str(folder),
        predict_with_generate=True,
        generation_max_length=6,
        use_cpu=True,
        per_device_eval_batch_size=1,
        report_to="none",
        disable_tqdm=True,
    )
    model = t5()
    model.generation_config.eos_token_id = list(range(0, 97, 3))
    trainer = PatrickStarSeq2SeqTrainer(model, args, patrickstar_config={"default_chunk_size": 4096})
    tokens = trainer.predict(Tokens(6, 2)).predictions.tolist()
    trainer.close()
    return tokens


def lora(folder: Path) -> dict[str, Any]:
    def adapted() -> PeftModel:
        torch.manual_seed(1)
        return get_peft_model(gpt2(), LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))

    runs = []
    for resume in (None, str(folder / "checkpoint-2")):
        args = arguments(folder, num_train_epochs=1, save_strategy="steps", save_steps=2)
        config = engine_config(device_memory=400_000)
        trainer = PatrickStarTrainer(adapted(), args, train_dataset=Tokens(12, 1), patrickstar_config=config)
        runs.append(train(trainer, resume=resume))
    loaded = PeftModel.from_pretrained(gpt2(), folder / "checkpoint-3").state_dict()
    files = sorted(path.name for path in (folder / "checkpoint-3").iterdir())
    return {"runs": runs, "loaded": loaded, "files": files}


def lora_on_a_mesh(folder: Path) -> dict[str, Any]:
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    runs = []
    for resume in (None, str(folder / "checkpoint-2")):
        torch.manual_seed(1)
        model = get_peft_model(gpt2(), LoraConfig(r=4, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True))
        more = {
            "eval_strategy": "epoch",
            "save_strategy": "epoch",
            "num_train_epochs": 3,
            **(best if not resume else {}),
        }
        config = engine_config(device_memory=400_000, tensor_parallel={"columns": 2})
        trainer = PatrickStarTrainer(
            model,
            arguments(folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, **more),
            train_dataset=Tokens(8, 1),
            eval_dataset=Tokens(4, 1),
            patrickstar_config=config,
        )
        trainer.train(resume_from_checkpoint=resume)
        runs.append((trainer.state.best_model_checkpoint, trainer.engine.state_dict()))
        trainer.close()
    return {"runs": runs, "folder": folder}
