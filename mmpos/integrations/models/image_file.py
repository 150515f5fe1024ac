"""ImageFile: the image processor settings of a model, read from the file next to its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.support.checks import finite, integer
from mmpos.support.files import read_json

__all__ = ["IMAGE_TYPES", "OTHER_IMAGE_TYPES", "ImageFile"]

_QWEN = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280, "temporal_patch_size": 2}
_GLM = {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000, "temporal_patch_size": 2}

IMAGE_TYPES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "CohereCompassImageProcessor": _QWEN,
        "Qwen2VLImageProcessor": _QWEN,
        "MiniMaxM3VLImageProcessor": {**_QWEN, "longest_edge": 672 * 672},
        "Ernie4_5_VLMoeImageProcessor": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 6177},
        "Glm46VImageProcessor": _GLM,
        "Glm4vImageProcessor": _GLM,
        "PaddleOCRVLImageProcessor": {"shortest_edge": 384**2, "longest_edge": 1536**2, "temporal_patch_size": 1},
    }
)
"""Image processors in Transformers that resize as ImageProcessor does, with the default values of their classes."""

_SMALL_IMAGES = {
    "Glm46VImageProcessor": "glm-v",
    "Glm4vImageProcessor": "glm-v",
    "PaddleOCRVLImageProcessor": "paddleocr-vl",
}
"""Values of ImageProcessor's ``small_images`` for image processors that do not use the default."""

OTHER_IMAGE_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "GlmgaImageProcessor": "multiplies the side of a token by patch_expand_factor",
        "PixtralImageProcessor": "rounds sides up and limits the longest edge",
        "Kimi_K25ImageProcessor": "pads images to whole tokens",
        "MuseGlimmerImageProcessor": "resamples with Lanczos to the nearest aspect ratio",
        "Llama4ImageProcessor": "cuts images into tiles",
        "Step3p7ImageProcessor": "cuts images into tiles",
    }
)
"""Image processors that ImageProcessor cannot replace although the model's encoder is known, with the reason."""

_UNREAD_SIZES = {"MiniMaxM3VLImageProcessor": [672, 672]}
"""Sizes that a class ignores, because released files contain them by mistake."""

_FIXED = {"do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True, "resample": 3}
"""Fields for which ImageProcessor supports only one value; resample 3 is bicubic."""


@dataclass(frozen=True)
class ImageFile:
    """Settings of a Transformers image processor, read from its file.

    Args:
        path: name of the file in error messages.
        values: fields of the file.
    """

    path: str
    values: Mapping[str, Any] = field(hash=False, repr=False)

    @classmethod
    def from_folder(cls, folder: Path) -> ImageFile | None:
        """Read image_processor in processor_config.json, or else preprocessor_config.json, as Transformers does.

        Raises:
            InvalidInputError: a file is not a JSON object; the message contains the file name and the line number.
        """
        path = folder / "processor_config.json"
        if path.is_file():
            inside = read_json(path).get("image_processor")
            if isinstance(inside, Mapping):
                return cls(f"{path}: image_processor", inside)
        path = folder / "preprocessor_config.json"
        return cls(str(path), read_json(path)) if path.is_file() else None

    def arguments(self, **sizes: int | None) -> dict[str, Any]:
        """Return mean, std, min_pixels, max_pixels and small_images for ImageProcessor.

        Args:
            sizes: patch_size, merge_size and temporal_patch_size in the config; None for sizes that the config does not
                contain.

        Raises:
            UnsupportedError: ImageProcessor does not support the image processor or one of its options.
            InvalidInputError: a size differs from that in the config, or a field has an invalid value.
        """
        kind, processor = self.values.get("image_processor_type"), self._processor
        defaults = IMAGE_TYPES.get(processor)
        if defaults is None:
            got = "none" if kind is None else repr(kind)
            want = ", ".join(sorted(IMAGE_TYPES))
            other = OTHER_IMAGE_TYPES.get(processor, "is not known to resize as ImageProcessor does")
            raise UnsupportedError(
                f"{self.path}: image_processor_type: got {got}, which {other}, "
                f"want one of {want}, or pass mean, std, min_pixels and max_pixels"
            )
        for name, value in _FIXED.items():
            if self._get(name, value) != value:
                raise UnsupportedError(f"{self.path}: {name}: got {self.values[name]!r}, want {value}")
        scale = finite(f"{self.path}: rescale_factor", self._get("rescale_factor", 1 / 255), above=0)
        if abs(255 * scale - 1) > 1e-6:
            raise UnsupportedError(f"{self.path}: rescale_factor: got {scale}, want 1 / 255")
        for name, size in sizes.items():
            own = self._get(name, {"patch_size": 14, "merge_size": 2, **defaults}.get(name))
            if None not in (size, own) and own != size:
                raise InvalidInputError(f"{self.path}: {name}: got {own!r}, want {size} as in config.json")
        arguments: dict[str, Any] = {}
        limits = self._get("size", defaults)
        if limits == _UNREAD_SIZES.get(processor):
            limits = defaults
        for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            value = self._get(name, limits.get(edge) if isinstance(limits, Mapping) else None)
            if value is None:
                raise InvalidInputError(f"{self.path}: size: got {limits!r}, want {edge}, or the field {name}")
            arguments[name] = integer(f"{self.path}: {name}", value, minimum=1)
        if processor in _SMALL_IMAGES:
            arguments["small_images"] = _SMALL_IMAGES[processor]
        if arguments.get("small_images") == "glm-v":  # these limits count the pixels of all frames in a patch
            frames = self.temporal_patch_size or 1
            for name in ("min_pixels", "max_pixels"):
                pixels, odd = divmod(arguments[name], frames)
                if odd:
                    want = f"a multiple of temporal_patch_size={frames}"
                    raise UnsupportedError(f"{self.path}: {name}: got {arguments[name]}, want {want}")
                arguments[name] = pixels
        for name in ("mean", "std"):
            if self._get(f"image_{name}", None) is not None:
                arguments[name] = self.values[f"image_{name}"]
        return arguments

    @property
    def temporal_patch_size(self) -> int | None:
        """Frames per patch; None if neither the file nor the class of the image processor defines it."""
        size = self._get("temporal_patch_size", IMAGE_TYPES.get(self._processor, {}).get("temporal_patch_size"))
        return None if size is None else integer(f"{self.path}: temporal_patch_size", size, minimum=1)

    @property
    def _processor(self) -> str:
        """Class name without the suffix for the backend."""
        return str(self.values.get("image_processor_type")).removesuffix("Fast").removesuffix("Pil")

    def _get(self, name: str, default: Any) -> Any:
        """Return a field, or the default if it is missing or null."""
        value = self.values.get(name)
        return default if value is None else value
