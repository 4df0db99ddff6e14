import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

from patrickstar.config import Config, Dialect, parse_config
from patrickstar.config.fates import Action, Reader
from patrickstar.config.keys import Key, all_keys
from patrickstar.config.schedulers import SCHEDULERS
from patrickstar.config.values import Section

VALUES: list[Any] = [
    *(
        True,
        False,
        2,
        3,
        0.25,
        0.5,
        2_000_000,
        "always",
        "cpu",
        "fp32",
        "Ignore",
        "other",
        "nvme",
        "linear",
        "pinned",
        "ring",
        "fused",
        "model",
        "1d",
        "8bit",
        "threads",
        "int8",
        "block",
    ),
    *("sum", "stochastic", "AdamW", "fp16", "2GiB", ["a"], [0.5, 0.25], {"enabled": True}),
]
"""Values by key: at least one differs from the default, and one is refused where any is."""

REQUIRED = {
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2},
    "WarmupDecayLR": {"total_num_steps": 9},
    "WarmupCosineLR": {"total_num_steps": 9},
}
"""Required parameters of each schedule."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One key, and the other keys that it needs to take effect."""

    key: Key
    title: str
    beside: dict[str, Any]

    @property
    def dialect(self) -> Dialect:
        return Dialect.DEEPSPEED if self.key.reader is Reader.INITIALIZE else Dialect.PATRICKSTAR

    def given(self, value: Any) -> dict[str, Any]:
        config = copy.deepcopy(self.beside)
        put(config, self.key.path, value)
        return config

    def before(self) -> Config:
        return parse_config(self.beside, self.dialect)

    def outcomes(self) -> Iterator[tuple[Any, Config | str]]:
        for value in VALUES:
            try:
                yield value, parse_config(self.given(value), self.dialect)
            except ValueError as error:
                yield value, str(error)

    def changing(self, path: str) -> tuple[Any, Config]:
        before = at(self.before(), path)
        for value, after in self.outcomes():
            if isinstance(after, Config) and at(after, path) != before:
                return value, after
        raise AssertionError(f"no value of {self.key.path} changes {path}")


def put(config: dict[str, Any], path: str, value: Any) -> None:
    *sections, name = path.split(".")
    for section in sections:
        config = config.setdefault(section, {})
    config[name] = value


def at(config: Config, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def differences(one: Section, other: Section, section: str = "") -> list[str]:
    found = []
    for name in type(one).model_fields:
        a, b = getattr(one, name), getattr(other, name)
        if isinstance(a, Section) and isinstance(b, Section):
            found += differences(a, b, f"{section}{name}.")
        elif a != b:
            found.append(section + name)
    return found


def all_cases() -> list[Case]:
    keys = list(all_keys())
    switches = {
        key.section for key in keys if key.name == "enabled" and key.fate and key.fate.action is Action.HONOURED
    }
    cases, schedules = [], iter([*SCHEDULERS, "StepLR"])
    beside: dict[str, Any] = {}
    title = ""
    for key in keys:
        if key.path == "scheduler.type":  # the keys of the next schedule begin
            name = next(schedules)
            beside, title = {"scheduler": {"type": name, "params": REQUIRED.get(name, {})}}, f" of {name}"
        elif not key.section.startswith("scheduler"):
            beside = {key.section: {"enabled": True}} if key.section in switches and key.name != "enabled" else {}
        if key.section == "fp8":
            beside = {"bf16": {"enabled": True}, **beside}
        if key.path == "optimizer.params.torch_adam":
            beside = {"optimizer": {"type": "AdamW"}}
        if key.path in ("optimizer.params.momentum", "optimizer.params.dampening"):
            beside = {"optimizer": {"type": "SGD"}}
        if key.path == "optimizer.master":
            beside = {"bf16": {"enabled": True}, "optimizer": {"speculation": "commit"}}
        if key.path == "optimizer.params.nesterov":
            beside = {"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}
        if key.path == "sequence_parallel.ulysses_size":
            beside = {"sequence_parallel": {"size": 4, "mode": "hybrid"}}
        if key.section == "disk_memory" and key.name != "path":
            beside = {"disk_memory": {"path": "/disk"}}
        offload = key.section.rpartition(".")[2]
        if offload in ("offload_optimizer", "offload_param") and key.name in ("device", "nvme_path"):
            other = {"device": {"nvme_path": "/disk"}, "nvme_path": {"device": "nvme", "nvme_path": "/disk"}}[key.name]
            beside = {"zero_optimization": {offload: other}}
        of = title if key.section == "scheduler.params" else ""
        cases.append(Case(key=key, title=key.section + of, beside=beside))
    return cases
