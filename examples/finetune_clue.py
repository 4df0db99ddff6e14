"""Classifies Chinese text with BERT or GPT-2: CLUE's tasks on sentences and sentence pairs. Nothing is downloaded.

Usage:
    python examples/finetune_clue.py --data tnews --arch bert             # a small model with its own vocabulary
    python examples/finetune_clue.py --data tnews --arch gpt2 --device-memory 192MiB
    python examples/finetune_clue.py --data afqmc --pretrained FOLDER --lr 5e-5        # a local Hugging Face folder
    torchrun --nproc_per_node=2 examples/finetune_clue.py --data tnews                 # by two processes

Without --pretrained the small model is first trained as a language model, on the training sentences and, if the folder
has it, unlabeled.json. Ctrl-C finishes the step, saves the run and prints the command that resumes it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import environment  # noqa: F401 (first)
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from patrickstar.checkpoint import latest_tag
from patrickstar.command.flags import UsageError
from patrickstar.finetune import flags, training
from patrickstar.finetune.batches import Batch, num_rows, unigram_score
from patrickstar.finetune.ranks import Ranks, joined_ranks
from patrickstar.finetune.reporting import print_run, save_curves
from patrickstar.finetune.tasks import Output, Task
from patrickstar.finetune.usage import run_command, shown_path
from patrickstar.sequence.sharded_labels import IGNORED

WHERE_CLUE_IS = """--data is missing: give a folder with the JSON lines of a CLUE classification task.
CLUE is had from https://github.com/CLUEbenchmark: TNEWS, IFLYTEK, AFQMC and others from its repository CLUE
(train.json, dev.json), few-shot editions from FewCLUE (train_few_all.json, dev_few_all.json, test_public.json)."""

TRAIN_FILES = ("train.json", "train_few_all.json")
HELD_OUT_FILES = ("dev.json", "dev_few_all.json")
TEST_FILE = "test_public.json"  # CLUE's own test.json has no labels
UNLABELED_FILE = "unlabeled.json"

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # the first of the vocabulary
MASK_SHARE = 0.3
LM_HELD_OUT_SHARE = 0.05


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = flags.Parser(__doc__)
    parser.add_argument("--data", type=Path, metavar="DIR", help="a folder with a CLUE task")
    parser.add_argument("--arch", choices=["bert", "gpt2"], default="bert")
    parser.add_argument("--pretrained", type=Path, metavar="FOLDER", help="a local folder: model and tokenizer")
    parser.add_argument("--seq-len", type=int, help="tokens per example (default: what most sentences need, up to 128)")
    small = parser.add_argument_group("the small model, without --pretrained")
    small.add_argument("--hidden", type=int, default=256)
    small.add_argument("--layers", type=int, default=2)
    small.add_argument("--heads", type=int, default=4)
    small.add_argument("--vocab-size", type=int, default=4000)
    small.add_argument("--lm-epochs", type=float, default=3.0, help="epochs as a language model; 0: none")
    small.add_argument("--lm-lr", type=float, default=1e-3)
    small.add_argument("--dropout", type=float, default=0.1)
    flags.add_training_arguments(parser, output="clue-output")
    flags.add_export_argument(parser)
    parser.set_defaults(batch_size=32, epochs=8.0, lr=2e-4)
    args = parser.parse_args(argv)
    if args.data is None:
        raise UsageError(WHERE_CLUE_IS)
    for names in (TRAIN_FILES, HELD_OUT_FILES):
        find_file(args.data, names)
    if args.pretrained and not (args.pretrained / "config.json").is_file():
        raise UsageError(f"--pretrained {args.pretrained} has no config.json; give a folder that save_pretrained wrote")
    flags.check_arguments(args)
    return args


# Data.


def read_examples(path: Path) -> list[dict]:
    """The labelled examples of a file of JSON lines.

    Raises:
        UsageError: a line is malformed.
    """
    examples = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            try:
                examples.append(json.loads(line))
                texts_of(examples[-1])
            except (ValueError, KeyError, TypeError) as error:
                what = f"has no {error}" if isinstance(error, KeyError) else f"is no JSON object ({error})"
                raise UsageError(f"{path}:{number}: the line {what}; give the files of a CLUE task") from error
    return [example for example in examples if example.get("label") != "-"]  # "-": the annotators disagreed


def find_file(folder: Path, names: tuple[str, ...]) -> Path:
    """The first of ``names`` that exists in ``folder``."""
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise UsageError(f"{folder} has none of {', '.join(names)}; give the folder of one CLUE task")


def texts_of(example: dict) -> tuple[str, ...]:
    """An example's sentence, or its two sentences."""
    return (example["sentence"],) if "sentence" in example else (example["sentence1"], example["sentence2"])


