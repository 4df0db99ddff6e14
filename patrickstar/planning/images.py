"""Images in a planned sequence. Standard library only."""

from __future__ import annotations

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Images:
    """Images of one size in each sequence."""

    count: int
    width: int
    """Pixels before the model's image processor resizes them."""
    height: int

    def __str__(self) -> str:
        images = "1 image" if self.count == 1 else f"{self.count} images"
        return f"{images} of {self.width}x{self.height}"


def image_size(text: str) -> tuple[int, int]:
    """Width and height of ``--image-size WIDTHxHEIGHT``.

    Raises:
        ValueError: it is something else.
    """
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise ValueError(f"it is {text!r}; give WIDTHxHEIGHT in pixels, such as 1024x768")
    return int(match.group(1)), int(match.group(2))
