"""Every ``Trainer`` that a script makes, in an engine: for scripts that stay as they are.

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
    """Within the block a ``Trainer``, also one of a subclass (TRL's, a script's own), is made with
    ``PatrickStarTrainerMixin`` before its class. It goes on to be one after the block.

    Args:
        patrickstar_config: the configuration of each that is made without one of its own (docs/config.md), a dict or
            the path of a JSON file.
        elastic: that of each that is made without one of its own, which then has ``ElasticTrainerMixin``: it changes
            its number of ranks while it trains. None: those that are elastic by themselves are.
    """
    mixin = PatrickStarTrainerMixin if elastic is None else ElasticTrainerMixin
    given = {"patrickstar_config": patrickstar_config} | ({} if elastic is None else {"elastic": elastic})

    @functools.cache
    def in_engine(trainer_class: type[Trainer]) -> type[Trainer]:
        bases = (trainer_class,) if issubclass(trainer_class, mixin) else (mixin, trainer_class)

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            super(made, self).__init__(*args, **given | kwargs)

        # Its name stays the trainer's: model cards and logs say it.
        made = type(trainer_class.__name__, bases, {"__init__": __init__, "__module__": trainer_class.__module__})
        return made

    # Whoever calls a class gets what its `__new__` made, initialised by that object's own class. Names such as
    # `transformers.Trainer` may have been imported before.
    before = Trainer.__dict__.get("__new__", _plain_new)
    Trainer.__new__ = lambda cls, *_, **__: object.__new__(in_engine(cls))
    try:
        yield
    finally:
        Trainer.__new__ = before  # not deleted: a class that had a `__new__` and lost it takes no arguments


@staticmethod
def _plain_new(cls: type[Trainer], *_: Any, **__: Any) -> Trainer:
    return object.__new__(cls)
