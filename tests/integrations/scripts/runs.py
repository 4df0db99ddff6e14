"""Runs a script with and without ``patrickstar run`` in one process.

``python -m tests.integrations.scripts.runs FOLDER SCRIPT`` leaves each run's files in ``FOLDER/runs``.
"""

import json
import random
import sys
from pathlib import Path

import torch
import trl
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from patrickstar.command.main import main
from patrickstar.command.script import run_script
from tests.models import llama

HERE = Path(__file__).parent
LANGUAGE_MODEL, CLASSIFIER = HERE / "language_model.py", HERE / "classifier.py"
SFT = Path(trl.__file__).parent / "scripts" / "sft.py"  # TRL's own, as it is packaged
SMALL = {LANGUAGE_MODEL: "2MiB", CLASSIFIER: "2MiB", SFT: "5MiB"}
"""Device budgets below each script's unlimited peak."""


def write_inputs(folder: Path) -> None:
    chosen = random.Random(0)
    lines = []
    for _ in range(120):
        animal, place = chosen.choice(["cat", "dog", "owl", "fox"]), chosen.choice(["barn", "tree", "house", "river"])
        lines.append(f"The {animal} sat by the {place} for {chosen.randint(1, 9)} hours and then left the {place}.")
    rows = [json.dumps({"text": line}) + "\n" for line in lines]
    classes = [f'"{line}",{int("cat" in line)}\n' for line in lines]
    data = folder / "data"
    data.mkdir()
    for name, part in {"train": slice(0, 80), "validation": slice(80, 100), "test": slice(100, 120)}.items():
        (data / f"{name}.jsonl").write_text("".join(rows[part]))
        (folder / f"{name}.csv").write_text("sentence,label\n" + "".join(classes[part]))

    tokens = Tokenizer(models.BPE(unk_token="<unknown>"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<pad>", "<end>", "<unknown>"]
    tokens.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=128, special_tokens=special))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>", model_max_length=32
    )
    torch.manual_seed(0)
    tokens = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    llama(hidden=64, layers=4, vocab=128, length=32, **tokens).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def arguments_of(script: Path, folder: Path) -> list[str]:
    given = {"--model_name_or_path": folder / "model", "--report_to": "none", "--seed": 7, "--learning_rate": 3e-3}
    given |= {"--logging_steps": 2, "--per_device_train_batch_size": 2, "--per_device_eval_batch_size": 2}
    given |= {"--max_steps": 12, "--save_steps": 6, "--disable_tqdm": True, "--use_cpu": True}
    if script == SFT:
        given |= {"--dataset_name": folder / "data", "--eval_strategy": "epoch", "--max_length": 16, "--bf16": False}
        return [str(word) for item in given.items() for word in item]
    kind, phases = (".csv", ["--do_predict"]) if script == CLASSIFIER else (".jsonl", [])
    place = folder if script == CLASSIFIER else folder / "data"
    names = ("train", "validation", "test") if script == CLASSIFIER else ("train", "validation")
    given |= {f"--{name}_file": place / f"{name}{kind}" for name in names}
    return ["--do_train", "--do_eval", *phases, *(str(word) for item in given.items() for word in item)]


def run_all(folder: Path, script: Path) -> None:
    write_inputs(folder)
    config = folder / "patrickstar.json"
    config.write_text(json.dumps({"default_chunk_size": 8192}))
    words, runs = arguments_of(script, folder), folder / "runs"

    def output(kind: str) -> list[str]:
        return ["--output_dir", str(runs / kind)]

    small = ["run", "--config", str(config), "--device-memory", SMALL[script], str(script)]
    assert run_script(script, [*words, *output("plain")]) == 0
    assert main(["run", str(script), *words, *output("whole")]) == 0
    assert main([*small, *words, *output("small")]) == 0
    resume = ["--resume_from_checkpoint", str(runs / "small" / "checkpoint-6")]
    assert main(["run", str(script), *words, *output("resumed"), *resume]) == 0


if __name__ == "__main__":
    run_all(Path(sys.argv[1]), next(script for script in SMALL if script.stem == sys.argv[2]))
