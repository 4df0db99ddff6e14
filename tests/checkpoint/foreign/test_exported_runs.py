import copy
import math
import threading
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from patrickstar import CheckpointError
from patrickstar.checkpoint import Checkpoint
from patrickstar.checkpoint.runs import RunFormat, export_stored_run
from patrickstar.command.checkpoints import main
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.checkpoint.foreign.plain_run import ADAM, Net, batches, continued, engine_of, groups_of, plain_run
from tests.checkpoint.foreign.plain_states import check_resumes
from tests.checkpoint.foreign.test_dcp_checkpoints import save_as_torchtitan
from tests.checkpoint.foreign.test_memory import LAYERS, PARAM_BYTES, Tower, anonymous_bytes
from tests.distributed import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def by_engine(folder, target, form):
    """An engine takes the plain run over, and exports it."""
    engine, _ = engine_of()
    with engine:
        engine.load_checkpoint(folder)
        engine.export_checkpoint(target, form, {"epoch": 3})


def by_command(folder, target, form):
    """Two ranks take the plain run over and save it; the command exports their checkpoint."""
    saved = target.parent / "saved"
    run_ranks(2, save_own, folder, saved)
    assert main(["export", str(saved), str(target), "--format", form]) == 0


def save_own(folder, saved):
    engine, _ = engine_of()
    with engine:
        engine.load_checkpoint(folder)
        engine.save_checkpoint(saved, client_state={"epoch": 3})


def by_ranks(folder, target, form):
    run_ranks(2, by_engine, folder, target, form)


WAYS = [by_engine, by_command, by_ranks]


@pytest.mark.parametrize("export", WAYS)
def test_torch_loads_dcp(tmp_path, export):
    model, optimizer = plain_run()
    save_as_torchtitan(tmp_path / "plain", model, optimizer)
    export(tmp_path / "plain", tmp_path / "out" / "step-3", "dcp")
    other = Net()
    own = torch.optim.AdamW(groups_of(other), lr=1.0)
    torch.optim.lr_scheduler.ConstantLR(own)  # gives groups one more option
    states = get_optimizer_state_dict(other, own, options=FLAT)
    values = get_model_state_dict(other)
    held = {**values, "optimizer": states, "train_state": {"step": 0, "ntokens_seen": 1}}
    dcp.load(held, checkpoint_id=tmp_path / "out/step-3", no_dist=True)
    set_optimizer_state_dict(other, own, states, options=FLAT)
    assert_same_bits(dict(other.state_dict()), dict(model.state_dict()))
    found, expected = own.state_dict(), optimizer.state_dict()
    assert found["state"].keys() == expected["state"].keys()
    for key, state in expected["state"].items():
        assert_same_bits(found["state"][key], state)
    assert [group.pop("initial_lr") for group in found["param_groups"]] == [ADAM["lr"]] * 2
    assert found["param_groups"] == expected["param_groups"]
    assert held["train_state"] == {"step": 3, "ntokens_seen": 0}
    assert continued(other, own)[0] == continued(model, optimizer)[0]


class DeepSpeedRank:
    """One rank of DeepSpeed that loads a universal checkpoint.

    Written from ``universal_checkpoint.py``, ``base_optimizer.py`` and ``stage3.py`` of DeepSpeed 0.19.
    """

    def __init__(self, folder, rank, ranks):
        self.folder, self.rank, self.ranks = folder / "zero", rank, ranks
        self.optimizer = torch.load(self.folder / "optimizer_state.pt", weights_only=False)
        assert self.optimizer["ds_version"]

    def stage2(self, names, shapes):
        """The rank's range of a flat group: masters, states and the step."""
        length = math.ceil(sum(shape.numel() for shape in shapes.values()) / self.ranks)
        fragments, steps, begin = {}, [], 0
        for name in names:
            for file in (self.folder / name).glob("*.pt"):
                held = torch.load(file, weights_only=False)
                if file.stem == "step":
                    steps.append(held)
                    continue
                assert held["param"].numel() == shapes[name].numel()
                first = max(begin, self.rank * length) - begin
                last = min(begin + shapes[name].numel(), (self.rank + 1) * length) - begin
                if first < last:
                    fragments.setdefault(file.stem, []).append(held["param"].flatten().narrow(0, first, last - first))
            begin += shapes[name].numel()
        assert all(step == steps[0] for step in steps)
        return {key: torch.cat(parts) for key, parts in fragments.items()}, steps[0]

    def stage3(self, name, key):
        """The rank's range of a parameter."""
        held = torch.load(self.folder / name / f"{key}.pt", weights_only=False)["param"].view(-1)
        size = math.ceil(held.numel() / self.ranks)
        padded = torch.cat([held, torch.zeros(size * self.ranks - held.numel())])
        return padded.narrow(0, self.rank * size, size)


