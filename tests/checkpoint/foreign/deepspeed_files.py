"""Writes DeepSpeed's files from a plain model and optimizer, in the layout that its ``zero_to_fp32.py`` reads.

Classes that DeepSpeed pickles are made here under DeepSpeed's names, and unmade before anything is loaded.
"""

import contextlib
import enum
import math
import sys
import types
from collections import OrderedDict

import torch

KINDS = ("exp_avg", "exp_avg_sq")
TAG = "global_step3"


@contextlib.contextmanager
def deepspeed_classes():
    """``fragment_address``, ``LossScaler`` and ``ZeroStageEnum`` in modules of DeepSpeed's names."""

    class LossScaler:
        def __init__(self):
            self.cur_scale, self.dynamic = 65536.0, True

    class FragmentAddress:
        def __init__(self, numel, start):
            self.numel, self.start = numel, start

    class ZeroStageEnum(int, enum.Enum):
        gradients = 2
        weights = 3

    places = {
        "deepspeed.runtime.fp16.loss_scaler": {"LossScaler": LossScaler},
        "deepspeed.utils.tensor_fragment": {"fragment_address": FragmentAddress},
        "deepspeed.runtime.zero.config": {"ZeroStageEnum": ZeroStageEnum},
    }
    made = {}
    for name, classes in places.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            made.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
        for known, kind in classes.items():
            kind.__module__, kind.__qualname__, kind.__name__ = name, known, known
            setattr(made[name], known, kind)
    sys.modules.update(made)
    try:
        yield LossScaler, FragmentAddress, ZeroStageEnum
    finally:
        for name in made:
            del sys.modules[name]


