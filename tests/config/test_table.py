import importlib.util
import json
import logging
from pathlib import Path

import pytest

from patrickstar.config import Config, auto_keys, log_accepted_options, parse_config
from patrickstar.config.editor_schema import make_json_schema
from patrickstar.config.fates import Action
from patrickstar.config.keys import all_keys, keys_of
from tests.config.cases import Case, all_cases, differences, put

ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
CASES = all_cases()
WORDS = {Action.MAPPED: "mapped to `", Action.NO_EFFECT: "no effect: "}


def rows() -> dict[tuple[str, str], str]:
    found, section = {}, ""
    for line in TABLE.splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ").replace("`", "").removeprefix("Top level")
        elif line.startswith("| `"):
            cells = line.split(" | ")
            found[section, cells[0].split("`")[1]] = cells[3]
    return found


def cases(action: Action) -> list[Case]:
    table, word = rows(), WORDS.get(action, action.value)
    found = [case for case in CASES if table[case.title, case.key.name].startswith(word)]
    assert found
    return found


def test_the_table_is_the_schema():
    spec = importlib.util.spec_from_file_location("config_table", ROOT / "tools" / "config_table.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.render() == TABLE
    assert {(case.title, case.key.name) for case in CASES} == set(rows())
    assert not [case.key.path for case in CASES if not case.key.field.description]
    assert not [case.key.path for case in CASES if (case.key.fate is None) != bool(case.key.sections)]


def test_honoured_keys_reach_the_configuration():
    for case in cases(Action.HONOURED):
        if case.key.path == "scheduler.type":
            assert case.before().scheduler.type == case.beside["scheduler"]["type"]
        else:
            case.changing(case.key.path)


def test_mapped_keys_change_their_target():
    for case in cases(Action.MAPPED):
        target = case.key.fate.target
        assert f"mapped to `{target}`" in rows()[case.title, case.key.name]
        case.changing(target)


def test_keys_without_effect_are_named_in_one_line(caplog):
    everything = {"bf16": {"enabled": True}}
    without_effect = cases(Action.NO_EFFECT)
    for case in without_effect:
        value, after = case.changing(case.key.path)
        assert differences(case.before(), after) == [case.key.path]
        put(everything, case.key.path, value)
    put(everything, "data_types.param_dtype", "bf16")
    with caplog.at_level(logging.INFO, logger="patrickstar"):
        log_accepted_options(parse_config(everything))
    (record,) = caplog.records
    named = record.getMessage().partition(": ")[2].split(", ")
    assert sorted(named) == sorted(case.key.path for case in without_effect)


def test_refused_values_are_errors_that_say_why():
    refused = cases(Action.REFUSED)
    for case in refused:
        for value in case.key.fate.only or ({"enabled": False}, {}, None):
            assert differences(parse_config(case.given(value), case.dialect), case.before()) in ([], [case.key.path])
    for case in refused:
        line = f"; {case.key.fate.text}"
        errors = [error for _, error in case.outcomes() if isinstance(error, str)]
        assert any(error.startswith(f"{case.key.path} is ") and line in error for error in errors), case.key.path


def test_initialize_engine_refuses_what_initialize_alone_does():
    asking_and_not = {
        "train_batch_size": (8, None),
        "train_micro_batch_size_per_gpu": (2, None),
        "gradient_accumulation_steps": (2, None),
        "scheduler": ({"type": "WarmupLR"}, None),
        "managed_gradient_accumulation": (False, True),
        "dataloader_drop_last": (True, False),
        "wall_clock_breakdown": (True, False),
    }
    for name in ("flops_profiler", "tensorboard", "wandb", "csv_monitor"):
        asking_and_not[name] = ({"enabled": True}, {"enabled": False})
    assert {key.name for key in keys_of() if key.reader is not None} == set(asking_and_not)
    for name, (asking, not_asking) in asking_and_not.items():
        with pytest.raises(ValueError, match=f"^{name} is .*which patrickstar.initialize acts on; with initialize_eng"):
            parse_config({name: asking})
        assert parse_config({name: not_asking}) == Config()


def test_auto_is_as_if_the_key_were_left_out():
    for case in CASES:
        if case.key.sections or case.key.field.is_required() or case.key.path == "tensor_parallel.mode":
            continue  # "auto" is a mode of its own, not the default
        if case.key.name == "nvme_path":
            continue  # required by its device
        given = case.given("auto")
        assert case.key.path in auto_keys(given)
        parsed = parse_config(given, case.dialect)
        *sections, name = case.key.path.split(".")
        place = given
        for section in sections:
            place = place[section]
        del place[name]
        if case.key.name == "total_num_steps":
            with pytest.raises(ValueError, match="total_num_steps is missing; give the number of steps"):
                parse_config(given, case.dialect)
        else:
            assert parse_config(given, case.dialect) == parsed


def test_other_spellings_are_the_same_key():
    spelled = [case for case in CASES if case.key.spellings and not case.key.sections]
    assert {"check_overflow", "thread_count", "stage3_gather_fp16_weights_on_model_save"} < {
        name for case in spelled for name in case.key.spellings
    }
    for case in spelled:
        value, after = case.changing(case.key.path)
        for name in case.key.spellings:
            given = case.given(value)
            place = given
            for section in case.key.section.split("."):
                place = place[section]
            place[name] = place.pop(case.key.name)
            assert parse_config(given) == after
            place[case.key.name] = value
            with pytest.raises(ValueError, match=f"{case.key.name} and {name} of {case.key.section} are one key"):
                parse_config(given)
    assert parse_config({"bfloat16": {}}) == parse_config({"bf16": {}}) != Config()


def test_the_json_schema_has_every_key_and_spelling():
    schema = make_json_schema()
    json.dumps(schema)
    names = {name for place in (schema, *schema["$defs"].values()) for name in place.get("properties", {})}
    assert names == {name for key in all_keys() for name in (key.name, *key.spellings)}
    assert schema["additionalProperties"] is False
    assert {"const": "auto"}.items() <= schema["$defs"]["OptimizerParams"]["properties"]["lr"]["anyOf"][1].items()
