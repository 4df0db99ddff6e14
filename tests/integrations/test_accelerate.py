import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator, PartialState
from accelerate.utils import ProjectConfiguration, gather
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.utils.data import DataLoader

from patrickstar import _C, StateError
from patrickstar.integrations.accelerate import PatrickStarAccelerator
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.integrations.trainer_runs import MODEL_DATA_BYTES, Tokens, engine_config, gpt2

STEPS = 4
MAX_NORM = 0.5


@dataclasses.dataclass
class Loop:
    losses: list[float]
    norms: list[float]
    rates: list[float]
    state: dict[str, torch.Tensor]


def parts() -> tuple[Any, ...]:
    model = gpt2()
    decayed = [param for param in model.parameters() if param.ndim > 1]
    rest = [param for param in model.parameters() if param.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest}], lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    loader = DataLoader(Tokens(40, seed=1), batch_size=1)
    return model, optimizer, loader, scheduler


def run_loop(accelerator: Accelerator, prepared: tuple[Any, ...], steps: int = STEPS, skip: int = 0) -> Loop:
    model, optimizer, loader, scheduler = prepared
    model.train()
    losses, norms, rates = [], [], []
    for index, batch in enumerate(loader):
        if index < skip:
            continue
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
        rates.append(optimizer.param_groups[0]["lr"])
        if len(norms) == steps:
            break
    with _C.HostAllocations():
        state = {key: value.clone() for key, value in accelerator.get_state_dict(model).items()}
    return Loop(losses, norms, rates, state)


def assert_equal_loops(run: Loop, plain: Loop) -> None:
    assert len(run.losses) == len(plain.losses)
    assert run.losses == pytest.approx(plain.losses, rel=1e-6)
    assert run.norms == pytest.approx(plain.norms, rel=1e-6)
    assert min(run.norms) > MAX_NORM
    assert run.rates == plain.rates


def unfreezing_loop(accelerator: Accelerator) -> Loop:
    model = gpt2()
    block = model.transformer.h[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=3e-3, eps=1e-6)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Tokens(5, seed=1), batch_size=1))
    losses = []
    for index, batch in enumerate(loader):
        if index == 2:
            block.requires_grad_(True)
            optimizer.add_param_group({"params": block.parameters(), "lr": 1e-2})
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with _C.HostAllocations():
        state = {key: value.clone() for key, value in accelerator.get_state_dict(model).items()}
    accelerator.free_memory()
    return Loop(losses, [], [], state)


def test_layers_are_unfrozen():
    plain = unfreezing_loop(Accelerator(cpu=True))
    own = unfreezing_loop(PatrickStarAccelerator(cpu=True, patrickstar_config=engine_config()))
    assert own.losses == pytest.approx(plain.losses, rel=1e-6)
    for name, value in plain.state.items():
        assert torch.dist(own.state[name], value) <= 1e-4 * value.norm()


def run_pair(folder: Path) -> tuple[Loop, Loop, Loop, Loop]:
    """Runs plain, ours, ours resumed, and ``PartialState`` with the engine."""
    torch.manual_seed(3)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    plain = run_loop(accelerator, accelerator.prepare(*parts()))

    torch.manual_seed(3)
    accelerator = PatrickStarAccelerator(cpu=True, gradient_accumulation_steps=2, patrickstar_config=engine_config())
    prepared = accelerator.prepare(*parts())
    own = run_loop(accelerator, prepared, steps=2)
    accelerator.save_state(str(folder / "state"))
    accelerator.save_model(prepared[0], folder / "weights")
    rest = run_loop(accelerator, prepared, steps=2, skip=4)
    assert accelerator.engine.report()["device_peak_bytes"] <= MODEL_DATA_BYTES // 4
    accelerator.free_memory()

    torch.manual_seed(3)
    accelerator = PatrickStarAccelerator(cpu=True, gradient_accumulation_steps=2, patrickstar_config=engine_config())
    prepared = accelerator.prepare(*parts())
    accelerator.load_state(str(folder / "state"))
    resumed = run_loop(accelerator, prepared, steps=2, skip=4)
    accelerator.free_memory()
    whole = Loop(own.losses + rest.losses, own.norms + rest.norms, own.rates + rest.rates, rest.state)
    return plain, whole, resumed, partial_state_loop()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["alone", "fsdp"])
