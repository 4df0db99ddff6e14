"""Trains a causal language model on the lines of a JSON file with transformers' Trainer, as ``run_clm.py`` of its
examples does. Knows nothing of PatrickStar.
"""

import math
from dataclasses import dataclass
from itertools import chain

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class ScriptArguments:
    model_name_or_path: str
    train_file: str
    validation_file: str
    block_size: int = 32


def main():
    script_args, args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(args.seed)
    files = {"train": script_args.train_file, "validation": script_args.validation_file}
    raw = load_dataset("json", data_files=files)
    tokenizer = AutoTokenizer.from_pretrained(script_args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(script_args.model_name_or_path)

    def tokenize(rows):
        return tokenizer(rows["text"])

    def group(rows):
        tokens = list(chain(*rows["input_ids"]))
        size = script_args.block_size
        blocks = [tokens[begin : begin + size] for begin in range(0, len(tokens) // size * size, size)]
        return {"input_ids": blocks, "labels": blocks}

    with args.main_process_first(desc="tokenization"):
        tokenized = raw.map(tokenize, batched=True, remove_columns=raw["train"].column_names)
        data = tokenized.map(group, batched=True, remove_columns=tokenized["train"].column_names)

    def preprocess_logits_for_metrics(logits, labels):
        return logits.argmax(dim=-1)

    def compute_metrics(prediction):
        found, wanted = prediction
        return {"accuracy": float((found[:, :-1] == wanted[:, 1:]).mean())}

    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data["train"] if args.do_train else None,
        eval_dataset=data["validation"] if args.do_eval else None,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
    )
    if args.do_train:
        result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        trainer.save_model()
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
    if args.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    trainer.create_model_card(tasks="text-generation")


if __name__ == "__main__":
    main()
