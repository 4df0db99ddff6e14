"""Inputs with images for planned vision-language models.

The model's image processor of transformers makes pixels and grids, of black images. The model's ``get_image_features``
tells the number of tokens that stand for them. Processors tell it, too, but they need the model's tokenizer.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from patrickstar.planning.images import Images
from patrickstar.planning.known_values import KnownValues, ValuesMode
from patrickstar.planning.operation_costs import tensors_in
from patrickstar.planning.repeated_layers import Stack

_FILE = "preprocessor_config.json"
_TEXT_TOKEN = 1
"""Stands for all text. It is between images, too, as in each model's prompts."""


@dataclasses.dataclass(frozen=True)
class _Processor:
    """An image processor of transformers."""

    name: str
    options: Callable[[Any], dict[str, Any]]
    """Returns its published options, for the model's configuration."""
    call: Callable[[Any], dict[str, Any]] = lambda config: {}
    """Returns options with which the model's processor calls it."""


def _qwen(least_pixels: int, most_pixels: int) -> _Processor:
    def options(config: Any) -> dict[str, Any]:
        vision = config.vision_config
        return {
            "patch_size": vision.patch_size,
            "merge_size": vision.spatial_merge_size,
            "temporal_patch_size": vision.temporal_patch_size,
            "size": {"shortest_edge": least_pixels, "longest_edge": most_pixels},
        }

    return _Processor("Qwen2VLImageProcessor", options)


def _square(config: Any) -> dict[str, int]:
    size = config.vision_config.image_size
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return {"height": height, "width": width}


def _resized(config: Any) -> dict[str, Any]:
    return {"size": _square(config)}


def _clipped(config: Any) -> dict[str, Any]:
    square = _square(config)
    return {"size": {"shortest_edge": square["height"]}, "crop_size": square}


def _split(config: Any) -> dict[str, Any]:
    side = config.vision_config.image_size
    return {"size": {"longest_edge": 4 * side}, "max_image_size": {"longest_edge": side}}


def _limited(config: Any) -> dict[str, Any]:
    return {"size": {"longest_edge": config.vision_config.image_size}}


def _merged_patches(config: Any) -> dict[str, Any]:
    side = config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1)
    return {"patch_size": {"height": side, "width": side}}


_QWEN2, _QWEN3 = _qwen(56 * 56, 28 * 28 * 16384), _qwen(256 * 256, 4096 * 4096)
_PIXTRAL = _Processor("PixtralImageProcessor", _limited, _merged_patches)
_PROCESSORS = {
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "llava": _Processor("CLIPImageProcessor", _clipped),
    "idefics3": _Processor("Idefics3ImageProcessor", _split),
    "smolvlm": _Processor("SmolVLMImageProcessor", _split),
    "internvl": _Processor("GotOcr2ImageProcessor", _resized, lambda config: {"crop_to_patches": True}),
    "gemma3": _Processor("Gemma3ImageProcessor", _resized, lambda config: {"do_pan_and_scan": False}),
    "mistral3": _PIXTRAL,
}
"""By type of the model's configuration."""


def image_batch(
    name: str, module: nn.Module, batch: int, length: int, images: Images
) -> tuple[dict[str, torch.Tensor], int]:
    """Returns keyword arguments of the module's forward, on the CPU, and the image tokens of each sequence.

    Args:
        name: the model's, as in ``--model``.
        module: on the meta device.
        batch: sequences.
        length: tokens of each sequence, with those of images.
        images: of each sequence.

    Raises:
        ValueError: the model takes no images, their rules are not known, or the sequence has no room for them.
    """
    config = module.config
    inputs = _pixels(name, config, images)
    num_tokens = _num_tokens(name, module, inputs)
    taken = num_tokens + images.count
    if taken >= length:
        raise ValueError(
            f"--images: {images} take {taken} tokens, and --seq-len is {length}; give --seq-len {taken + 1} or more, "
            "or smaller or fewer images"
        )
    placeholder = _placeholder(config)
    each = num_tokens // images.count
    tokens = torch.full((batch, length), _TEXT_TOKEN if placeholder != _TEXT_TOKEN else _TEXT_TOKEN + 1)
    for begin in range(1, taken, each + 1):
        tokens[:, begin : begin + each] = placeholder
    is_image = tokens == placeholder
    inputs = {key: torch.cat([value] * batch) for key, value in inputs.items()}
    inputs |= {"input_ids": tokens, "labels": tokens.masked_fill(is_image, -100)}
    inputs |= {"mm_token_type_ids": is_image.int(), "token_type_ids": is_image.long()}
    taken_by_model = inspect.signature(module.forward).parameters
    return {key: value for key, value in inputs.items() if key in taken_by_model}, num_tokens