def test_a_state_that_accelerate_saved_is_loaded(tmp_path, kind):
    torch.manual_seed(3)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    prepared = accelerator.prepare(*parts())
    run_loop(accelerator, prepared, steps=2)
    accelerator.save_state(str(tmp_path))
    if kind == "fsdp":
        values, states = get_state_dict(prepared[0], prepared[1].optimizer)
        for name, state, file in (("model", values, "model.safetensors"), ("optimizer", states, "optimizer.bin")):
            folder = {"model": "pytorch_model_fsdp_0", "optimizer": "optimizer_0"}[name]
            dcp.save({name: state}, checkpoint_id=tmp_path / folder)
            (tmp_path / file).unlink()
    plain = run_loop(accelerator, prepared, steps=2, skip=4)

    torch.manual_seed(4)
    accelerator = PatrickStarAccelerator(cpu=True, gradient_accumulation_steps=2, patrickstar_config=engine_config())
    prepared = accelerator.prepare(*parts())
    accelerator.load_state(str(tmp_path))
    assert_equal_loops(run_loop(accelerator, prepared, steps=2, skip=4), plain)
    if kind == "alone":
        (tmp_path / "optimizer.bin").write_bytes(b"damaged")
        before = accelerator.get_state_dict(prepared[0])
        with pytest.raises(ValueError, match=r"optimizer.bin cannot be read .* it is damaged"):
            accelerator.load_state(str(tmp_path))
        assert_same_bits(accelerator.get_state_dict(prepared[0]), before)
    accelerator.free_memory()


