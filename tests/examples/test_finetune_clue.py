import json
import random
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.bits import assert_same_bits
from tests.example_runs import check_report, figure, imported_example, is_png, run_example, stop_after

pytestmark = pytest.mark.slow

TOPICS = {"103": "球赛队员冠军射门", "104": "股市银行利率基金", "107": "汽车轮胎油耗引擎"}
COMMON = "的一是在不了有和人这中大为上个国我以要他"
SMALL = ("--hidden", 32, "--layers", 1, "--heads", 2, "--lr", "3e-3", "--batch-size", 16)


def make_sentence(generator: random.Random, topic: str) -> str:
    characters = generator.choices(COMMON, k=8) + generator.choices(topic, k=4)
    generator.shuffle(characters)
    return "".join(characters)


def write_json_lines(path: Path, examples: list[dict]) -> None:
    path.write_text("".join(json.dumps(example, ensure_ascii=False) + "\n" for example in examples), encoding="utf-8")


def write_sentence_task(folder: Path) -> None:
    """Files like the few-shot TNEWS: three labelled files and one without labels."""
    generator = random.Random(0)
    for name, count in (("train_few_all", 192), ("dev_few_all", 60), ("test_public", 60), ("unlabeled", 200)):
        examples = []
        for _ in range(count):
            label = generator.choice(list(TOPICS))
            examples.append({"sentence": make_sentence(generator, TOPICS[label]), "keywords": ""})
            if name != "unlabeled":
                examples[-1] |= {"label": int(label), "label_desc": f"news_{label}"}
        write_json_lines(folder / f"{name}.json", examples)


def write_pair_task(folder: Path) -> None:
    """Files like AFQMC; the label is the second sentence's topic. Annotators disagreed on one pair."""
    generator = random.Random(0)
    topics = list(TOPICS.values())
    for name, count in (("train", 192), ("dev", 60)):
        examples = [{"sentence1": "你好", "sentence2": "再见", "label": "-"}]
        for _ in range(count):
            label = generator.randrange(2)
            first, second = make_sentence(generator, topics[2]), make_sentence(generator, topics[label])
            examples.append({"sentence1": first, "sentence2": second, "label": str(label)})
        write_json_lines(folder / f"{name}.json", examples)


def test_bert_learns_sentences_and_finetunes_what_it_saved(tmp_path):
    data, output = tmp_path / "data", tmp_path / "output"
    data.mkdir()
    write_sentence_task(data)
    flags = ("--data", data, "--arch", "bert", *SMALL)
    result = run_example("finetune_clue.py", *flags, "--lm-epochs", 4, "--epochs", 40, "--save", "--output-dir", output)
    assert result.returncode == 0, result.stderr
    check_report(result.stdout, "majority class")
    assert figure(result.stdout, r"test loss .* accuracy ([0-9.]+)%") > 70
    assert "\nlanguage modelling: " in result.stdout
    assert is_png(output / "clue-bert-curves.png") and is_png(output / "clue-bert-lm-curves.png")

    again = run_example(
        "finetune_clue.py",
        *flags,
        "--pretrained",
        output / "model",
        "--steps",
        1,
        "--lr",
        "1e-5",
        "--device-memory",
        "8MiB",
        "--output-dir",
        tmp_path / "again",
    )
    assert again.returncode == 0, again.stderr
    assert "language modelling" not in again.stdout
    trained = figure(result.stdout, r"held-out accuracy +([0-9.]+)%")
    assert abs(figure(again.stdout, r"held-out accuracy +([0-9.]+)%") - trained) < 5


def test_gpt2_learns_pairs(tmp_path):
    write_pair_task(tmp_path)
    flags = ("--data", tmp_path, "--arch", "gpt2", *SMALL)
    result = run_example("finetune_clue.py", *flags, "--lm-epochs", 1, "--epochs", 20, "--output-dir", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    check_report(result.stdout, "majority class")
    assert is_png(tmp_path / "out" / "clue-gpt2-curves.png")


@pytest.mark.parametrize("step", [3, 8], ids=["language model", "classifier"])
def test_a_run_that_goes_on_is_bitwise_one_that_never_stopped(step, tmp_path, monkeypatch, capsys):
    data = tmp_path / "data"
    data.mkdir()
    write_pair_task(data)
    flags = ["--data", data, *SMALL, "--lm-epochs", 0.5, "--steps", 4, "--save", "--output-dir"]
    flags = [str(flag) for flag in flags]
    with imported_example("finetune_clue") as example:
        assert example.main([*flags, str(tmp_path / "straight")]) == 0
        with monkeypatch.context() as patch:
            stop_after(step, patch)
            assert example.main([*flags, str(tmp_path / "parts")]) == 130
        assert capsys.readouterr().out.endswith(" --resume\n")
        assert example.main([*flags, str(tmp_path / "parts"), "--resume"]) == 0
    assert ("language modelling" in capsys.readouterr().out) == (step == 3)
    first, second = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("straight", "parts"))
    assert_same_bits(second, first)


def test_two_ranks_classify_as_one_with_their_batches_together(tmp_path):
    """60 held-out and 61 test sentences: one rank's share is padded."""
    write_sentence_task(tmp_path)
    lines = (tmp_path / "test_public.json").read_text(encoding="utf-8")
    (tmp_path / "test_public.json").write_text(lines + lines.splitlines()[0] + "\n", encoding="utf-8")
    flags = ("--data", tmp_path, *SMALL[:-2], "--lm-epochs", 0, "--dropout", 0, "--steps", 12, "--output-dir")
    one = run_example("finetune_clue.py", *flags, tmp_path / "one", "--batch-size", 16)
    two = run_example("finetune_clue.py", *flags, tmp_path / "two", "--batch-size", 8, ranks=2, timeout_seconds=120)
    assert one.returncode == two.returncode == 0
    for number in (r"training loss +([0-9.]+)", r"held-out loss +([0-9.]+)", r"test loss +([0-9.]+)"):
        assert figure(two.stdout, number) == pytest.approx(figure(one.stdout, number), rel=1e-3)


def test_without_data_says_where_clue_is():
    result = run_example("finetune_clue.py")
    assert result.returncode == 2
    assert "github.com/CLUEbenchmark" in result.stderr
    assert "Traceback" not in result.stderr


def test_with_an_empty_folder_says_what_it_needs(tmp_path):
    result = run_example("finetune_clue.py", "--data", tmp_path)
    assert result.returncode == 2
    assert "train.json" in result.stderr and "Traceback" not in result.stderr
