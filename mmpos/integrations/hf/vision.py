"""Pixel processing for a processor: an image processor with the interface of Transformers, and videos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from numbers import Real
from os import PathLike
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
from transformers import BatchFeature
from transformers.image_utils import SizeDict

from mmpos.errors import InvalidInputError, MmposError
from mmpos.images import ImageProcessor
from mmpos.integrations.hf.chat import FRAMES, Frames, flatten, local_path, process, read_image
from mmpos.integrations.hf.texts import FIXED_OPTIONS, IMAGE_OPTIONS, PIXEL_OPTIONS
from mmpos.sequence.builder import MarkerIds, join_patches
from mmpos.sequence.tokenizers import Tokenizer
from mmpos.support.checks import IntArray, boolean, finite, integer, naming

__all__ = [
    "ImagesOfProcessor",
    "VideoProcessor",
    "VideoSettings",
    "Videos",
    "process_videos",
    "with_frames",
    "with_options",
]


def with_options(images: ImageProcessor, options: Mapping[str, Any], frames: int = 1) -> ImageProcessor:
    """Return the image processor with a call's options applied.

    Args:
        images: the image processor.
        options: the call's ``IMAGE_OPTIONS``, by name.
        frames: number of frames whose pixels are counted together in ``size``.

    Raises:
        InvalidInputError: a value has the wrong type or is out of range, or size has unknown edges.
    """
    changes = {name: value for name, value in options.items() if value is not None and name not in PIXEL_OPTIONS}
    size = changes.pop("size", None)
    if size is not None:
        edges = dict(size) if isinstance(size, Mapping | SizeDict) else {}
        if (
            not edges
            or edges.keys() - {"shortest_edge", "longest_edge"}
            or changes.keys() & {"min_pixels", "max_pixels"}
        ):
            raise InvalidInputError(
                f"size: got {size!r:.80}, want shortest_edge and longest_edge, the minimum and maximum number of "
                "pixels, without min_pixels and max_pixels"
            )
        limits = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
        for edge, value in edges.items():
            if frames > 1 and integer(f"size: {edge}", value) % frames:
                raise InvalidInputError(
                    f"size: {edge}: got {value}, want a multiple of {frames}, the frames in a patch"
                )
            changes[limits[edge]] = value if frames == 1 else value // frames
    images = replace(images, **changes) if changes else images
    return _normalised(images, options) if options.keys() & set(PIXEL_OPTIONS) else images


def _normalised(images: ImageProcessor, options: Mapping[str, Any]) -> ImageProcessor:
    """Return the image processor with the mean and std that result from a call's options."""
    values: dict[str, Any] = {"mean": (0, 0, 0), "std": (1, 1, 1)}
    if boolean("do_normalize", options.get("do_normalize", True)):
        values = {name: options.get(f"image_{name}", getattr(images, name)) for name in values}
        values = {name: [each] * 3 if isinstance(each, Real) else each for name, each in values.items()}
    factor = 255 * finite("rescale_factor", options.get("rescale_factor", 1 / 255), above=0)
    if not boolean("do_rescale", options.get("do_rescale", True)):
        factor = 255
    with naming("image_", joint=""):
        images = replace(images, **values)
    if factor == 1:
        return images
    values = {name: [each / factor for each in getattr(images, name)] for name in values}
    return replace(images, **values)