def partial_state_loop() -> Loop:
    torch.manual_seed(3)
    state = PartialState()
    engine, optimizer = initialize_engine(
        gpt2,
        state.local_process_index,
        engine_config(
            optimizer={"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}}, gradient_clipping=MAX_NORM
        ),
        model_parameters=lambda module: [
            {"params": [p for p in module.parameters() if p.ndim > 1]},
            {"params": [p for p in module.parameters() if p.ndim <= 1], "weight_decay": 0.01},
        ],
    )
    losses, norms = [], []
    data = Tokens(40, seed=1)
    with engine:
        engine.train()
        for step in range(STEPS):
            for micro in range(2):
                rows = range(state.num_processes)
                first = (step * 2 + micro) * state.num_processes
                with state.split_between_processes([data[first + row] for row in rows]) as mine:
                    batch = {key: torch.stack([item[key] for item in mine]) for key in mine[0]}
                loss = engine(**batch).loss
                engine.backward(loss / 2)
                losses.append(gather(loss.detach().reshape(1)).mean().item())
            norms.append(engine.grad_norm())
            optimizer.step()
        return Loop(losses, norms, [], engine.state_dict())


def test_the_loop(tmp_path):
    plain, own, resumed, recipe = run_pair(tmp_path)
    assert_equal_loops(own, plain)
    assert resumed.losses == own.losses[-4:]
    assert_same_bits(resumed.state, own.state)
    assert len(recipe.norms) == STEPS
    weights = load_file(tmp_path / "weights" / "model.safetensors")
    assert set(weights) == set(own.state) - {"lm_head.weight"}


def test_the_users_own_objects():
    model, optimizer, loader, scheduler = parts()
    batch = next(iter(loader))
    model(**batch).loss.backward()
    optimizer.step()
    momentum = optimizer.state[model.lm_head.weight]["exp_avg"].clone()
    teacher = gpt2().requires_grad_(False)
    accelerator = PatrickStarAccelerator(cpu=True, patrickstar_config=engine_config())
    with pytest.raises(ValueError, match="parameters that are in no model"):
        accelerator.prepare(optimizer)
    assert accelerator.prepare(teacher) is teacher
    joint = torch.optim.AdamW([*model.parameters(), *torch.nn.Linear(2, 2).parameters()])
    with pytest.raises(ValueError, match="2 of the optimizer's .* parameters are not in the GPT2LMHeadModel"):
        accelerator.prepare(model, joint)
    assert accelerator.prepare(model) is model
    prepared = accelerator.prepare(optimizer)
    state = prepared.state_dict()["state"][0]
    assert_same_bits(state["exp_avg"], momentum)
    assert state["step"] == 1
    assert type(teacher.lm_head.weight) is torch.nn.Parameter
    rate = prepared.param_groups[0]["lr"]
    scheduler.step()
    assert prepared.param_groups[0]["lr"] > rate
    model.train()
    accelerator.backward(model(**batch).loss)
    with pytest.raises(RuntimeError, match="is in PatrickStar's chunks"):
        optimizer.step()
    with pytest.raises(ValueError, match=r"1 parameters without transformer.*give model.parameters\(\)"):
        accelerator.clip_grad_norm_([model.transformer.ln_f.weight], 1.0)
    with pytest.raises(ValueError, match="use clip_grad_norm_"):
        accelerator.clip_grad_value_(model.parameters(), 1.0)
    with pytest.raises(StateError, match="an engine already, which trains one model with one optimizer"):
        accelerator.prepare(*parts()[:2])
    with pytest.raises(StateError):  # not through the accelerator
        model(**batch).loss.backward()
    assert accelerator.unwrap_model(model) is model
    accelerator.free_memory()
    assert type(model.lm_head.weight) is torch.nn.Parameter


def test_schedulers_warn_about_their_order_when_it_is_wrong_alone():
    for is_wrong in (False, True):
        model, optimizer, loader, _ = parts()
        accelerator = PatrickStarAccelerator(cpu=True, patrickstar_config=engine_config())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        model, stepped, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        model.train()
        accelerator.backward(model(**next(iter(loader))).loss)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for one in (scheduler, stepped) if is_wrong else (stepped, scheduler):
                one.step()
        assert ["before `optimizer.step()`" in str(warning.message) for warning in caught] == [True] * is_wrong
        accelerator.free_memory()


def test_named_checkpoints(tmp_path):
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = PatrickStarAccelerator(cpu=True, project_config=project, patrickstar_config=engine_config())
    with pytest.raises(StateError, match="no model is prepared"):
        accelerator.save_state()
    model, _ = accelerator.prepare(*parts()[:2])
    expected = accelerator.get_state_dict(model)
    accelerator.save_state()
    with torch.no_grad():
        model.transformer.ln_f.weight.mul_(2)
    accelerator.load_state()
    assert_same_bits(accelerator.get_state_dict(model), expected)
    accelerator.free_memory()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixed_precision": "fp8"}, "trains in .*bf16"),
        ({"mixed_precision": "bf16", "patrickstar_config": {"bf16": {"enabled": False}}}, "bf16.enabled is False"),
        ({"patrickstar_config": {"optimizer": {"params": {"lr": 1.0}}}}, "the optimizer's lr is 0.003"),
        ({"patrickstar_config": {"optimizer": {"type": "Adam"}}}, "the optimizer's class is 'AdamW'"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PatrickStarAccelerator(cpu=True, **options).prepare(*parts()[:2])


def test_precision():
    accelerator = PatrickStarAccelerator(cpu=True, mixed_precision="bf16", patrickstar_config=engine_config())
    assert accelerator.mixed_precision == "bf16"
    assert accelerator.scaler is None
    model, _ = accelerator.prepare(*parts()[:2])
    assert model.dtype == torch.bfloat16
    accelerator.free_memory()
    assert model.dtype == torch.float32


def classifying_loop(accelerator, teacher_dtype):
    """Losses of a script's own loss function, which has float32 weights and the logits of a frozen teacher."""
    torch.manual_seed(0)
    model, teacher = torch.nn.Linear(8, 3), torch.nn.Linear(8, 3, dtype=teacher_dtype).requires_grad_(False)
    rows = torch.randn(12, 8)
    model, teacher, optimizer = accelerator.prepare(model, teacher, torch.optim.AdamW(model.parameters(), lr=0.1))
    losses = []
    for row in rows.split(3):
        logits, aims = model(row), teacher(row.to(teacher_dtype)).softmax(-1)
        loss = torch.nn.functional.cross_entropy(logits, aims, weight=torch.tensor([1.0, 2.0, 3.0]))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [logits.dtype, aims.dtype, loss.dtype], accelerator.unwrap_model(teacher).weight.dtype


@pytest.mark.parametrize("teacher_dtype", [torch.float32, torch.bfloat16])
def test_outputs_are_in_float32(teacher_dtype):
    plain, _, _ = classifying_loop(Accelerator(cpu=True), torch.float32)
    accelerator = PatrickStarAccelerator(cpu=True, mixed_precision="bf16", patrickstar_config=engine_config())
    losses, dtypes, weights = classifying_loop(accelerator, teacher_dtype)
    assert losses == pytest.approx(plain, rel=1e-2)
    assert dtypes == [torch.float32] * 3
    assert weights == teacher_dtype
    model = accelerator.engine.module
    accelerator.free_memory()
    assert model.half()(torch.ones(1, 8, dtype=torch.half)).dtype == torch.half


def test_other_models_compute_in_the_precision():
    """A reference model with a policy's weights, in the folder's bfloat16, has the policy's bits."""
    accelerator = PatrickStarAccelerator(cpu=True, mixed_precision="bf16", patrickstar_config=engine_config())
    model, wide, reference = gpt2().bfloat16(), gpt2(), gpt2().bfloat16()
    dtypes = []
    wide.transformer.h[0].mlp.c_fc.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    wide = accelerator.prepare_model(wide, evaluation_mode=True)
    reference = accelerator.prepare_model(reference, evaluation_mode=True)
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    batch = Tokens(1, seed=3)[0]["input_ids"][None]
    with torch.no_grad():
        outputs = [module(batch).logits for module in (model, wide, reference)]
    accelerator.free_memory()
    assert {logits.dtype for logits in outputs} == {torch.float32}
    assert dtypes == [torch.bfloat16]
    assert_same_bits(outputs[2], outputs[0])
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0.05, atol=0.02)


@pytest.mark.slow
def test_two_ranks(two_ranks):
    for rank in two_ranks:
        plain, own, resumed, recipe = rank["loops"]
        assert_equal_loops(own, plain)
        assert resumed.losses == own.losses[-4:]
        assert recipe.losses == pytest.approx(two_ranks[0]["loops"][3].losses)
