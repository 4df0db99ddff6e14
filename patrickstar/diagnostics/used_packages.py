"""Packages beside PyTorch: purpose, supported versions, and installed versions.

Standard library only, as ``python -m patrickstar.env`` must be. ``pyproject.toml`` has the same requirements as extras;
``tests/diagnostics/test_env.py`` compares the two.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re

REQUIRED = ""
"""The extra of a package that PatrickStar requires."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UsedPackage:
    """A package that a part of PatrickStar imports, and its supported versions."""

    name: str
    """The distribution's name for ``pip install``."""
    purpose: str
    """The part of PatrickStar that needs it, in words for ``python -m patrickstar.env``."""
    extra: str
    """``pip install '.[extra]'`` in a clone installs it; or :data:`REQUIRED`."""
    minimum: tuple[int, ...]
    """The first supported version."""
    below: tuple[int, ...] | None = None
    """The first version that is not known to work; None: no limit is known."""

    @property
    def versions(self) -> str:
        """The supported versions in pip's syntax: ``">=5.23,<6"``."""
        upper = f",<{_text(self.below)}" if self.below is not None else ""
        return f">={_text(self.minimum)}{upper}"

    @property
    def requirement(self) -> str:
        """The requirement in pip's syntax: ``"transformers>=5.23,<6"``."""
        return self.name + self.versions

    def supports(self, version: str) -> bool:
        """True if ``version``, such as ``"5.23.0"``, is among :attr:`versions`."""
        release = _release(version)
        return release >= self.minimum and (self.below is None or release < self.below)

    def installed_version(self) -> str | None:
        """The installed version; None without one."""
        try:
            return importlib.metadata.version(self.name)
        except importlib.metadata.PackageNotFoundError:
            return None


def _text(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


def _release(version: str) -> tuple[int, ...]:
    """``(5, 23, 0)`` for ``"5.23.0rc1+cpu"``."""
    return tuple(int(part) for part in re.match(r"[0-9]*(?:\.[0-9]+)*", version).group().split(".") if part)


PACKAGES = (
    UsedPackage(name="numpy", purpose="several ranks, random numbers in checkpoints", extra=REQUIRED, minimum=(1, 26)),
    UsedPackage(name="safetensors", purpose="weights as Hugging Face has them", extra=REQUIRED, minimum=(0, 5)),
    UsedPackage(name="pydantic", purpose="the configuration", extra=REQUIRED, minimum=(2, 7)),
    UsedPackage(
        name="transformers", purpose="the Trainer, --model of plans", extra="transformers", minimum=(5, 17), below=(6,)
    ),
    UsedPackage(
        name="accelerate", purpose="the Trainer, Accelerate", extra="transformers", minimum=(1, 15), below=(2,)
    ),
    UsedPackage(name="peft", purpose="LoRA", extra="transformers", minimum=(0, 18)),
    UsedPackage(name="lightning", purpose="the Lightning strategy", extra="lightning", minimum=(2, 6), below=(3,)),
    UsedPackage(name="tensorboard", purpose="TensorBoard logs", extra="monitor", minimum=(2, 16)),
    UsedPackage(name="wandb", purpose="Weights & Biases logs", extra="monitor", minimum=(0, 17)),
    UsedPackage(name="matplotlib", purpose="the picture of a profile", extra="profile", minimum=(3, 8)),
)