class ImagesOfProcessor:
    """A processor's image processor, with the interface of Transformers.

    ``size`` and its edges, ``min_pixels``, ``max_pixels``, ``image_mean`` and ``image_std`` can be assigned; the new
    values apply to all later calls. The next call refuses contradictory limits.

    Args:
        images: processor that reads the images.
        temporal_patch_size: frames in a patch of pixel_values; None for uint8 patches.
        read_files: whether a string may be a file path.
        assigned: assignable values, which several objects can share; an empty dictionary is filled from ``images``.
    """

    do_resize = do_convert_rgb = do_rescale = do_normalize = True
    resample, rescale_factor = 3, 1 / 255
    temporal_patch_size: int | None
    _images: ImageProcessor
    _read_files: bool
    _assigned: dict[str, Any]
    _frames: int  # number of frames whose total pixel count is limited by ``size``

    def __init__(
        self,
        images: ImageProcessor,
        temporal_patch_size: int | None,
        read_files: bool,
        assigned: dict[str, Any] | None = None,
    ) -> None:
        frames = (temporal_patch_size or 2) if images.small_images == "glm-v" else 1
        assigned = {} if assigned is None else assigned
        if not assigned:
            size = {"shortest_edge": images.min_pixels * frames, "longest_edge": images.max_pixels * frames}
            assigned |= {"size": size, "image_mean": list(images.mean), "image_std": list(images.std)}
        vars(self).update(
            _images=images,
            temporal_patch_size=temporal_patch_size,
            _read_files=read_files,
            _assigned=assigned,
            _frames=frames,
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("min_pixels", "max_pixels"):
            edge = "shortest_edge" if name == "min_pixels" else "longest_edge"
            self.size[edge] = integer(name, value, minimum=0) * self._frames
        elif name in self._assigned:
            with_options(self._images, {name: value}, self._frames)
            self._assigned[name] = self.size | dict(value) if name == "size" else value
        elif name not in self.to_dict() or value != getattr(self, name):
            raise InvalidInputError(
                f"image_processor.{name}: got {value!r:.80}, want an assignment to size, min_pixels, max_pixels, "
                f"image_mean or image_std: {', '.join(PIXEL_OPTIONS[:3])} are options of a call; "
                "everything else is set in images="
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.to_dict()})"

    @property
    def images(self) -> ImageProcessor:
        """The ImageProcessor with the assigned values."""
        return with_options(self._images, self._assigned, self._frames)

    @property
    def patch_size(self) -> int:
        """Side of a patch in pixels."""
        return self._images.patch_size

    @property
    def merge_size(self) -> int:
        """Side, in patches, of the square merged into one token."""
        return self._images.spatial_merge_size

    @property
    def min_pixels(self) -> int:
        """Number of pixels to which smaller images are scaled up."""
        return self.size["shortest_edge"] // self._frames

    @property
    def max_pixels(self) -> int:
        """Maximum number of pixels in an image."""
        return self.size["longest_edge"] // self._frames

    @property
    def size(self) -> dict[str, int]:
        """Minimum and maximum number of pixels, as named in Transformers; for GLM-V, summed over a patch's frames."""
        return cast("dict[str, int]", self._assigned["size"])

    @property
    def image_mean(self) -> list[float]:
        """Mean of red, green and blue, on a scale from 0 to 1."""
        return cast("list[float]", self._assigned["image_mean"])

    @property
    def image_std(self) -> list[float]:
        """Standard deviation of red, green and blue, on a scale from 0 to 1."""
        return cast("list[float]", self._assigned["image_std"])

    @property
    def image_processor_type(self) -> str:
        """Name of the Transformers class that resizes images in the same way."""
        kinds = {"qwen-vl": "Qwen2VL", "glm-v": "Glm4v", "paddleocr-vl": "PaddleOCRVL"}
        return f"{kinds[self._images.small_images]}ImageProcessor"

    @property
    def model_input_names(self) -> list[str]:
        """Keys in the result of a call."""
        return ["patches" if self.temporal_patch_size is None else "pixel_values", "image_grid_thw"]

    def to_dict(self) -> dict[str, Any]:
        """Return the settings from which Transformers can create an equivalent image processor."""
        sizes = ("size", "patch_size", "merge_size", "temporal_patch_size", "resample", "do_resize", "do_convert_rgb")
        names = ("image_processor_type", *sizes, *PIXEL_OPTIONS)
        return {name: copy(getattr(self, name)) for name in names}

    def __call__(self, images: object, return_tensors: str | None = None, **options: Any) -> BatchFeature:
        """Return the patches and grids of images; arguments and errors are as for a call to the processor."""
        data: dict[str, object] = {}
        self.process(images, None, options, data)
        return BatchFeature(data, tensor_type=return_tensors)

    preprocess = __call__

    def process(
        self, images: object, texts: int | None, options: Mapping[str, Any], batch: dict[str, Any]
    ) -> tuple[IntArray, IntArray | None]:
        """Add image pixels, and image grids before merging, to a batch.

        Args:
            images: as for a call to the processor.
            texts: number of texts; None if there is no text.
            options: image options.
            batch: result of the call, changed in place.

        Returns:
            (images, 3) frames, height and width after merging; and (texts,) the number of images in each text, or None.
        """
        processor = self._with_options(options)
        named, counts = flatten("images", images, texts)
        processed = process(named, processor, self.temporal_patch_size, self._read_files)
        grid_thw = np.array([image.grid.extents for image in processed], np.int64).reshape(-1, 3)
        if processed:
            pixels, grid = self.model_input_names
            batch[grid] = grid_thw * (1, self.merge_size, self.merge_size)
            patches = join_patches("images", processed)
            if patches is not None:
                if processor.small_images == "paddleocr-vl" and self.temporal_patch_size is not None:
                    patches = patches.reshape(len(patches), -1, self.patch_size, self.patch_size)
                if not (options.get("do_rescale", True) or options.get("do_normalize", True)):
                    patches = patches.astype(np.uint8)  # as in Transformers
                batch[pixels] = patches
        return grid_thw, counts

    def get_number_of_image_patches(
        self, height: int, width: int, images_kwargs: Mapping[str, Any] | None = None
    ) -> int:
        """Compute the number of patches, before merging, of an image with this size."""
        grid = self._with_options(images_kwargs or {}).grid(height, width)
        return grid.height * grid.width * self.merge_size**2

    def _with_options(self, options: Mapping[str, Any]) -> ImageProcessor:
        """Return the ImageProcessor with a call's options applied.

        Raises:
            InvalidInputError: an option is unknown, or a fixed option has another value.
        """
        own = {name: getattr(self, name) for name in ("patch_size", "merge_size", "temporal_patch_size")}
        fixed = {**FIXED_OPTIONS, **own}
        for name, value in options.items():
            if name in IMAGE_OPTIONS:
                continue
            if name not in fixed:
                raise InvalidInputError(f"{name}: got an unknown option, want {', '.join(IMAGE_OPTIONS)}")
            if value != fixed[name] and (value is not None or fixed[name]):
                remedy = "create another processor" if name in own else "prepare them before the call"
                want = f"{fixed[name]} for images: {remedy}, or pass video options in videos_kwargs"
                raise InvalidInputError(f"{name}: got {value!r:.80}, want {want}")
        if self.temporal_patch_size is None and self._images.dtype == "uint8":
            for name in options.keys() & set(PIXEL_OPTIONS):
                raise InvalidInputError(f"{name} cannot be combined with uint8 patches, which the model normalises")
        changes = {name: value for name, value in options.items() if name in IMAGE_OPTIONS}
        return with_options(self.images, changes, self._frames)


