"""Puts every ``Trainer`` that a script makes into an engine, without changes to the script.

    with every_trainer_in_engine({"device_memory": "24GiB"}):
        trainer = trl.SFTTrainer(...)

``patrickstar run`` runs a script in such a block.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import Trainer

from patrickstar.integrations.elastic_trainer import ElasticTrainerMixin, ElasticTraining
from patrickstar.integrations.transformers import PatrickStarTrainerMixin


@contextlib.contextmanager
def every_trainer_in_engine(
    patrickstar_config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    elastic: ElasticTraining | None = None,
) -> Iterator[None]:
    """Context in which each new ``Trainer``, including subclasses (TRL's, a script's own), gets
    ``PatrickStarTrainerMixin`` before its class. Trainers keep it after the block.

    Args:
        patrickstar_config: configuration for trainers that are made without one (docs/config.md), a dict or the path of
            a JSON file.
        elastic: options for trainers that are made without them; all then get ``ElasticTrainerMixin``. None: only
            trainers that are elastic by themselves are.
    """
    mixin = PatrickStarTrainerMixin if elastic is None else ElasticTrainerMixin
    given = {"patrickstar_config": patrickstar_config} | ({} if elastic is None else {"elastic": elastic})

    @functools.cache
    def in_engine(trainer_class: type[Trainer]) -> type[Trainer]:
        bases = (trainer_class,) if issubclass(trainer_class, mixin) else (mixin, trainer_class)

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            super(made, self).__init__(*args, **given | kwargs)

        # Keeps the trainer's name, which model cards and logs show.
        made = type(trainer_class.__name__, bases, {"__init__": __init__, "__module__": trainer_class.__module__})
        return made

    # Calling a class returns the object of its `__new__`, initialised by that object's own class. Replacing names such
    # as `transformers.Trainer` would miss earlier imports.
    before = Trainer.__dict__.get("__new__", _plain_new)
    Trainer.__new__ = lambda cls, *_, **__: object.__new__(in_engine(cls))
    try:
        yield
    finally:
        Trainer.__new__ = before  # not deleted: a class whose `__new__` was deleted accepts no arguments


@staticmethod
def _plain_new(cls: type[Trainer], *_: Any, **__: Any) -> Trainer:
    return object.__new__(cls)
