import logging
import re

import pytest
import torch
from torch import nn

from patrickstar import MemoryBudgetError, initialize, torch_scope
from patrickstar.ranks.failures import DisagreementError
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.distributed import run_ranks
from tests.models import Mlp, gpt2, lora, token_batch
from tests.ranks.runs import rank_and_size, rows
from tests.training import ADAM, least_named, make_config

SCARCE = {"device_memory": 400_000}


def frozen_gpt2():
    torch.manual_seed(0)
    model = gpt2()
    model.requires_grad_(False)
    model.transformer.ln_f.requires_grad_(True)
    model.transformer.h[1].attn.requires_grad_(True)
    return model


def frozen_lora():
    torch.manual_seed(0)
    return lora()


def thaw_gradually(model, step):
    if step == 1:
        model.transformer.h[1].mlp.requires_grad_(True)
    elif step == 2:
        model.transformer.h[0].mlp.c_fc.weight.requires_grad_(True)
        model.transformer.h[1].mlp.c_fc.requires_grad_(False)
    elif step == 4:
        model.requires_grad_(True)


def thaw_base(model, step):
    base = model.base_model.model.transformer
    if step == 2:
        base.h[1].requires_grad_(True)
    elif step == 3:
        base.wte.requires_grad_(True)


def run(
    build=frozen_gpt2,
    thaw=thaw_gradually,
    precision="fp32",
    steps=5,
    accumulate=1,
    thaw_at=0,
    speculates=False,
    **options,
):
    config = make_config(precision, **options)
    if speculates:
        config["optimizer"]["speculation"] = "always"
        config["optimizer"]["params"]["use_hybrid_adam"] = False
    engine, optimizer = initialize_engine(build, 0, config)
    with engine:
        return go_on(engine, optimizer, thaw, range(steps), accumulate, thaw_at)


def go_on(engine, optimizer, thaw, steps, accumulate=1, thaw_at=0, cut=lambda batch: batch):
    losses, norms = [], []
    engine.train()
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for micro in range(accumulate):
            if micro == thaw_at:
                thaw(engine.module, step)
            loss = engine(**cut(token_batch(generator)))["loss"]
            engine.backward(loss / accumulate)
            losses.append(loss.item())
        optimizer.step()
        norms.append(engine.report()["grad_norm"])
    return losses, norms, engine.state_dict()


def run_plain(build=frozen_gpt2, thaw=thaw_gradually, steps=5, accumulate=1, thaw_at=0, num_ranks=1):
    model = build()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        for micro in range(accumulate):
            if micro == thaw_at:
                thaw(model, step)
            batch = token_batch(generator)
            for rank in range(num_ranks):
                loss = model(**{key: value.chunk(num_ranks)[rank] for key, value in batch.items()})["loss"]
                (loss / accumulate / num_ranks).backward()
                losses.append(loss.item())
        optimizer.step()
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


