"""Puts every ``Trainer`` and every ``Accelerator`` that a script makes into an engine, without changes to the script.

    with every_trainer_in_engine({"device_memory": "24GiB"}):
        trainer = trl.SFTTrainer(...)

``patrickstar run`` runs a script in such a block.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Iterator, Mapping
from typing import Any

from accelerate import Accelerator
from transformers import Trainer, TrainingArguments

from patrickstar.integrations.accelerate import PatrickStarAccelerator
from patrickstar.integrations.decided_config import own_config
from patrickstar.integrations.deepspeed_config import (
    config_of_plugin,
    launched_plugin,
    without_launched_deepspeed,
    without_loop_keys,
)
from patrickstar.integrations.elastic_trainer import ElasticTrainerMixin, ElasticTraining
from patrickstar.integrations.replaced_classes import replacing
from patrickstar.integrations.trainer_arguments import TAKEN_DEEPSPEED
from patrickstar.integrations.transformers import PatrickStarTrainerMixin

_ARGUMENTS = tuple(inspect.signature(Accelerator.__init__).parameters)[1:]  # its class may have a `__new__` of ours


@contextlib.contextmanager
def every_trainer_in_engine(
    patrickstar_config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    elastic: ElasticTraining | None = None,
) -> Iterator[None]:
    """Context in which each new ``Trainer``, including subclasses (TRL's, a script's own), gets
    ``PatrickStarTrainerMixin`` before its class, and each new ``Accelerator`` is a ``PatrickStarAccelerator``. They
    keep it after the block. DeepSpeed's configuration, by ``TrainingArguments(deepspeed=...)``, a ``DeepSpeedPlugin``
    or ``accelerate launch``, is taken as PatrickStar's; keys of ``patrickstar_config`` win over it.

    Args:
        patrickstar_config: configuration for trainers that are made without one (docs/config.md), a dict or the path of
            a JSON file.
        elastic: options for trainers that are made without them; all then get ``ElasticTrainerMixin``. None: only
            trainers that are elastic by themselves are.
    """
    mixin = PatrickStarTrainerMixin if elastic is None else ElasticTrainerMixin
    given = {"patrickstar_config": patrickstar_config} | ({} if elastic is None else {"elastic": elastic})
    plugin = launched_plugin()

    @functools.cache
    def trainer_in_engine(trainer_class: type[Trainer]) -> type[Trainer]:
        bases = (trainer_class,) if issubclass(trainer_class, mixin) else (mixin, trainer_class)

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            super(made, self).__init__(*args, **given | kwargs)

        # Keeps the trainer's name, which model cards and logs show.
        made = type(trainer_class.__name__, bases, {"__init__": __init__, "__module__": trainer_class.__module__})
        return made

    @functools.cache
    def accelerator_in_engine(accelerator_class: type[Accelerator]) -> type[Accelerator]:
        if issubclass(accelerator_class, PatrickStarAccelerator):
            bases: tuple[type, ...] = (accelerator_class,)
        else:
            bases = (PatrickStarAccelerator, accelerator_class)

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            named = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
            named.setdefault("patrickstar_config", without_loop_keys(own_config(patrickstar_config)))
            if not named.get("deepspeed_plugins"):
                named["deepspeed_plugin"] = named.get("deepspeed_plugin") or plugin
            super(made, self).__init__(**named)

        made = type(accelerator_class.__name__, bases, {"__init__": __init__, "__module__": __name__})
        return made

    with (
        without_launched_deepspeed(),
        _arguments_without_deepspeed({} if plugin is None else config_of_plugin(plugin)),
        replacing(Trainer, trainer_in_engine),
        replacing(Accelerator, accelerator_in_engine),
    ):
        yield


@contextlib.contextmanager
def _arguments_without_deepspeed(launched: Mapping[str, Any]) -> Iterator[None]:
    """Context in which ``TrainingArguments(deepspeed=...)`` starts no DeepSpeed. Its value is also
    :data:`TAKEN_DEEPSPEED`.
    """
    post_init = TrainingArguments.__post_init__

    @functools.wraps(post_init)
    def __post_init__(self: TrainingArguments) -> None:  # noqa: N807
        given, self.deepspeed = self.deepspeed, None
        setattr(self, TAKEN_DEEPSPEED, given or launched)
        post_init(self)
        self.deepspeed = given  # scripts read it, and TRL makes further arguments of it

    TrainingArguments.__post_init__ = __post_init__  # type: ignore[method-assign]
    try:
        yield
    finally:
        TrainingArguments.__post_init__ = post_init  # type: ignore[method-assign]