class VideoProcessor(Protocol):
    """Video processor from Transformers whose patches span several frames, as for Qwen-VL models."""

    merge_size: int
    temporal_patch_size: int
    valid_kwargs: Any

    def __call__(self, videos: object, **options: Any) -> Mapping[str, Any]:
        """Decode and sample videos, and divide them into patches."""

    def get_num_of_video_patches(
        self, num_frames: int, height: int, width: int, videos_kwargs: Mapping[str, Any]
    ) -> int:
        """Compute the number of patches, before merging, of a video with this size."""

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON values."""


@dataclass(frozen=True)
class VideoSettings:
    """A processor's video settings.

    Args:
        processor: video processor from Transformers.
        token_id: token id of the placeholder for a video, and for each of its patches.
        timestamp: format string, with the field ``seconds``, for the text before each grid of frames; None if all
            frames form one grid.
        seconds: whether the scheme places frames by time.
    """

    processor: VideoProcessor
    token_id: int
    timestamp: str | None
    seconds: bool

    def names(self) -> list[str]:
        """Return the names of the video options."""
        return sorted(set(self.processor.valid_kwargs.__annotations__) - {"return_tensors", "device"})


@dataclass(frozen=True)
class Videos:
    """Processed videos of a batch.

    Args:
        values: pixel_values_videos of each video.
        grid_thw: (videos, 3) frames, height, width before merging.
        metadata: Transformers VideoMetadata of each video.
        temporal_patch_size: frames in a patch.
    """

    values: list[npt.NDArray[np.float32]]
    grid_thw: IntArray
    metadata: list[Any]
    temporal_patch_size: int

    @property
    def seconds_per_grid(self) -> list[float]:
        """Seconds from one grid of frames to the next."""
        return [self.temporal_patch_size / each.sampled_fps for each in self.metadata]

    def timestamps(self, video: int) -> list[float]:
        """Return the mean time of each grid's first and last frames, in seconds, in floats as in Transformers."""
        data, size = self.metadata[video], self.temporal_patch_size
        indices = list(data.frames_indices)
        indices += indices[-1:] * (-len(indices) % size)
        times = [index / (data.fps or 24) for index in indices]
        return [(first + last) / 2 for first, last in zip(times[::size], times[size - 1 :: size], strict=True)]

    def unexpanded(self, settings: VideoSettings, markers: MarkerIds, tokenizer: Tokenizer) -> list[IntArray]:
        """Return the tokens of each video, with one placeholder per grid; timestamps, if any, precede the placeholders.

        Args:
            settings: video settings of the processor.
            markers: markers to insert around the grids of timestamped videos; begin and end are None if they are
                inserted later.
            tokenizer: tokenizer that encodes each timestamp separately.
        """
        if settings.timestamp is None:
            return [np.array([settings.token_id])] * len(self.values)
        grid = [token for token in (markers.begin, settings.token_id, markers.end) if token is not None]
        rows = []
        for video in range(len(self.values)):
            times = [settings.timestamp.format(seconds=seconds) for seconds in self.timestamps(video)]
            rows.append(np.concatenate([np.array([*tokenizer.encode(text), *grid], np.int64) for text in times]))
        return rows