def assert_close(state, reference):
    for name, value in reference.items():
        torch.testing.assert_close(
            state[name], value, rtol=2e-4, atol=3e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_same(one, other):
    assert one[0] == other[0]
    assert one[1] == other[1]
    assert_same_bits(one[2], other[2])


@pytest.mark.parametrize(
    "build, thaw, accumulate, thaw_at",
    [(frozen_gpt2, thaw_gradually, 1, 0), (frozen_gpt2, thaw_gradually, 2, 1), (frozen_lora, thaw_base, 1, 0)],
    ids=["blocks", "between_micro_batches", "lora"],
)
def test_it_trains_as_plain_pytorch_in_any_budget(build, thaw, accumulate, thaw_at):
    runs = {"accumulate": accumulate, "thaw_at": thaw_at}
    losses, state = run_plain(build, thaw, **runs)
    roomy = run(build, thaw, **runs)
    assert roomy[0] == pytest.approx(losses, rel=1e-5)
    assert_close(roomy[2], state)
    assert_same(run(build, thaw, **runs, **SCARCE), roomy)


def test_bits_in_16_bits_do_not_depend_on_budgets_chunks_or_speculation():
    options = {"precision": "bf16", "gradient_clipping": 1.0, "accumulate": 2}

    def thaw(model, step):
        thaw_gradually(model, step)
        if step == 3:  # beside trained ones in some layouts, and alone in others
            with torch.no_grad():
                model.transformer.h[0].mlp.c_fc.bias.add_(0.1234567)
                model.transformer.wte.weight.mul_(1.01)

    roomy = run(thaw=thaw, **options)
    assert_same(run(thaw=thaw, **options, **SCARCE), roomy)
    assert_same(run(thaw=thaw, **options, default_chunk_size=2048), roomy)
    assert_same(run(thaw=thaw, **options, default_chunk_size=8192, speculates=True), roomy)


def test_before_the_first_forward():
    def thaw(model, step):
        model.requires_grad_(True)

    losses, state = run_plain(thaw=thaw, steps=2)
    roomy = run(thaw=thaw, steps=2)
    assert roomy[0] == pytest.approx(losses, rel=1e-5)
    assert_close(roomy[2], state)
    assert_same(run(thaw=thaw, steps=2, **SCARCE), roomy)


def test_a_plan_is_made_anew():
    engine, optimizer = initialize_engine(frozen_gpt2, 0, make_config(**SCARCE))
    with engine:
        go_on(engine, optimizer, lambda model, step: None, range(3))
        engine.module.requires_grad_(True)
        go_on(engine, optimizer, lambda model, step: None, range(2))
        assert all(engine._session.layout.chunk(c)["trainable"] for c in range(engine._session.layout.num_chunks))
        before = engine.report()
        go_on(engine, optimizer, lambda model, step: None, range(1))
        after = engine.report()
        num_replayed = after["num_replayed_accesses"] - before["num_replayed_accesses"]
        assert num_replayed == after["num_accesses"] - before["num_accesses"] > 0


def test_new_states_move_into_the_margin():
    engine, optimizer = initialize_engine(frozen_gpt2, 0, make_config(device_memory="8MB", default_chunk_size=8192))
    thaw = lambda model, step: model.requires_grad_(True) if step == 2 else None  # noqa: E731
    with engine:
        result = go_on(engine, optimizer, thaw, range(4))
        report = engine.report()
    assert report["num_device_state_chunks"] == report["num_chunks"]
    assert report["device_peak_bytes"] <= 8_000_000
    assert_same(result, run(thaw=thaw, steps=4))


@pytest.mark.parametrize("optimizer_type", ["AdamW", "Adam"])
def test_groups_may_be_added(optimizer_type):
    def body(model):
        return [param for name, param in model.named_parameters() if name.startswith("layers.2")]

    def build():
        torch.manual_seed(0)
        model = Mlp()
        model.embed.requires_grad_(False)
        return model

    def train(model, optimizer, backward):
        for step in range(6):
            if step == 1:
                optimizer.add_param_group({"params": model.head.parameters(), "lr": 1e-2, "weight_decay": 0.1})
            elif step == 2:
                model.embed.requires_grad_(True)
            elif step == 4:
                optimizer.add_param_group({"params": model.embed.weight})
                optimizer.param_groups[-1]["lr"] = 5e-3
            optimizer.zero_grad()
            loss = model(**token_batch(torch.Generator().manual_seed(step)))["loss"]
            backward(loss)
            optimizer.step()

    model = build()
    plain = getattr(torch.optim, optimizer_type)(body(model), **ADAM)
    train(model, plain, torch.Tensor.backward)
    engine, optimizer = initialize_engine(build, 0, make_config(optimizer=optimizer_type), model_parameters=body)
    with engine:
        train(engine.module, optimizer, engine.backward)
        assert_close(engine.state_dict(), model.state_dict())
        saved, ours = plain.state_dict(), optimizer.state_dict()
        assert [group["params"] for group in ours["param_groups"]] == [g["params"] for g in saved["param_groups"]]
        for index, entry in saved["state"].items():
            assert ours["state"][index]["step"] == entry["step"]
            torch.testing.assert_close(ours["state"][index]["exp_avg"], entry["exp_avg"], rtol=1e-3, atol=1e-6)


def test_wrong_groups_are_refused():
    engine, optimizer = initialize_engine(Mlp, 0, None, model_parameters=lambda m: m.head.parameters())
    with engine:
        module = engine.module
        for group, error, message in [
            (module.embed.weight, TypeError, "give a dict"),
            ({"params": {module.embed.weight}}, TypeError, "no order"),
            ({"lr": 1.0}, ValueError, "without 'params'"),
            ({"params": [nn.Parameter(torch.ones(1))]}, ValueError, "not a parameter of the engine's module"),
            ({"params": [module.head.weight]}, ValueError, "head.weight is in a group already"),
            ({"params": [module.embed.weight] * 2}, ValueError, "embed.weight is in a group already"),
            ({"params": [module.embed.weight], "lr": -1.0}, ValueError, "lr"),
            ({"params": [module.embed.weight], "weight_decy": 0.1}, ValueError, "weight_decy"),
            ({"params": [module.embed.weight], "amsgrad": True}, ValueError, "amsgrad"),
        ]:
            with pytest.raises(error, match=message):
                optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1
        go_on(engine, optimizer, lambda model, step: None, range(2))


class PartlyManaged(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.chunked = nn.Linear(16, 16)
        with torch_scope():
            self.frozen = nn.Linear(16, 16)
            self.trained = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return {"loss": self.trained(self.frozen(self.chunked(x))).square().mean()}


def test_parameters_that_stay_with_pytorch():
    def train(model, optimizer, backward, clip):
        for step in range(5):
            if step == 2:
                model.frozen.weight.requires_grad_(True)
            elif step == 3:
                model.frozen.requires_grad_(True)
                optimizer.add_param_group({"params": [model.frozen.bias], "lr": 1e-2})
            optimizer.zero_grad()
            backward(model(torch.randn(4, 16, generator=torch.Generator().manual_seed(step)))["loss"])
            clip()
            optimizer.step()

    def all_but_a_bias(model):
        return [param for name, param in model.named_parameters() if name != "frozen.bias"]

    model = PartlyManaged()
    plain = torch.optim.AdamW(all_but_a_bias(model), **ADAM)
    train(
        model,
        plain,
        torch.Tensor.backward,
        lambda: nn.utils.clip_grad_norm_([p for group in plain.param_groups for p in group["params"]], 0.1),
    )
    config = make_config(gradient_clipping=0.1)
    engine, optimizer = initialize_engine(PartlyManaged, 0, config, model_parameters=all_but_a_bias)
    with engine:
        train(engine.module, optimizer, engine.backward, lambda: None)
        assert_close(engine.state_dict(), model.state_dict())


def test_too_little_host_memory_changes_nothing():
    def train(host_memory):
        config = make_config(device_memory=400_000, host_memory=host_memory)
        engine, optimizer = initialize_engine(frozen_gpt2, 0, config)
        failures = []

        def thaw(model, step):
            if step == 2 and host_memory is not None:
                model.requires_grad_(True)
                for _ in range(2):
                    with pytest.raises(MemoryBudgetError, match="optimizer states") as caught:
                        engine(**token_batch(torch.Generator().manual_seed(9)))
                    failures.append(str(caught.value))
                model.requires_grad_(False)
                thaw_gradually(model, 0)
                model.transformer.ln_f.requires_grad_(True)
                model.transformer.h[1].attn.requires_grad_(True)

        with engine:
            return failures, go_on(engine, optimizer, thaw, range(4))

    failures, scarce = train(300_000)
    _, ample = train(None)
    assert_same(scarce, ample)
    assert failures[0] == failures[1]
    assert re.search(r"transformer.wte.weight and \d+ more parameters cannot be trained from now on", failures[0])
    least = least_named(failures[0])
    thaw = lambda model, step: model.requires_grad_(True) if step == 2 else None  # noqa: E731
    assert_same(run(thaw=thaw, host_memory=least, **SCARCE), run(thaw=thaw))


def test_checkpoints(tmp_path, caplog):
    def open_engine(**options):
        engine, optimizer = initialize_engine(frozen_gpt2, 0, make_config("bf16", **options))
        return engine, optimizer

    whole = run(precision="bf16", steps=6)
    engine, optimizer = open_engine()
    with engine:
        go_on(engine, optimizer, thaw_gradually, range(1))
        engine.save_checkpoint(tmp_path, "before")
        go_on(engine, optimizer, thaw_gradually, range(1, 5))
        engine.save_checkpoint(tmp_path, "after")
        # Parameters trained since then restart with a step count of 0.
        engine.load_checkpoint(tmp_path, "before")
        thaw_gradually(engine.module.requires_grad_(False), 0)
        engine.module.transformer.ln_f.requires_grad_(True)
        engine.module.transformer.h[1].attn.requires_grad_(True)
        losses, norms, state = go_on(engine, optimizer, thaw_gradually, range(1, 6))
        assert losses == whole[0][1:]
        assert norms == whole[1][1:]
        assert_same_bits(state, whole[2])
    engine, optimizer = open_engine(**SCARCE)
    with engine:
        engine.module.requires_grad_(True)
        engine.load_checkpoint(tmp_path, "after")
        losses, norms, state = go_on(engine, optimizer, thaw_gradually, range(5, 6))
        assert losses == whole[0][5:]
        assert_same_bits(state, whole[2])
    engine, optimizer = open_engine()
    with engine, caplog.at_level(logging.WARNING, logger="patrickstar"):
        engine.load_checkpoint(tmp_path, "after")
        assert "requires_grad_(True) before load_checkpoint" in caplog.text
        assert "transformer.wte.weight" in caplog.text


def test_optimizer_states_of_plain_pytorch_are_loaded_for_unfrozen_parameters():
    torch.manual_seed(0)
    model = Mlp()
    plain = torch.optim.AdamW(model.parameters(), **ADAM)
    model(**token_batch(torch.Generator().manual_seed(0)))["loss"].backward()
    plain.step()

    def build():
        copy = Mlp()
        copy.layers.requires_grad_(False)
        return copy

    engine, optimizer = initialize_engine(build, 0, make_config())
    with engine:
        engine.module.requires_grad_(True)
        optimizer.load_state_dict(plain.state_dict())
        states = optimizer.state_dict()["state"]
        assert all(
            torch.equal(states[i]["exp_avg"], entry["exp_avg"]) for i, entry in plain.state_dict()["state"].items()
        )


def test_deepspeed_engines_and_compiled_modules():
    torch.manual_seed(0)
    model = frozen_gpt2()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "gradient_clipping": 0,
    }
    engine, optimizer, _, _ = initialize(model=model, config=config)
    with engine:
        engine.compile(backend="eager")
        for step in range(5):
            thaw_gradually(model, step)
            loss = engine(**token_batch(torch.Generator().manual_seed(step)))["loss"]
            engine.backward(loss)
            engine.step()
        assert_close({k.replace("_orig_mod.", ""): v for k, v in engine.state_dict().items()}, run_plain()[1])


def train_on_ranks(precision, options):
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(frozen_gpt2, 0, make_config(precision, default_chunk_size=16384, **options))
    with engine:
        return go_on(engine, optimizer, thaw_gradually, range(5), cut=rows)


def disagree():
    engine, optimizer = initialize_engine(frozen_gpt2, 0, make_config(default_chunk_size=16384))
    with engine:
        nothing = lambda model, step: None  # noqa: E731
        go_on(engine, optimizer, nothing, range(1), cut=rows)
        if rank_and_size()[0] == 1:
            engine.module.transformer.h[0].mlp.c_proj.bias.requires_grad_(True)
        with pytest.raises(DisagreementError, match=r"rank 1: transformer.h.0.mlp.c_proj.bias"):
            go_on(engine, optimizer, nothing, range(1), cut=rows)
        engine.module.transformer.h[0].mlp.c_proj.bias.requires_grad_(True)
        return go_on(engine, optimizer, nothing, range(1), cut=rows)[0]


def two_ranks():
    return [train_on_ranks("fp32", {}), train_on_ranks("fp32", {"device_memory": "1MB"}), disagree()]


def test_two_ranks():
    (roomy, scarce, _), (others, _, _) = run_ranks(2, two_ranks, timeout_seconds=120)
    assert_same_bits(roomy[2], others[2])
    assert_same(scarce, roomy)
    losses, state = run_plain(num_ranks=2)
    assert roomy[0] == pytest.approx(losses[::2], rel=1e-5)
    assert_close(roomy[2], state)