def image_params(module: Any) -> frozenset[nn.Parameter]:
    """Returns the parameters outside the decoder and its embeddings."""
    parts = (module.get_decoder(), module.get_input_embeddings(), module.get_output_embeddings())
    of_text = {param for part in parts if part is not None for param in part.parameters()}
    return frozenset(param for param in module.parameters() if param not in of_text)


def text_stack(module: Any) -> Stack:
    """Returns the decoder. Towers read results of layers by their number, and Qwen3-VL adds some to the decoder's first
    layers.
    """
    tower = getattr(module.config, "vision_config", None)
    return Stack(module.get_decoder(), len(getattr(tower, "deepstack_visual_indexes", None) or ()))


def _pixels(name: str, config: Any, images: Images) -> dict[str, torch.Tensor]:
    """The model's image processor's output for one sequence's images."""
    found = _processor_of(config)
    if found is None:
        raise ValueError(
            f"--images: how {type(config).__name__}'s images become tokens is not known, only that of "
            f"{', '.join(_PROCESSORS)}; leave out --images, which plans {name} for text"
        )
    image = np.zeros((images.height, images.width, 3), dtype=np.uint8)
    try:
        processor = _load(name, found, config)
        made = processor(images=[[image] * images.count], return_tensors="pt", **found.call(config))
    except ImportError as error:
        raise ValueError(f"--images needs Pillow: pip install pillow ({error})") from error
    except ValueError as error:
        raise ValueError(f"--images: {name}'s image processor refuses {images}: {error}") from error
    return {key: value for key, value in made.items() if isinstance(value, torch.Tensor)}


def _processor_of(config: Any) -> _Processor | None:
    tower = getattr(config, "vision_config", None)
    return _PIXTRAL if getattr(tower, "model_type", "") == "pixtral" else _PROCESSORS.get(config.model_type)


def _load(name: str, found: _Processor, config: Any) -> Any:
    """The image processor with the options of the model's folder, if it has them, else with published ones."""
    import transformers

    kind = getattr(transformers, f"{found.name}Pil", None) or getattr(transformers, found.name)
    folder = Path(name)
    if (folder / _FILE).is_file():
        return kind.from_pretrained(folder)
    return kind(**found.options(config))


def _num_tokens(name: str, module: Any, inputs: dict[str, torch.Tensor]) -> int:
    """Tokens that stand for the images of ``inputs``: as many as the model has features of them."""
    get_features = module.get_image_features
    taken = inspect.signature(get_features).parameters
    values = KnownValues()
    there = {key: values.on_meta(value, value.dtype) for key, value in inputs.items() if key in taken}
    try:
        with torch.no_grad(), values.keeping_numbers(), ValuesMode(values):
            features = get_features(**there)
    except NotImplementedError as error:
        raise ValueError(
            f"--images: {type(module).__name__} computes images with shapes that follow from its weights, which a plan "
            f"has not; leave out --images, which plans {name} for text ({str(error).splitlines()[0]})"
        ) from error
    features = getattr(features, "pooler_output", features)
    return sum(tensor.numel() for tensor in tensors_in(features)) // module.config.get_text_config().hidden_size


def _placeholder(config: Any) -> int:
    keys = ("image_token_id", "image_token_index")
    return next(found for key in keys if isinstance(found := getattr(config, key, None), int))
