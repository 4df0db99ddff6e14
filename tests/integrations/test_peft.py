from pathlib import Path

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from patrickstar import _C
from patrickstar.integrations.transformers import PatrickStarTrainer
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.integrations.compatibility import MORE, PAGE, ROWS, batches, build, page, train_in_engine, train_plain
from tests.integrations.trainer_runs import Tokens, arguments, engine_config, gpt2
from tests.models import llama
from tests.training import ADAM, make_config


def fresh_base():
    torch.manual_seed(0)
    return llama()


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_row(tmp_path, row):
    plain = train_plain(row)
    run = train_in_engine(row, tmp_path)
    assert len(plain.adapters) > 0
    assert run.losses == pytest.approx(plain.losses, rel=1e-6 if row.precision == "fp32" else 0.01)
    trained = "second" if "second" in build(row).peft_config else "default"
    folder = tmp_path / trained if trained != "default" else tmp_path
    loaded = dict(PeftModel.from_pretrained(fresh_base(), folder, adapter_name=trained).named_parameters())
    for name, value in run.adapters.items():
        assert_same_bits(loaded[name], value, name)
        if row.precision == "fp32":
            torch.testing.assert_close(value, plain.adapters[name], rtol=1e-4, atol=2e-5)


def test_the_base_is_only_read(tmp_path):
    row = ROWS[0]
    model = build(row)
    frozen = sum(param.numel() for param in model.parameters() if not param.requires_grad)
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    config = make_config(device_memory=200_000, default_chunk_size=2048)
    engine, optimizer = initialize_engine(
        lambda: model, 0, config, lambda module: [param for param in module.parameters() if param.requires_grad]
    )
    with engine:
        for batch in batches():
            engine.backward(engine.module(**batch).loss)
            optimizer.step()
        report = engine.report()
        padded = report["num_chunk_elements"] - frozen
        print({key: report[key] for key in ("host_peak_bytes", "uploaded_bytes", "downloaded_bytes")}, frozen, trained)
        assert report["uploaded_bytes"] > 2 * 4 * frozen
        assert report["downloaded_bytes"] <= 16 * padded * 4
        assert report["downloaded_bytes"] < 4 * frozen
        assert report["host_peak_bytes"] <= 4 * frozen + 20 * padded
        assert set(optimizer.state_dict()["state"]) == set(range(len(optimizer.param_groups[0]["params"])))
        base = fresh_base().state_dict()
        now = {name.replace(".base_layer", ""): p for name, p in engine.named_parameters() if not p.requires_grad}
        for name, value in base.items():
            assert_same_bits(engine.full_value(now[f"base_model.model.{name}"]), value, name)


def test_generation_between_steps():
    row = ROWS[0]
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    tokens = next(iter(batches()))["input_ids"][:, :4]
    config = make_config(device_memory=600_000, default_chunk_size=4096)
    engine, optimizer = initialize_engine(lambda: build(row), 0, config)
    with engine:
        for batch in batches(2):
            engine.backward(engine.module(**batch).loss)
            optimizer.step()
        generated = engine.module.eval().generate(input_ids=tokens, **options)
        state = engine.state_dict()
        with _C.HostAllocations():
            plain = build(row).eval()
            plain.load_state_dict(state)
            assert torch.equal(plain.generate(input_ids=tokens, **options), generated)


def adaptive(steps):
    config = AdaLoraConfig(
        init_r=6, target_r=2, tinit=1, tfinal=1, deltaT=1, total_step=steps, target_modules=["q_proj", "v_proj"]
    )
    return get_peft_model(fresh_base(), config)


def train_adaptively(model, optimizer, backward, steps):
    losses = []
    for step, batch in enumerate(batches(steps)):
        optimizer.zero_grad()
        loss = model(**batch).loss
        backward(loss)
        optimizer.step()
        model.base_model.update_and_allocate(step)
        losses.append(loss.item())
    return losses


