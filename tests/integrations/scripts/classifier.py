"""Trains a classifier of sentences in CSV files with transformers' Trainer, as ``run_glue.py`` of its examples does.
Knows nothing of PatrickStar.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class ScriptArguments:
    model_name_or_path: str
    train_file: str
    validation_file: str
    test_file: str


def main():
    script_args, args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(args.seed)
    files = {"train": script_args.train_file, "validation": script_args.validation_file, "test": script_args.test_file}
    raw = load_dataset("csv", data_files=files)
    labels = sorted(raw["train"].unique("label"))
    config = AutoConfig.from_pretrained(script_args.model_name_or_path, num_labels=len(labels))
    tokenizer = AutoTokenizer.from_pretrained(script_args.model_name_or_path)
    model = AutoModelForSequenceClassification.from_pretrained(script_args.model_name_or_path, config=config)
    model.config.label2id = {str(label): index for index, label in enumerate(labels)}
    model.config.id2label = {index: str(label) for index, label in enumerate(labels)}

    def preprocess(rows):
        return tokenizer(rows["sentence"], truncation=True)

    with args.main_process_first(desc="tokenization"):
        data = raw.map(preprocess, batched=True)

    def compute_metrics(prediction: EvalPrediction):
        return {"accuracy": float((np.argmax(prediction.predictions, axis=1) == prediction.label_ids).mean())}

    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=compute_metrics,
    )
    if args.do_train:
        result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        trainer.save_model()
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
    if args.do_eval:
        trainer.save_metrics("eval", trainer.evaluate(eval_dataset=data["validation"]))
    if args.do_predict:
        predictions = trainer.predict(data["test"].remove_columns("label"), metric_key_prefix="predict").predictions
        lines = [f"{index}\t{labels[item]}\n" for index, item in enumerate(np.argmax(predictions, axis=1))]
        (Path(args.output_dir) / "predict_results.txt").write_text("index\tprediction\n" + "".join(lines))
    trainer.create_model_card(tasks="text-classification")


if __name__ == "__main__":
    main()
