import logging
import os
import types

import pytest
import torch

import patrickstar as deepspeed
from patrickstar import CheckpointError
from patrickstar.checkpoint.foreign.safe_files import StandIn
from patrickstar.command.checkpoints import main
from tests.checkpoint.foreign.deepspeed_files import TAG, deepspeed_classes, save_universal, save_zero
from tests.checkpoint.foreign.plain_run import ADAM, Net, batches, continued, groups_of, plain_run
from tests.checkpoint.foreign.plain_states import check_refused, check_resumes, check_same
from tests.distributed import run_ranks

SAVES = {
    **{f"zero2-{ranks}": (save_zero, {"stage": 2, "ranks": ranks}) for ranks in (1, 2, 4)},
    **{f"zero3-{ranks}": (save_zero, {"stage": 3, "ranks": ranks}) for ranks in (1, 2, 4)},
    "zero3-sub-groups": (save_zero, {"stage": 3, "ranks": 2, "sub_groups": 2}),
    "zero2-bf16": (save_zero, {"stage": 2, "ranks": 2, "prefix": "bf16_"}),
    "universal-of-zero2": (save_universal, {"stage": 2}),
    "universal-of-zero3": (save_universal, {"stage": 3}),
}
COUNTS = {"global_steps": 3, "global_samples": 96, "skipped_steps": 1}


@pytest.mark.parametrize("name", SAVES)
def test_an_engine_continues(tmp_path, name, caplog):
    model, optimizer = plain_run()
    save, options = SAVES[name]
    path = save(tmp_path, model, optimizer, **options)
    with caplog.at_level(logging.INFO, "patrickstar"):
        found = check_resumes(tmp_path, model, optimizer, continued(model, optimizer))
    assert found == (path, COUNTS)
    assert "not taken over: random number generators, the loss scale" in caplog.text


ON_TWO_RANKS = ("zero2-1", "zero2-4", "zero3-2", "zero3-4", "universal-of-zero2")


def resume_on_ranks(folders):
    model, optimizer = plain_run()
    after = continued(model, optimizer)
    for folder in folders:
        check_resumes(folder, model, optimizer, after)


def test_two_ranks_continue(tmp_path):
    model, optimizer = plain_run()
    for name in ON_TWO_RANKS:
        save, options = SAVES[name]
        save(tmp_path / name, model, optimizer, **options)
    run_ranks(2, resume_on_ranks, [tmp_path / name for name in ON_TWO_RANKS])


def test_the_face_continues_with_schedule_and_counts(tmp_path):
    model, optimizer = plain_run()
    state = {"epoch": 7, "arguments": types.SimpleNamespace(a=1)}
    save_zero(tmp_path, model, optimizer, client_state=state)
    warmup = {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 0.05}}
    config = {"train_batch_size": 4, "optimizer": {"type": "AdamW"}, "scheduler": warmup}
    new = Net()
    engine, own, *_ = deepspeed.initialize(model=new, config=config, model_parameters=groups_of(new))
    with engine:
        path, client_state = engine.load_checkpoint(tmp_path)
        assert (path, client_state) == (str(tmp_path / TAG), {"epoch": 7})
        assert {key: getattr(engine, key) for key in COUNTS} == COUNTS
        assert engine.lr_scheduler.state_dict() == {"last_batch_iteration": 2}
        for group in own.param_groups:
            group["lr"] = ADAM["lr"]  # the schedule's, until here
        check_same(engine, own, model, optimizer)
        engine.backward(engine(batches(1, 2)[0]))
        engine.step()
        assert engine.global_steps == 4


@pytest.mark.parametrize("schedule", [None, {"last_epoch": 3}, StandIn()])
def test_a_schedule_that_does_not_fit_is_refused(tmp_path, schedule):
    model, optimizer = plain_run()
    save_zero(tmp_path, model, optimizer, lr_scheduler=schedule)
    new = Net()
    config = {"train_batch_size": 4, "optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR"}}
    engine, own, *_ = deepspeed.initialize(model=new, config=config, model_parameters=groups_of(new))
    with engine:
        with pytest.raises(CheckpointError, match="without"):
            engine.load_checkpoint(tmp_path)
        assert own.state_dict()["state"] == {}
        engine.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
        assert engine.global_steps == 3


