"""Tokens that an image costs: the rule of each model family, from its config.json and its preprocessor's.

The rules are those by which vLLM itself counts the tokens before it sees a pixel (`get_num_image_tokens` and
`_get_vision_info` in `vllm/model_executor/models/`, as of 0.32). A family whose rule is not here is refused by name:
a wrong count would make a plan look exact that is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from highwater.plan.json_file import ConfigJson
from highwater.plan.wish import ImageTokens
from kvplan.errors import PlanError

# Families whose largest item is an image, of a size that does not depend on its shape.
_IMAGES_ONLY: Final = frozenset({"gemma3", "llava", "mistral3", "paligemma"})
_ENCODERS: Final = ("vision_config", "audio_config", "audio_encoder_config", "img_processor")
_LARGEST_SIDE: Final = 9_999_999  # vLLM's own, in get_image_size_with_most_features


def largest_item(config: ConfigJson, preprocessor: ConfigJson, limits: ConfigJson) -> int | None:
    """Return the embeddings of the largest item, with which a start profiles the encoder; 0: it has none to profile.

    ``limits`` is `--limit-mm-per-prompt`. None where these files do not say it: that of a video or a sound follows from
    rules that differ by model and version, and a video may be larger than the maximum length.
    """

    def is_allowed(modality: str) -> bool:
        limit = limits.get(modality)
        return (limit.get("count") if isinstance(limit, Mapping) else limit) != 0

    parts = (config, *(part for part in config.values() if isinstance(part, Mapping)))
    if all(part.get(key) is None for part in parts for key in _ENCODERS):
        return 0
    family = str(config.get("model_type", ""))
    takes_squares = _FAMILIES.get(family) not in (None, _tiles)
    if not takes_squares or (family not in _IMAGES_ONLY and is_allowed("video")):
        return None
    try:
        embeddings = image_tokens(config, preprocessor, _LARGEST_SIDE, _LARGEST_SIDE).embeddings
    except PlanError:
        embeddings = None
    return embeddings if is_allowed("image") else 0


def takes_images(config: ConfigJson) -> bool:
    """Return whether a config.json describes a model that sees images: it, or one of its parts, has an encoder."""
    parts = (config, *(part for part in config.values() if isinstance(part, Mapping)))
    return any(part.get("vision_config") is not None for part in parts)


def image_tokens(config: ConfigJson, preprocessor: ConfigJson, width: int, height: int) -> ImageTokens:
    """Count the tokens of an image of a width and height in pixels, at least one each.

    ``preprocessor`` is the preprocessor_config.json; empty where the folder has none. Raises PlanError: the family is
    not known, a key that its rule needs is missing or makes no sense, or the family refuses an image of this shape.
    """
    family = str(config.get("model_type", ""))
    count = _FAMILIES.get(family)
    if count is None:
        raise PlanError(
            f"model_type: the tokens of an image are not known here for {family!r}; known: "
            f"{', '.join(sorted(_FAMILIES))}; give the tokens themselves, as in '4 images of 2040 tokens'"
        )
    return count(config, preprocessor, width, height)


def _fit_to_patches(
    config: ConfigJson, preprocessor: ConfigJson, width: int, height: int, *, as_video: bool = False
) -> ImageTokens:
    """Count for Qwen2-VL and its heirs: both sides become multiples of a patch, within a number of pixels.

    GLM-4V counts an image as a video of two frames.
    """
    vision = _part(config, "vision_config")
    factor = _whole(vision, "patch_size", "vision_config.") * _whole(vision, "spatial_merge_size", "vision_config.")
    frames = _whole(vision, "temporal_patch_size", "vision_config.") if as_video else 1
    smallest, largest = _pixel_range(preprocessor)
    if as_video and min(width, height) < factor:
        scale = max(factor / width, factor / height)
        width, height = int(width * scale), int(height * scale)
    columns, rows = _resized(width, height, factor, smallest / frames, largest / frames)
    return _with_marks(columns * rows)


def _fixed_number(config: ConfigJson, preprocessor: ConfigJson, _width: int, _height: int) -> ImageTokens:
    """Count for Gemma 3: as many for every image, unless its crops are switched on."""
    if preprocessor.get("do_pan_and_scan"):
        raise PlanError(
            "do_pan_and_scan: true in preprocessor_config.json cuts an image into crops, which are not counted here; "
            "give the tokens themselves, as in '4 images of 1024 tokens'"
        )
    embeddings = _whole(config, "mm_tokens_per_image")
    # Two newlines, the beginning; the end, two newlines (processing_gemma3.py).
    return ImageTokens(embeddings=embeddings, prompt_tokens=embeddings + 4)


def _every_patch(config: ConfigJson, _preprocessor: ConfigJson, _width: int, _height: int) -> ImageTokens:
    """Count for PaliGemma: every patch of a square of fixed size."""
    patches = _patches(_part(config, "vision_config"))
    return ImageTokens(embeddings=patches, prompt_tokens=patches)


def _llava(config: ConfigJson, preprocessor: ConfigJson, width: int, height: int) -> ImageTokens:
    """Count for LLaVA 1.5, and for the models that put another encoder in its place."""
    vision = _part(config, "vision_config")
    encoder = str(vision.get("model_type", ""))
    if encoder == "pixtral":
        return _rows_of_patches(config, preprocessor, width, height)
    # CLIP has one patch more than the picture, for its class: "default" leaves it out. SigLIP has none.
    class_patches = {"clip_vision_model": 1, "siglip_vision_model": 0}
    if encoder not in class_patches:
        raise PlanError(
            f"vision_config.model_type: {encoder!r} is not an encoder whose tokens are known here; known: "
            f"{', '.join([*class_patches, 'pixtral'])}"
        )
    strategy = config.get("vision_feature_select_strategy", "default")
    if strategy not in {"default", "full"}:
        raise PlanError(f"vision_feature_select_strategy: {strategy!r} must be 'default' or 'full'")
    taken = _patches(vision) + class_patches[encoder] - (1 if strategy == "default" else 0)
    return ImageTokens(embeddings=taken, prompt_tokens=taken)


def _rows_of_patches(config: ConfigJson, _preprocessor: ConfigJson, width: int, height: int) -> ImageTokens:
    """Count for Pixtral and Mistral 3: rows of patches of an image that is only ever made smaller."""
    vision = _part(config, "vision_config")
    largest = _whole(vision, "image_size", "vision_config.")
    patch = _whole(vision, "patch_size", "vision_config.") * _whole(config, "spatial_merge_size", default=1)
    ratio = max(width / largest, height / largest)
    if ratio > 1:
        width, height = math.floor(width / ratio), math.floor(height / ratio)
    columns, rows = math.ceil(max(width, 1) / patch), math.ceil(max(height, 1) / patch)
    # Every row ends in a mark.
    return ImageTokens(embeddings=columns * rows, prompt_tokens=(columns + 1) * rows)


def _tiles(config: ConfigJson, _preprocessor: ConfigJson, width: int, height: int) -> ImageTokens:
    """Count for InternVL: tiles of a grid whose shape is nearest to the image's, and a thumbnail."""
    vision = _part(config, "vision_config")
    size = _whole(config, "force_image_size", default=_whole(vision, "image_size", "vision_config."))
    patch = _whole(vision, "patch_size", "vision_config.")
    shrink = config.get("downsample_ratio", 1)
    if not isinstance(shrink, int | float) or not 0 < shrink <= 1:
        raise PlanError(f"downsample_ratio: {shrink!r} must be a share over 0 and up to 1")
    per_tile = int((size // patch) ** 2 * shrink**2)
    is_dynamic = bool(config.get("dynamic_image_size", True))
    fewest = _whole(config, "min_dynamic_patch", default=1) if is_dynamic else 1
    most = _whole(config, "max_dynamic_patch") if is_dynamic else 1
    tiles = _nearest_grid(width, height, size, fewest, most)
    if config.get("use_thumbnail") and tiles != 1:
        tiles += 1
    return _with_marks(tiles * per_tile)


_FAMILIES: Mapping[str, Callable[[ConfigJson, ConfigJson, int, int], ImageTokens]] = {
    "gemma3": _fixed_number,
    **dict.fromkeys(("glm4v", "glm4v_moe"), partial(_fit_to_patches, as_video=True)),
    "internvl_chat": _tiles,
    "llava": _llava,
    "mistral3": _rows_of_patches,
    "paligemma": _every_patch,
    **dict.fromkeys(("qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"), _fit_to_patches),
}
MAX_ASPECT_RATIO = 200
"""Qwen's and GLM's processors refuse anything narrower."""
_MAX_TILES = 128
"""InternVL's configurations have 12, some 40; the work grows with the square."""


def _resized(width: int, height: int, factor: int, smallest: float, largest: float) -> tuple[int, int]:
    """Return the columns and rows of patches, as `smart_resize` of Qwen2-VL's image processor has them."""
    if max(width, height) / min(width, height) > MAX_ASPECT_RATIO:
        raise PlanError(f"image: {width}x{height} is narrower than 1 to {MAX_ASPECT_RATIO}, which this family refuses")
    columns, rows = round(width / factor), round(height / factor)
    if columns * rows * factor**2 > largest:
        shrink = math.sqrt(width * height / largest)
        return max(1, math.floor(width / shrink / factor)), max(1, math.floor(height / shrink / factor))
    if columns * rows * factor**2 < smallest:
        grow = math.sqrt(smallest / (width * height))
        return math.ceil(width * grow / factor), math.ceil(height * grow / factor)
    return columns, rows


def _nearest_grid(width: int, height: int, size: int, fewest: int, most: int) -> int:
    """Return the tiles of the grid whose shape is nearest; of two equally near, the larger for a large image."""
    if most > _MAX_TILES:
        raise PlanError(f"max_dynamic_patch: {most} must be at most {_MAX_TILES}")
    # In the order in which vLLM meets them: a set of pairs, sorted by their product alone.
    found = {
        (across, down)
        for tiles in range(fewest, most + 1)
        for across in range(1, tiles + 1)
        for down in range(1, tiles + 1)
        if fewest <= across * down <= most
    }
    nearest, least = (1, 1), math.inf
    for across, down in sorted(found, key=lambda grid: grid[0] * grid[1]):
        off = abs(width / height - across / down)
        if off < least or (off == least and width * height > 0.5 * size**2 * across * down):
            nearest, least = (across, down), off
    return nearest[0] * nearest[1]


def _patches(vision: ConfigJson) -> int:
    size = _whole(vision, "image_size", "vision_config.")
    return int((size // _whole(vision, "patch_size", "vision_config.")) ** 2)


def _with_marks(embeddings: int) -> ImageTokens:
    return ImageTokens(embeddings=embeddings, prompt_tokens=embeddings + 2)


def _pixel_range(preprocessor: ConfigJson) -> tuple[int, int]:
    """Return the fewest and the most pixels of an image; the older keys win where both are there, as they do there."""
    size = preprocessor.get("size")
    size = size if isinstance(size, Mapping) else {}
    found = []
    for old, new in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        holder, key, prefix = (preprocessor, old, "") if preprocessor.get(old) is not None else (size, new, "size.")
        if holder.get(key) is None:
            raise PlanError(
                f"size.{new}: missing in preprocessor_config.json (and {old} too); without it the tokens of an image "
                "are not known"
            )
        found.append(_whole(holder, key, prefix))
    return found[0], found[1]


def _part(config: ConfigJson, key: str) -> ConfigJson:
    part = config.get(key)
    if not isinstance(part, Mapping):
        raise PlanError(f"{key}: {'missing' if part is None else repr(part)}; a model that sees images has one")
    return part


def _whole(config: ConfigJson, key: str, prefix: str = "", *, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise PlanError(f"{prefix}{key}: missing; the tokens of an image depend on it")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{prefix}{key}: {value!r} must be a whole number of at least 1")
    return value