def process_videos(
    named: list[tuple[str, Any]],
    settings: VideoSettings,
    images: ImageProcessor,
    options: Mapping[str, Any],
    read_files: bool,
) -> Videos:
    """Process each video; errors contain the video's name.

    Args:
        named: paths, arrays or Frames with their names.
        settings: video settings of the processor.
        images: processor that reads frames from files.
        options: video options, by their Transformers names.
        read_files: whether a string may be a file path.
    """
    size = options.get("temporal_patch_size") or settings.processor.temporal_patch_size
    processing = {name: value for name, value in options.items() if name not in ("video_metadata", "return_metadata")}
    sources = _metadata(options.get("video_metadata"), len(named))
    values, grids, metadata = [], [], []
    for (name, video), source_metadata in zip(named, sources, strict=True):
        source = _source(name, video, images, read_files)
        try:
            out = settings.processor(
                source, **processing, video_metadata=source_metadata, return_metadata=True, return_tensors="pt"
            )
        except MmposError:
            raise
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise InvalidInputError(f"{name}: video: {error}") from error
        values.append(out["pixel_values_videos"].numpy())
        grids.append(out["video_grid_thw"].numpy()[0])
        metadata.append(out["video_metadata"][0])
    return Videos(values, np.array(grids, np.int64).reshape(-1, 3), metadata, size)


def _metadata(known: Any, videos: int) -> list[list[Any] | None]:
    """Return one list per video with its metadata, the form that Transformers expects for a single video."""
    if known is None:
        return [None] * videos
    flat_list = [known] if isinstance(known, Mapping) else list(known)
    if any(isinstance(each, list | tuple) for each in flat_list):
        flat_list = [each for row in flat_list for each in row]
    if len(flat_list) != videos:
        raise InvalidInputError(f"video_metadata: got {len(flat_list)} entries, want {videos}, one per video")
    return [[dict(each)] for each in flat_list]


def with_frames(videos: Any) -> Any:
    """Convert lists of images, which are the frames of one video, to Frames."""
    if not isinstance(videos, list | tuple):
        return videos
    if videos and all(map(_is_frame, videos)):
        return Frames(tuple(videos))
    return [with_frames(each) for each in videos]


def _is_frame(value: Any) -> bool:
    if isinstance(value, list | tuple | str | PathLike | Frames):
        return False
    return getattr(value, "ndim", 3) in (2, 3)


def _source(name: str, video: Any, images: ImageProcessor, read_files: bool) -> object:
    """Return a video in a form that Transformers accepts: the path of a file, or (frames, …) pixels."""
    if isinstance(video, Frames):
        named = ((f"{name}.frames[{k}]", frame) for k, frame in enumerate(video.images))
        return _stack_frames(name, [_frame(*each, images, read_files) for each in named])
    if isinstance(video, str):
        return str(local_path(name, video, read_files, FRAMES))
    if isinstance(video, PathLike):
        return str(video)
    if getattr(video, "ndim", 0) != 4:
        raise InvalidInputError(f"{name}: got {type(video).__name__}, want the path of a file, {FRAMES}")
    return video


def _frame(name: str, frame: Any, images: ImageProcessor, read_files: bool) -> npt.NDArray[np.uint8]:
    source = read_image(name, frame, read_files) if isinstance(frame, str) else frame
    with naming(name):
        return images.pixels(source)


def _stack_frames(name: str, frames: Sequence[npt.NDArray[np.uint8]]) -> npt.NDArray[np.uint8]:
    shapes = sorted({frame.shape for frame in frames})
    if len(shapes) != 1:
        got = f"frames of shapes {shapes}" if shapes else "no frames"
        raise InvalidInputError(f"{name}: got {got}, want frames of the same shape")
    return np.stack(frames)