def test_a_module_alone(tmp_path):
    model, optimizer = plain_run()
    save_zero(tmp_path, model, optimizer)
    new = Net()
    config = {"train_batch_size": 4, "optimizer": {"type": "AdamW"}}
    engine, own, *_ = deepspeed.initialize(model=new, config=config, model_parameters=groups_of(new))
    with engine:
        engine.load_checkpoint(tmp_path, load_module_only=True)
        assert torch.equal(engine.state_dict()["embed.weight"], model.embed.weight)
        assert own.state_dict()["state"] == {}
        assert engine.global_steps == 0


def test_zero1_keeps_frozen_parameters_in_the_module(tmp_path):
    model, optimizer = plain_run()
    with torch.no_grad():
        for param in model.frozen.parameters():
            param.copy_(param.bfloat16())
    save_zero(tmp_path, model, optimizer, frozen_param_shapes=None, frozen_param_fragments=None)
    check_resumes(tmp_path, model, optimizer, continued(model, optimizer))


def elastic(state):
    """States by group, without padding and options."""
    held = state["optimizer_state_dict"]
    masters = held["single_partition_of_fp32_groups"]
    held["base_optimizer_state_step"] = 3
    held["base_optimizer_state"] = [
        {kind: states[kind][: len(masters[index])].clone() for kind in ("exp_avg", "exp_avg_sq")}
        for index, states in held["base_optimizer_state"]["state"].items()
    ]


def counted_by_groups(state):
    """DeepSpeed's FusedAdam counts in groups."""
    base = state["optimizer_state_dict"]["base_optimizer_state"]
    for states in base["state"].values():
        del states["step"]
    for group in base["param_groups"]:
        group["step"] = torch.tensor([3])


@pytest.mark.parametrize("edit", [elastic, counted_by_groups])
def test_other_ways_to_count(tmp_path, edit, caplog):
    model, optimizer = plain_run()
    for file in save_zero(tmp_path, model, optimizer, ranks=4).glob("*_optim_states.pt"):
        change(file, edit)
    options = {**ADAM, "weight_decay": 0.0} if edit is elastic else {}  # the engine's own
    with caplog.at_level(logging.INFO, "patrickstar"):
        check_resumes(tmp_path, model, optimizer, continued(model, optimizer), options)
    assert ("options of groups, which are not stored" in caplog.text) == (edit is elastic)


def test_a_model_with_one_more_layer_takes_the_common_ones(tmp_path):
    class Larger(Net):
        def __init__(self):
            super().__init__()
            self.more = torch.nn.Linear(2, 2)

    model, optimizer = plain_run()
    save_zero(tmp_path, model, optimizer)
    new = Larger()
    engine, *_ = deepspeed.initialize(model=new, config={"train_batch_size": 4, "optimizer": {"type": "AdamW"}})
    with engine:
        engine.load_checkpoint(tmp_path, load_module_strict=False, load_optimizer_states=False)
        assert torch.equal(engine.state_dict()["embed.weight"], model.embed.weight)


class Hostile:
    def __init__(self, call, *args):
        self.call, self.args = call, args

    def __reduce__(self):
        return self.call, self.args


def change(path, edit):
    with deepspeed_classes():
        state = torch.load(path, weights_only=False)
        edit(state)
        torch.save(state, path)


@pytest.mark.parametrize("stage", [2, 3])
def test_hostile_pickles_run_nothing(tmp_path, stage):
    model, optimizer = plain_run()
    ran = tmp_path / "ran"
    for number, call in enumerate(
        [Hostile(os.system, f"touch {ran}"), Hostile(eval, f"open({str(ran)!r}, 'w')"), Hostile(exec, "1")]
    ):
        folder = tmp_path / str(number)
        path = save_zero(folder, model, optimizer, stage=stage, client_state={"bad": call})
        file = min(path.glob("*_model_states.pt"))
        said = check_refused(folder, str(file), "nothing of it was run")
        assert any(name in said for name in ("posix.system", "builtins.eval", "builtins.exec"))
    assert not ran.exists()


def drop_optimizer_file(path):
    file = sorted(path.glob("*_optim_states.pt"))[-1]
    file.unlink()
    return "copy"


def drop_first_optimizer_file(path):
    min(path.glob("*_optim_states.pt")).unlink()
    return "of rank 0"


def drop_model_file(path):
    file = next(path.glob("*_model_states.pt"))
    file.unlink()
    return "copy"


def truncate(path):
    file = min(path.glob("*_optim_states.pt"))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return str(file)


def text(path):
    file = min(path.glob("*_optim_states.pt"))
    file.write_bytes(b"no checkpoint")
    return str(file)