class Groups:
    """The trained parameters of a plain optimizer, by group: names, shapes, values, states."""

    def __init__(self, model, optimizer):
        names = {param: name for name, param in model.named_parameters()}
        self.options = [
            {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]
        self.names = [[names[param] for param in group["params"]] for group in optimizer.param_groups]
        params = dict(model.named_parameters())
        self.shapes = {name: params[name].shape for group in self.names for name in group}
        self.values = {
            name: {
                "fp32": params[name].detach().clone(),
                **{kind: optimizer.state[params[name]][kind].clone() for kind in KINDS},
            }
            for name in self.shapes
        }
        self.step = int(next(iter(optimizer.state.values()))["step"])


def save_zero(folder, model, optimizer, *, stage=2, ranks=2, sub_groups=1, prefix="", client_state=None, **state):
    """A checkpoint of ``ranks`` ranks below ``folder``, with the file ``latest``."""
    groups = Groups(model, optimizer)
    path = folder / TAG
    path.mkdir(parents=True)
    (folder / "latest").write_text(TAG)
    flats, owners = (_flats3 if stage == 3 else _flats2)(groups, ranks, sub_groups)
    with deepspeed_classes() as (scaler, address, stages):
        for rank in range(ranks):
            states = {
                index: {"step": groups.step, **{kind: flat[kind] for kind in KINDS}}
                for index, flat in enumerate(flats[rank])
            }
            indices = [[i for i, owner in enumerate(owners) if owner == group] for group in range(len(groups.names))]
            options = [{**opts, "params": held} for opts, held in zip(groups.options, indices, strict=True)]
            base = {"state": states, "param_groups": options}
            masters = [flat["fp32"] for flat in flats[rank]]
            common = {"loss_scaler": scaler(), "dynamic_loss_scale": True, "overflow": False}
            if stage == 3:
                held = {"zero_stage": stages(3), "optimizer_state_dict": base, "fp32_flat_groups": masters}
                held["partition_count"] = ranks
            else:
                held = {"zero_stage": stages(2), "base_optimizer_state": base, "clip_grad": 1.0}
                held |= {"single_partition_of_fp32_groups": masters, "partition_count": [ranks] * len(flats[0])}
                held["param_slice_mappings"] = [
                    OrderedDict(
                        (name, address(numel, start)) for name, numel, start in slices_of(groups, index, rank, ranks)
                    )
                    for index in range(len(groups.names))
                ]
            saved = {"optimizer_state_dict": {**common, **held}, "ds_config": {}, "ds_version": "0.17.0"}
            torch.save(saved, path / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        for rank in range(ranks if stage == 3 else 1):
            saved = _model_states(model, groups, owners, stage, rank, ranks) | state | (client_state or {})
            name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
            torch.save(saved, path / f"{name}_model_states.pt")
    return path


def _flats2(groups, ranks, _):
    """Each group padded to a multiple of 2 x ranks and cut; the masters' padding is removed again."""
    flats = [[] for _ in range(ranks)]
    for names in groups.names:
        whole = {kind: torch.cat([groups.values[name][kind].flatten() for name in names]) for kind in ("fp32", *KINDS)}
        padding = -whole["fp32"].numel() % (2 * ranks)
        cut = {kind: list(torch.nn.functional.pad(value, (0, padding)).chunk(ranks)) for kind, value in whole.items()}
        last = cut["fp32"][-1]
        cut["fp32"][-1] = last[: last.numel() - padding]
        for rank in range(ranks):
            flats[rank].append({kind: pieces[rank].clone() for kind, pieces in cut.items()})
    return flats, list(range(len(groups.names)))


def slices_of(groups, index, rank, ranks):
    """(name, number of elements, start in the rank's range) of the parameters of a group that lie on the rank."""
    sizes = [groups.shapes[name].numel() for name in groups.names[index]]
    length = math.ceil(sum(sizes) / (2 * ranks)) * 2
    end = 0
    for name, size in zip(groups.names[index], sizes, strict=True):
        begin, end = end, end + size
        first, last = max(begin, rank * length), min(end, (rank + 1) * length)
        if first < last:
            yield name, last - first, first - rank * length


def _sub_groups(groups, count):
    """(group, names) of each sub-group: ``count`` of each group."""
    found = []
    for group, names in enumerate(groups.names):
        size = math.ceil(len(names) / count)
        found += [(group, names[begin : begin + size]) for begin in range(0, len(names), size)]
    return found


def _flats3(groups, ranks, sub_groups):
    """Each parameter padded to a multiple of ranks and cut; a sub-group's pieces one after another."""
    flats = [[] for _ in range(ranks)]
    owners = []
    for group, names in _sub_groups(groups, sub_groups):
        owners.append(group)
        groups.sub = [*getattr(groups, "sub", []), names]
        for rank in range(ranks):
            flats[rank].append(
                {
                    kind: torch.cat([partition(groups.values[name][kind], rank, ranks) for name in names])
                    for kind in ("fp32", *KINDS)
                }
            )
    return flats, owners


def partition(value, rank, ranks):
    size = math.ceil(value.numel() / ranks)
    padded = torch.nn.functional.pad(value.detach().flatten(), (0, size * ranks - value.numel()), value=-777.0)
    return padded[rank * size : (rank + 1) * size]


def _model_states(model, groups, owners, stage, rank, ranks):
    frozen = {name: param for name, param in model.named_parameters() if not param.requires_grad}
    names = groups.sub if stage == 3 else groups.names
    del owners
    module = OrderedDict((name, value.to(torch.bfloat16)) for name, value in model.state_dict().items())
    module |= {name: value for name, value in model.named_buffers()}
    if stage == 3:
        module |= {name: torch.empty(0) for name, _ in model.named_parameters(remove_duplicate=False)}
    fragments = {
        name: partition(param, rank, ranks) if stage == 3 else param.detach() for name, param in frozen.items()
    }
    return {
        "module": module,
        "buffer_names": [name for name, _ in model.named_buffers()],
        "optimizer": None,
        "param_shapes": [OrderedDict((name, groups.shapes[name]) for name in group) for group in names],
        "frozen_param_shapes": {name: param.shape for name, param in frozen.items()} if stage > 1 else None,
        "frozen_param_fragments": fragments if stage > 1 else None,
        "shared_params": {"head.weight": "embed.weight"},
        "lr_scheduler": {"last_batch_iteration": 2},
        "data_sampler": None,
        "random_ltd": None,
        "sparse_tensor_module_names": set(),
        "skipped_steps": 1,
        "global_steps": groups.step,
        "global_samples": 96,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "ds_config": {"train_batch_size": 32},
        "ds_version": "0.17.0",
    }


def save_universal(folder, model, optimizer, *, stage=2, ranks=2):
    """Writes the files that ``ds_to_universal.py`` makes of a checkpoint."""
    path = save_zero(folder / "before", model, optimizer, stage=stage, ranks=ranks)
    groups = Groups(model, optimizer)
    target = folder / f"{TAG}_universal"
    for name, values in groups.values.items():
        (target / "zero" / name).mkdir(parents=True)
        for kind, value in values.items():
            torch.save(value.flatten() if stage == 3 else {"param": value}, target / "zero" / name / f"{kind}.pt")
        if stage != 3:
            torch.save(groups.step, target / "zero" / name / "step.pt")
    with deepspeed_classes() as (scaler, _, stages):
        options = [{**opts, "params": [index]} for index, opts in enumerate(groups.options)]
        saved = {"loss_scaler": scaler(), "zero_stage": stages(stage), "param_groups": options}
        if stage == 3:
            saved["optimizer_state_dict"] = {"state": {0: {"step": groups.step}}, "param_groups": options}
        torch.save(saved, target / "zero" / "optimizer_state.pt")
    for file in path.glob("*_model_states.pt"):
        file.rename(target / file.name)
    (folder / "latest_universal").write_text(target.name)
    return target