def test_ranks_that_adapt_to_gradients():
    plain = adaptive(steps=6)
    optimizer = torch.optim.AdamW([param for param in plain.parameters() if param.requires_grad], **ADAM)
    expected = train_adaptively(plain, optimizer, torch.Tensor.backward, 6)
    engine, optimizer = initialize_engine(lambda: adaptive(steps=6), 0, make_config(device_memory=600_000))
    with engine:
        assert train_adaptively(engine.module, optimizer, engine.backward, 6) == pytest.approx(expected, rel=1e-6)
        state = engine.state_dict()
        masked = {name for name, value in plain.state_dict().items() if "lora_E" in name and bool((value == 0).any())}
        assert len(masked) > 0
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


def test_merging_after_the_engine():
    row = ROWS[0]
    engine, optimizer = initialize_engine(lambda: build(row), 0, make_config())
    for batch in batches(2):
        engine.backward(engine.module(**batch).loss)
        optimizer.step()
    engine.close()
    model = engine.module.eval()
    batch = next(iter(batches()))
    with torch.no_grad():
        expected = model(**batch).logits
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(**batch).logits, expected, rtol=1e-4, atol=1e-5)
    assert not isinstance(merged, PeftModel)


def test_the_best_adapter_under_the_trainer(tmp_path):
    wrapped = get_peft_model(gpt2(), LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    native = gpt2()
    native.add_adapter(LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    for name, model in (("wrapped", wrapped), ("native", native)):
        best = {"load_best_model_at_end": True, "metric_for_best_model": "loss"} if name == "wrapped" else {}
        args = arguments(tmp_path / name, greater_is_better=True, save_strategy="epoch", eval_strategy="epoch", **best)
        trainer = PatrickStarTrainer(
            model,
            args,
            train_dataset=Tokens(8, 1),
            eval_dataset=Tokens(4, 2),
            patrickstar_config=engine_config(device_memory=400_000),
        )
        trainer.train()
        values = {key: trainer.engine.full_value(p) for key, p in trainer.engine.named_parameters() if "lora" in key}
        trainer.close()
        folder = trainer.state.best_model_checkpoint or tmp_path / name / "checkpoint-8"
        saved = load_file(Path(folder) / "adapter_model.safetensors")
        assert set(saved) == {f"base_model.model.{_bare(key)}" for key in values}
        assert_same_bits(saved, {f"base_model.model.{_bare(key)}": value for key, value in values.items()})


def _bare(name):
    return name.removeprefix("base_model.model.").replace(".default", "")


def test_two_ranks(two_ranks):
    for rank in two_ranks:
        run, resumed = rank["lora"]["runs"]
        assert resumed.losses == run.losses
        assert_same_bits(resumed.state, run.state)
        assert {"adapter_config.json", "adapter_model.safetensors", "optimizer.pt"} <= set(rank["lora"]["files"])
        assert not {"model.safetensors", "patrickstar"} & set(rank["lora"]["files"])
        for name, value in rank["lora"]["loaded"].items():
            assert_same_bits(value, run.state[name], name)


def test_two_ranks_that_share_matrices(two_ranks):
    for rank in two_ranks:
        (best, state), (_, resumed) = rank["lora_on_a_mesh"]["runs"]
        folder = rank["lora_on_a_mesh"]["folder"]
        first, last = (PeftModel.from_pretrained(gpt2(), folder / f"checkpoint-{step}").state_dict() for step in (2, 6))
        assert Path(best).name == "checkpoint-2"
        assert any(not torch.equal(first[name], last[name]) for name in first)
        assert_same_bits(dict(state), {name: first[name] for name in state})
        assert_same_bits(dict(resumed), {name: last[name] for name in resumed})


def test_the_page_says_what_these_tests_show():
    assert PAGE.read_text() == page(), "run python -m tests.integrations.compatibility"
    assert all(test in globals() for _, _, test in MORE if test)
