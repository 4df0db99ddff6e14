import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from patrickstar.command.checkpoints import main
from tests.checkpoint.foreign.plain_run import continued, plain_run
from tests.checkpoint.foreign.plain_states import check_refused, check_resumes
from tests.distributed import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def save_as_torchtitan(folder, model, optimizer, sharded=lambda value: value):
    values, states = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    values, states = ({key: sharded(value) for key, value in held.items()} for held in (values, states))
    schedule, train_state = {"last_epoch": 3}, {"step": torch.tensor(3), "ntokens_seen": torch.tensor(72)}
    more = {"lr_scheduler": schedule, "train_state": train_state, "dataloader": {"dp_rank_0": b"\x80"}}
    dcp.save({**values, "optimizer": states, **more}, checkpoint_id=folder)


def save_as_accelerate(folder, model, optimizer):
    values, states = get_state_dict(model, optimizer)
    dcp.save({"model": values}, checkpoint_id=folder / "pytorch_model_fsdp_0")
    dcp.save({"optimizer": states}, checkpoint_id=folder / "optimizer_0")
    torch.save({"last_epoch": 3, "_step_count": 4}, folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text('{"global_step": 3}')


def save_as_app(folder, model, optimizer):
    values, states = get_state_dict(model, optimizer)
    dcp.save({"app": {"model": values, "optim": states}}, checkpoint_id=folder)


SAVES = {"torchtitan": save_as_torchtitan, "accelerate": save_as_accelerate, "app": save_as_app}


@pytest.mark.parametrize("name", SAVES)
def test_an_engine_continues(tmp_path, name, caplog):
    model, optimizer = plain_run()
    SAVES[name](tmp_path / "step-3", model, optimizer)
    with caplog.at_level("INFO", "patrickstar"):
        found = check_resumes(tmp_path / "step-3", model, optimizer, continued(model, optimizer))
    assert found == (tmp_path / "step-3", {})
    assert "step 3" in caplog.text
    assert "not taken over: random number generators" in caplog.text
    assert ("dataloader" in caplog.text) == (name == "torchtitan")


def save_sharded_and_resume(folder):
    distributed.init_process_group("gloo")
    try:
        model, optimizer = plain_run()
        mesh = init_device_mesh("cpu", (2,))

        def shard(value):
            is_large = isinstance(value, torch.Tensor) and value.dim() > 0
            return distribute_tensor(value.detach(), mesh, [Shard(value.dim() - 1)]) if is_large else value

        save_as_torchtitan(folder, model, optimizer, shard)
        check_resumes(folder, model, optimizer, continued(model, optimizer))
    finally:
        distributed.destroy_process_group()


def test_one_and_two_ranks_continue_what_two_ranks_sharded(tmp_path):
    run_ranks(2, save_sharded_and_resume, tmp_path)
    assert len(list(tmp_path.glob("*.distcp"))) == 2
    model, optimizer = plain_run()
    check_resumes(tmp_path, model, optimizer, continued(model, optimizer))


def test_a_schedule_is_taken_over(tmp_path):
    from tests.checkpoint.foreign.plain_run import engine_of

    model, optimizer = plain_run()
    save_as_accelerate(tmp_path, model, optimizer)
    engine, own = engine_of()
    with engine:
        schedule = torch.optim.lr_scheduler.ConstantLR(own)
        engine.load_checkpoint(tmp_path, lr_scheduler=schedule)
        assert schedule.last_epoch == 3


class Hostile:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def hostile_metadata(folder):
    ran = folder / "ran"
    (folder / ".metadata").write_bytes(pickle.dumps(Hostile(f"touch {ran}")))
    return ".metadata: its pickle names posix.system"


def hostile_value(folder):
    """A value of the state dict within the data file calls a function."""
    import io

    metadata = pickle.loads((folder / ".metadata").read_bytes())
    index = next(index for index in metadata.storage_data if index.fqn.endswith("weight_decay"))
    buffer = io.BytesIO()
    torch.save(Hostile(f"touch {folder / 'ran'}"), buffer)
    (folder / "evil.distcp").write_bytes(buffer.getvalue())
    info = metadata.storage_data[index]
    info.relative_path, info.offset, info.length = "evil.distcp", 0, len(buffer.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return "names posix.system"


def outside(folder):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = "../../secret"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return "no file of its folder"


def missing_data(folder):
    (folder / "__0_0.distcp").unlink()
    return "__0_0.distcp is missing"


def truncated_data(folder):
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-2000])
    return "copy the file again"


def truncated_metadata(folder):
    path = folder / ".metadata"
    path.write_bytes(path.read_bytes()[:-200])
    return ".metadata cannot be read"


def uncovered(folder):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["embed.weight"].chunks.clear()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return "do not cover its shape"


def other_names(folder):
    path = folder / ".metadata"
    path.write_bytes(path.read_bytes().replace(b"middle", b"center"))
    return "of another model, nothing was loaded"


DAMAGES = [
    *(hostile_metadata, hostile_value, outside, missing_data, truncated_data, truncated_metadata, uncovered),
    other_names,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_refused_before_anything_is_written(tmp_path, damage):
    model, optimizer = plain_run()
    save_as_torchtitan(tmp_path, model, optimizer)
    check_refused(tmp_path, str(tmp_path), damage(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_weights_in_one_file_are_refused(tmp_path):
    torch.save({}, tmp_path / "pytorch_model_fsdp.bin")
    check_refused(tmp_path, "FULL_STATE_DICT", "SHARDED_STATE_DICT")


def test_commands_show_and_verify(tmp_path, capsys):
    model, optimizer = plain_run()
    save_as_torchtitan(tmp_path, model, optimizer)
    assert main(["inspect", str(tmp_path)]) == 0
    assert "torch.distributed.checkpoint" in capsys.readouterr().out
    assert main(["verify", str(tmp_path)]) == 0