def train_tokenizer(sentences: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """BERT's WordPiece with a vocabulary from ``sentences``: each Chinese character is a token."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), show_progress=False)
    tokenizer.train_from_iterator(sentences, trainer)
    ends = [(token, tokenizer.token_to_id(token)) for token in ("[SEP]", "[CLS]")]
    tokenizer.post_processor = processors.BertProcessing(*ends)
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **dict(zip(names, SPECIAL_TOKENS, strict=True)))


def choose_seq_len(tokenizer: PreTrainedTokenizerBase, texts: list[tuple[str, ...]]) -> int:
    """A multiple of 8, up to 128, that suffices for 98 % of the texts."""
    lengths = sorted(len(tokenizer(*text).input_ids) for text in texts)
    return min(128, -(-lengths[int(0.98 * (len(lengths) - 1))] // 8) * 8)


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[tuple[str, ...]], args: argparse.Namespace) -> Batch:
    """The model's inputs for ``texts``, all of length ``args.seq_len``."""
    inputs = tokenizer(
        *(list(column) for column in zip(*texts, strict=True)),
        padding="max_length",
        truncation=True,
        max_length=args.seq_len,
        return_tensors="pt",
        return_token_type_ids=args.arch == "bert",
    )
    return dict(inputs)


# Models.


def build_config(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> transformers.PretrainedConfig:
    """The small model's configuration."""
    sizes = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "use_cache": False}
    if args.arch == "bert":
        return transformers.BertConfig(
            hidden_size=args.hidden,
            num_hidden_layers=args.layers,
            num_attention_heads=args.heads,
            intermediate_size=4 * args.hidden,
            max_position_embeddings=args.seq_len,
            hidden_dropout_prob=args.dropout,
            attention_probs_dropout_prob=args.dropout,
            **sizes,
        )
    return transformers.GPT2Config(
        n_embd=args.hidden,
        n_layer=args.layers,
        n_head=args.heads,
        n_positions=args.seq_len,
        resid_pdrop=args.dropout,
        embd_pdrop=args.dropout,
        attn_pdrop=args.dropout,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
        **sizes,
    )


def build_language_model(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> nn.Module:
    """A masked (BERT) or causal (GPT-2) language model from scratch."""
    classes = {"bert": transformers.BertForMaskedLM, "gpt2": transformers.GPT2LMHeadModel}
    model = classes[args.arch](build_config(args, tokenizer))
    model.loss_type = "ForMaskedLM" if args.arch == "bert" else "ForCausalLM"
    return training.with_checkpointing(model, args)


def build_classifier(
    args: argparse.Namespace,
    tokenizer: PreTrainedTokenizerBase,
    labels: list[str],
    body: dict[str, torch.Tensor] | None,
) -> nn.Module:
    """The architecture's classifier: from ``--pretrained``, or a small one, with the language model's ``body`` if
    given.
    """
    classes = {"bert": transformers.BertForSequenceClassification, "gpt2": transformers.GPT2ForSequenceClassification}
    if args.pretrained:
        config = transformers.AutoConfig.from_pretrained(args.pretrained, pad_token_id=tokenizer.pad_token_id)
    else:
        config = build_config(args, tokenizer)
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: index for index, label in enumerate(labels)}
    config.problem_type = "single_label_classification"
    if args.pretrained:
        model = classes[args.arch].from_pretrained(args.pretrained, config=config, dtype=torch.float32)
    else:
        model = classes[args.arch](config)
    if body:
        model.base_model.load_state_dict(body, strict=False)  # a masked language model has no pooler
    return training.with_checkpointing(model, args)


# Tasks.


def add_summary_label(batch: Batch, tokens: torch.Tensor, generator: torch.Generator, arch: str) -> None:
    """Sets the label at the classifier's position (at [CLS] in BERT, at the end in GPT-2) to a random token of the
    sentence. Language modelling alone would not train that position to summarise the sentence, and few labels cannot.
    """
    weights = (tokens >= len(SPECIAL_TOKENS)).float() + 1e-6  # handles an empty sentence too
    any_token = tokens.gather(1, torch.multinomial(weights, 1, generator=generator))
    end = batch["attention_mask"].sum(1, keepdim=True).clamp(max=tokens.shape[1] - 1)  # one after the last token
    batch["labels"] = batch["labels"].scatter(1, end if arch == "gpt2" else torch.zeros_like(end), any_token)


def mask_tokens(batch: Batch, generator: torch.Generator, vocab_size: int) -> Batch:
    """BERT's task: of the chosen tokens 80 % become [MASK], 10 % others, 10 % stay; the labels are the
    original tokens.
    """
    tokens, first_ordinary = batch["input_ids"], len(SPECIAL_TOKENS)
    chosen = (torch.rand(tokens.shape, generator=generator) < MASK_SHARE) & (tokens >= first_ordinary)
    dice = torch.rand(tokens.shape, generator=generator)
    others = torch.randint(first_ordinary, vocab_size, tokens.shape, generator=generator)
    masked = torch.where(chosen & (dice < 0.8), SPECIAL_TOKENS.index("[MASK]"), tokens)
    masked = torch.where(chosen & (dice >= 0.9), others, masked)
    return {**batch, "input_ids": masked, "labels": tokens.masked_fill(~chosen, IGNORED)}


def language_model_task(inputs: Batch, args: argparse.Namespace, vocab_size: int) -> Task:
    """Language modelling of the sentences; the trivial answer is the unigram distribution."""
    generator = torch.Generator().manual_seed(args.seed)
    order = torch.randperm(num_rows(inputs), generator=generator)
    cut = max(1, int(LM_HELD_OUT_SHARE * len(order)))
    train = {name: values[order[cut:]] for name, values in inputs.items()}
    held_out = {name: values[order[:cut]] for name, values in inputs.items()}

    def prepare(rows: Batch, generator: torch.Generator) -> Batch:
        batch = {**rows, "labels": rows["input_ids"].masked_fill(rows["attention_mask"] == 0, IGNORED)}
        if args.arch == "bert":
            batch = mask_tokens(batch, generator, vocab_size)
        add_summary_label(batch, rows["input_ids"], generator, args.arch)
        return batch

    held_out = prepare(held_out, generator)
    shift = args.arch == "gpt2"
    targets = prepare(train, generator)["labels"]
    baseline = unigram_score(targets[:, shift:], held_out["labels"][:, shift:])
    return Task(
        name="language modelling",
        train=train,
        held_out=held_out,
        shift=shift,
        prepare=prepare,
        baseline_name="unigram baseline",
        baseline=baseline,
    )


def classification_task(
    files: dict[str, list[dict]], args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, labels: list[str]
) -> Task:
    """The CLUE task; the trivial answer is the most frequent class."""
    sets = {}
    for name, examples in files.items():
        sets[name] = encode(tokenizer, [texts_of(example) for example in examples], args)
        sets[name]["labels"] = torch.tensor([labels.index(str(example["label"])) for example in examples])
    baseline = unigram_score(sets["train"]["labels"], sets["held_out"]["labels"])
    return Task(name=args.data.name, baseline_name="majority class", baseline=baseline, **sets)


def read_task(folder: Path) -> dict[str, list[dict]]:
    """The labelled examples of the task's sets: ``train``, ``held_out`` and, if present, ``test``."""
    files = {"train": read_examples(find_file(folder, TRAIN_FILES))}
    files["held_out"] = read_examples(find_file(folder, HELD_OUT_FILES))
    if (folder / TEST_FILE).is_file():
        files["test"] = read_examples(folder / TEST_FILE)
    return files


def train_language_model(
    args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, texts: list[tuple[str, ...]], ranks: Ranks
) -> dict[str, torch.Tensor]:
    """The values of a language model trained on ``texts``, without its head."""
    task = language_model_task(encode(tokenizer, texts, args), args, len(tokenizer))
    lm_args = argparse.Namespace(**vars(args) | {"epochs": args.lm_epochs, "lr": args.lm_lr, "steps": None})
    folder = flags.checkpoints(args, "lm")
    output = Output(checkpoints=folder, resume=args.resume and latest_tag(folder) is not None)
    run = training.train(lambda: build_language_model(args, tokenizer), task, lm_args, ranks, output)
    print_run(run, task, lm_args, ranks)
    save_curves(run, task, args.output_dir / f"clue-{args.arch}-lm-curves.png", ranks)
    return run.module.base_model.state_dict()


def run_example(args: argparse.Namespace, ranks: Ranks) -> None:
    """Trains the language model, then the classifier, and reports."""
    files = read_task(args.data)
    labels = sorted({str(example["label"]) for example in files["train"]})
    texts = [texts_of(example) for example in files["train"]]
    if not args.pretrained and (args.data / UNLABELED_FILE).is_file():
        unlabeled = [texts_of(example) for example in read_examples(args.data / UNLABELED_FILE)]
    else:
        unlabeled = []
    if args.pretrained:
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.pretrained)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # GPT-2's own has none
    else:
        tokenizer = train_tokenizer([sentence for text in texts + unlabeled for sentence in text], args.vocab_size)
    args.seq_len = args.seq_len or choose_seq_len(tokenizer, texts)
    body = None
    resumes_classifier = args.resume and latest_tag(flags.checkpoints(args)) is not None
    if not args.pretrained and args.lm_epochs > 0 and not resumes_classifier:
        body = train_language_model(args, tokenizer, texts + unlabeled, ranks)
    task = classification_task(files, args, tokenizer, labels)
    output = Output(
        checkpoints=flags.checkpoints(args),
        resume=resumes_classifier,
        save_model=training.exporter(flags.saved_model(args), tokenizer, ranks) if args.save else None,
    )
    run = training.train(lambda: build_classifier(args, tokenizer, labels, body), task, args, ranks, output)
    print_run(run, task, args, ranks)
    save_curves(run, task, args.output_dir / f"clue-{args.arch}-curves.png", ranks)


def main(argv: list[str]) -> int:
    """Runs the example; returns the exit code."""

    def body() -> int:
        args = parse_arguments(argv)
        with joined_ranks() as ranks:
            run_example(args, ranks)
        return 0

    return run_command(body, [shown_path(__file__)], argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