def wrong_numel(path):
    def edit(state):
        held = state["optimizer_state_dict"]
        key = "fp32_flat_groups" if "fp32_flat_groups" in held else "single_partition_of_fp32_groups"
        held[key][0] = held[key][0][:-9].clone()

    change(min(path.glob("*_optim_states.pt")), edit)
    return "flat group has"


def wrong_shape(path):
    for file in path.glob("*_model_states.pt"):
        change(file, lambda state: state["param_shapes"][0].update({"embed.weight": torch.Size([7, 11])}))
    return "embed.weight (shape (7, 11) in the checkpoint, (11, 7) here)"


def other_names(path):
    def edit(state):
        state["param_shapes"] = [
            {name.replace("middle", "center"): shape for name, shape in group.items()}
            for group in state["param_shapes"]
        ]

    for file in path.glob("*_model_states.pt"):
        change(file, edit)
    return "of another model, nothing was loaded"


def negative_step(path):
    def edit(state):
        held = state["optimizer_state_dict"]
        (held.get("base_optimizer_state") or held["optimizer_state_dict"])["state"][0]["step"] = -1

    change(min(path.glob("*_optim_states.pt")), edit)
    return "not a whole number of steps"


def tensor_parallel(path):
    file = min(path.glob("*_optim_states.pt"))
    file.rename(path / file.name.replace("mp_rank_00", "mp_rank_01"))
    return "tensor, pipeline or expert parallelism"


def without_optimizer_files(path):
    for file in path.glob("*_optim_states.pt"):
        file.unlink()
    return "zero_to_fp32.py"


DAMAGES = [
    *(drop_optimizer_file, drop_first_optimizer_file, drop_model_file, truncate, text, wrong_numel, wrong_shape),
    *(other_names, negative_step, tensor_parallel, without_optimizer_files),
]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_damaged_is_refused_before_anything_is_written(tmp_path, stage, damage):
    model, optimizer = plain_run()
    path = save_zero(tmp_path, model, optimizer, stage=stage)
    check_refused(tmp_path, str(path), damage(path))


@pytest.mark.parametrize("file", ["fp32.pt", "exp_avg.pt", "step.pt", "../optimizer_state.pt"])
def test_a_universal_checkpoint_lacks_a_file(tmp_path, file):
    model, optimizer = plain_run()
    path = save_universal(tmp_path, model, optimizer)
    (path / "zero" / "embed.weight" / file).unlink()
    check_refused(tmp_path, str(path))


def test_a_universal_tensor_of_another_size(tmp_path):
    model, optimizer = plain_run()
    path = save_universal(tmp_path, model, optimizer) / "zero" / "embed.weight" / "exp_avg.pt"
    torch.save({"param": torch.zeros(4)}, path)
    check_refused(tmp_path, str(path), "exp_avg of embed.weight has 4 elements")


def test_groups_with_other_options_are_refused(tmp_path):
    model, _ = plain_run()
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW([{"params": params[:1]}, {"params": params[1:], "lr": 0.5}], **ADAM)
    model(batches(1, 1)[0]).backward()
    optimizer.step()
    save_zero(tmp_path, model, optimizer)
    check_refused(tmp_path, "different options; build the engine with the same model_parameters")


def test_merge_makes_a_checkpoint_of_patrickstars(tmp_path):
    model, optimizer = plain_run()
    save_zero(tmp_path / "run", model, optimizer, ranks=4)
    assert main(["merge", str(tmp_path / "run"), str(tmp_path / "own")]) == 0
    assert main(["verify", str(tmp_path / "own")]) == 0
    check_resumes(tmp_path / "own", model, optimizer, continued(model, optimizer))


def test_commands_show_verify_and_export(tmp_path, capsys):
    from safetensors.torch import load_file

    model, optimizer = plain_run()
    path = save_zero(tmp_path / "run", model, optimizer, stage=3)
    assert main(["inspect", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert f"{path}: step 3" in shown
    assert "a DeepSpeed ZeRO-3 checkpoint of 2 ranks" in shown
    assert main(["verify", str(tmp_path / "run")]) == 0
    assert "every tensor can be read" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "weights")]) == 0
    weights = load_file(tmp_path / "weights" / "model.safetensors")
    for name, value in weights.items():
        assert torch.equal(value, model.state_dict()[name].detach()), name
    assert weights.keys() == model.state_dict().keys() - {"head.weight"}
    truncate(path)
    assert main(["verify", str(tmp_path / "run")]) == 1
    assert "NOT READABLE" in capsys.readouterr().out
