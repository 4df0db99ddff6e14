from collections import OrderedDict

import pytest
import torch

from patrickstar.command.checkpoints import main
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.checkpoint.foreign.plain_run import ADAM, Net, batches, train_plain
from tests.checkpoint.foreign.plain_states import check_refused
from tests.checkpoint.foreign.test_dcp_checkpoints import Hostile
from tests.distributed import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
OPTIONS = {**ADAM, "weight_decay": 0.1}


def plain():
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], **OPTIONS)
    train_plain(model, optimizer, 3, 1)
    return model, optimizer


def save_first(folder, model, optimizer, ranks):
    """Writes what ``state_dict`` of the first PatrickStar's engine and optimizer gave, on each rank.

    As in its ``checkpoint.py`` and ``fp16_cpu_adam.py``: the embedding stays with PyTorch, with an empty parameter
    before it; other parameters are views of chunks, those of two ranks in turn; frozen ones have states too.
    """
    folder.mkdir()
    params = OrderedDict(model.named_parameters())
    in_chunks = [name for name in params if name != "embed.weight"]
    for rank in range(ranks):
        local = in_chunks[rank::ranks]
        chunk, held, begin = torch.cat([params[name].detach().flatten() for name in local]), {}, 0
        for name in local:
            held[name] = chunk[begin : begin + params[name].numel()].view(params[name].shape)
            begin += params[name].numel()
        values = OrderedDict()
        for name, value in model.state_dict().items():  # shared parameters under both names, and buffers
            if name in in_chunks and name not in local:
                continue
            values[name] = held.get(name, value)
        values._metadata = OrderedDict({"": {"version": 1}})
        torch.save(values, folder / f"model-{rank}.pt")
        options = {**OPTIONS, "amsgrad": False}
        own = {key: value for key, value in OPTIONS.items() if key != "lr"} | {"lr": 0.5}  # a copy that no one reads
        states = {0: {**own, "step": 0}}
        for index, (name, param) in enumerate(params.items(), 1):
            known = optimizer.state.get(param)
            states[index] = {**own, "step": 0}
            if name in local or name == "embed.weight":
                states[index] |= {
                    kind: known[kind] if known else torch.zeros_like(param) for kind in ("exp_avg", "exp_avg_sq")
                }
                states[index]["step"] = int(known["step"]) if known else 0
        groups = [{**options, "params": list(range(len(params) + 1))}]
        torch.save({"state": states, "param_groups": groups}, folder / f"optimizer-{rank}.pt")


def check_continues(folder):
    model, optimizer = plain()
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 1.0}}, "default_chunk_size": 1024}
    engine, own = initialize_engine(Net, 0, config)
    with engine:
        assert engine.load_checkpoint(folder) == (folder, {})
        assert_same_bits(dict(engine.state_dict()), dict(model.state_dict()))
        found, params = own.state_dict(), [param for group in own.param_groups for param in group["params"]]
        names = {param: name for name, param in engine.named_parameters()}
        plain_states = {name: optimizer.state[param] for name, param in model.named_parameters() if param.requires_grad}
        assert {names[params[key]] for key in found["state"]} == set(plain_states)
        for key, state in found["state"].items():
            for kind in ("step", "exp_avg", "exp_avg_sq"):
                assert torch.equal(state[kind], plain_states[names[params[key]]][kind])
        assert {key: own.param_groups[0][key] for key in OPTIONS} == OPTIONS
        losses = []
        for tokens in batches(4, 2):
            loss = engine(tokens)
            engine.backward(loss)
            own.step()
            losses.append(loss.item())
        torch.testing.assert_close(losses, train_plain(model, optimizer, 4, 2), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_continues(tmp_path, ranks):
    save_first(tmp_path / "old", *plain(), ranks)
    check_continues(tmp_path / "old")
    if ranks == 1:
        run_ranks(2, check_continues, tmp_path / "old")


def test_commands_show_it_and_take_states_where_they_are_certain(tmp_path, capsys):
    model, optimizer = plain()
    save_first(tmp_path / "old", model, optimizer, 1)
    assert main(["inspect", str(tmp_path / "old")]) == 0
    assert "the first PatrickStar, of 1 ranks" in capsys.readouterr().out
    assert main(["merge", str(tmp_path / "old"), str(tmp_path / "merged")]) == 0
    assert "no model says which tensors are buffers" in capsys.readouterr().out  # Net has a float buffer
    values = torch.load(tmp_path / "old/model-0.pt", weights_only=False)
    del values["scale"], values["head.weight"]
    torch.save(values, tmp_path / "old/model-0.pt")
    assert main(["export", str(tmp_path / "old"), str(tmp_path / "dcp"), "--format", "dcp"]) == 0
    assert "no model says" not in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "dcp")]) == 0
    assert capsys.readouterr().out.count("momentum, variance, 3 updates") == 5


def without_a_rank(folder):
    (folder / "optimizer-1.pt").unlink()
    return ["no file optimizer-1.pt", "copy the files of all 2 ranks"]


def hostile(folder):
    torch.save(Hostile(f"touch {folder / 'ran'}"), folder / "model-1.pt")
    return ["model-1.pt", "names posix.system", "nothing of it was run"]


def of_another_order(folder):
    saved = torch.load(folder / "optimizer-0.pt", weights_only=False)
    states = [state for state in saved["state"].values() if "exp_avg" in state]
    states[0]["exp_avg"], states[1]["exp_avg"] = states[1]["exp_avg"], states[0]["exp_avg"]
    torch.save(saved, folder / "optimizer-0.pt")
    return ["exp_avg of embed.weight has shape"]


def without_a_state(folder):
    saved = torch.load(folder / "optimizer-0.pt", weights_only=False)
    del saved["state"][1]["exp_avg"], saved["state"][2]["exp_avg"]
    torch.save(saved, folder / "optimizer-0.pt")
    return ["states of", "parameters of this model; copy the files of one save"]


def truncated(folder):
    path = folder / "model-0.pt"
    path.write_bytes(path.read_bytes()[:-100])
    return ["model-0.pt cannot be read"]


@pytest.mark.parametrize("damage", [without_a_rank, hostile, of_another_order, without_a_state, truncated])
def test_what_is_damaged_is_refused_before_anything_is_written(tmp_path, damage):
    folder = tmp_path / "old"
    save_first(folder, *plain(), 2)
    check_refused(folder, str(folder), *damage(folder))
    assert not (folder / "ran").exists()