@pytest.mark.parametrize("export", WAYS)
def test_deepspeed_loads_universal(tmp_path, export):
    model, optimizer = plain_run()
    save_as_torchtitan(tmp_path / "plain", model, optimizer)
    folder = tmp_path / "out" / "global_step3"
    export(tmp_path / "plain", folder, "universal")
    assert (tmp_path / "out/latest_universal").read_text() == "global_step3"
    states = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)
    assert (states["global_steps"], states["epoch"], states["dp_world_size"], states["mp_world_size"]) == (3, 3, 1, 1)
    params = dict(model.named_parameters())
    ranks = [DeepSpeedRank(folder, rank, 2) for rank in range(2)]
    for index, (group, shapes) in enumerate(zip(optimizer.param_groups, states["param_shapes"], strict=True)):
        plain = {"fp32": group["params"]} | {
            kind: [optimizer.state[param][kind] for param in group["params"]] for kind in ("exp_avg", "exp_avg_sq")
        }
        assert [id(params[name]) for name in shapes] == [id(param) for param in group["params"]]
        parts = [rank.stage2(list(shapes), shapes) for rank in ranks]
        assert [step for _, step in parts] == [3, 3]
        for kind, tensors in plain.items():
            whole = torch.cat([part[kind] for part, _ in parts])
            assert torch.equal(whole, torch.cat([tensor.detach().flatten() for tensor in tensors]))
            for name, tensor in zip(shapes, tensors, strict=True):
                own = torch.cat([rank.stage3(name, kind) for rank in ranks])[: tensor.numel()]
                assert torch.equal(own.view(tensor.shape), tensor)
        own = ranks[0].optimizer["param_groups"][index]
        assert {key: own[key] for key in ("lr", "betas", "eps", "weight_decay")} == {
            key: group[key] for key in ("lr", "betas", "eps", "weight_decay")
        }
    assert ranks[0].optimizer["optimizer_state_dict"]["state"][0]["step"] == 3
    path, client_state = check_resumes(tmp_path / "out", model, optimizer, continued(model, optimizer))
    assert path == folder
    assert client_state["epoch"] == 3


def test_adam_stays_adam(tmp_path):
    options = {"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
    engine, optimizer = initialize_engine(Net, 0, options, model_parameters=groups_of)
    with engine:
        engine.backward(engine(batches(1, 2)[0]))
        optimizer.step()
        engine.export_checkpoint(tmp_path / "dcp")
    found = {"optimizer": {"param_groups.norm.bias.decoupled_weight_decay": True}}
    dcp.load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert found["optimizer"] == {"param_groups.norm.bias.decoupled_weight_decay": False}


class Growing(Net):
    """Its bias is trained from the third step on."""

    def __init__(self):
        super().__init__()
        self.late = torch.nn.Parameter(torch.zeros(1))
        self.uses_late = False

    def forward(self, tokens):
        loss = super().forward(tokens)
        return loss * (1 + self.late.sum()) if self.uses_late else loss


def test_parameters_without_updates(tmp_path):
    engine, optimizer = initialize_engine(Growing, 0, {"optimizer": {"type": "AdamW", "params": ADAM}})

    def step(tokens):
        engine.backward(engine(tokens))
        optimizer.step()

    with engine:
        engine.export_checkpoint(tmp_path / "fresh")
        step(batches(1, 2)[0])
        engine.export_checkpoint(tmp_path / "dcp")
        engine.export_checkpoint(tmp_path / "universal", "universal")
        engine.module.uses_late = True
        step(batches(1, 3)[0])
        with pytest.raises(CheckpointError, match="between 1 and 2 updates, and DeepSpeed counts them by group"):
            engine.export_checkpoint(tmp_path / "refused", "universal")
        assert not (tmp_path / "refused").exists()
        step(batches(1, 4)[0])
    keys = {f"state.late.{kind}": torch.ones(1) for kind in ("exp_avg", "exp_avg_sq")}
    held = {"optimizer": {**copy.deepcopy(keys), "state.late.step": torch.tensor(9.0)}}
    dcp.load(held, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(float(value) == 0 for value in held["optimizer"].values())
    for kind in ("exp_avg", "exp_avg_sq"):
        assert not torch.load(tmp_path / f"universal/zero/late/{kind}.pt")["param"].any()
    assert torch.load(tmp_path / "universal/zero/late/step.pt") == 1
    dcp.load({"optimizer": keys}, checkpoint_id=tmp_path / "fresh", no_dist=True)
    assert not any(keys.values())


def test_what_cannot_be_exported(tmp_path, capsys):
    options = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}
    engine, optimizer = initialize_engine(Net, 0, options)
    with engine:
        engine.backward(engine(batches(1, 2)[0]))
        with pytest.raises(Exception, match="between backward and step"):
            engine.export_checkpoint(tmp_path / "out")
        optimizer.step()
        saved = engine.save_checkpoint(tmp_path / "saved")
        for form in RunFormat:
            with pytest.raises(CheckpointError, match="of SGD, and runs of Adam and AdamW are"):
                engine.export_checkpoint(tmp_path / "out", form)
        with pytest.raises(ValueError, match="format is 'pickle'; give one of dcp, universal"):
            engine.export_checkpoint(tmp_path / "out", "pickle")
    with pytest.raises(CheckpointError, match="exists and is no empty folder"), Checkpoint(saved) as checkpoint:
        export_stored_run(checkpoint, saved, RunFormat.DCP)
    assert main(["export", str(saved), str(tmp_path / "out"), "--format", "dcp", "--dtype", "bf16"]) == 2
    assert "--dtype is of --format weights" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]


def peak_of(call):
    """Most anonymous memory during a call beyond that before it."""
    before, peak, over = anonymous_bytes(), [0], threading.Event()

    def watch():
        while not over.is_set():
            peak[0] = max(peak[0], anonymous_bytes())
            time.sleep(0.0005)

    thread = threading.Thread(target=watch)
    thread.start()
    call()
    over.set()
    thread.join()
    return peak[0] - before


def export_peaks(saved, target):
    found = []
    for form in RunFormat:
        with Checkpoint(saved) as checkpoint:
            found.append(peak_of(lambda: export_stored_run(checkpoint, target / form.value, form)))  # noqa: B023
    return found


class HalfFrozen(Tower):
    def __init__(self):
        super().__init__()
        self.layers[: LAYERS // 2].requires_grad_(False)

    def forward(self, inputs):
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs.sum()


def test_exports_take_a_few_parameters_memory(tmp_path):
    engine, optimizer = initialize_engine(HalfFrozen, 0, {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}})
    with engine:
        engine.backward(engine(torch.ones(1, 768)))
        optimizer.step()
        saved = engine.save_checkpoint(tmp_path / "saved")
    (found,) = run_ranks(1, export_peaks, saved, tmp_path)
    print([f"{used / PARAM_BYTES:.1f} parameters" for used in found])
    assert 0 < max(found) < 3.5 * PARAM_BYTES
