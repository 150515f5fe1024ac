"""Pixels of a processor beside its text: its image processor as Transformers knows one, and its videos."""

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
from mmpos.integrations.hf.chat import FRAMES, Frames, flat, process, read_image, without_url
from mmpos.integrations.hf.texts import FIXED, NORMALISING, OF_IMAGES
from mmpos.sequence.builder import MarkerIds, join_patches
from mmpos.sequence.tokenizers import Tokenizer
from mmpos.support.checks import IntArray, boolean, finite, integer, naming

__all__ = [
    "ImagesOfProcessor",
    "VideoProcessor",
    "VideoSettings",
    "Videos",
    "flat_videos",
    "process_videos",
    "with_options",
]


def with_options(images: ImageProcessor, options: Mapping[str, Any], frames: int = 1) -> ImageProcessor:
    """Return the image processor with the options of a call, those of ``OF_IMAGES``.

    Args:
        images: of the processor.
        options: of the call, by name.
        frames: images whose pixels ``size`` counts together.

    Raises:
        InvalidInputError: a value of the wrong type or out of range, or size with other edges than Transformers has.
    """
    changes = {name: value for name, value in options.items() if value is not None and name not in NORMALISING}
    size = changes.pop("size", None)
    if size is not None:
        edges = dict(size) if isinstance(size, Mapping | SizeDict) else {}
        if (
            not edges
            or edges.keys() - {"shortest_edge", "longest_edge"}
            or changes.keys() & {"min_pixels", "max_pixels"}
        ):
            raise InvalidInputError(
                f"size: got {size!r:.80}, want shortest_edge and longest_edge, the least and the most pixels, "
                "and neither min_pixels nor max_pixels beside them"
            )
        named = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
        for edge, value in edges.items():
            if frames > 1 and integer(f"size: {edge}", value) % frames:
                raise InvalidInputError(f"size: {edge}: got {value}, want a multiple of {frames}, frames in a patch")
            changes[named[edge]] = value if frames == 1 else value // frames
    images = replace(images, **changes) if changes else images
    return _normalised(images, options) if options.keys() & set(NORMALISING) else images


def _normalised(images: ImageProcessor, options: Mapping[str, Any]) -> ImageProcessor:
    """Return the image processor whose mean and std make of bytes what a call wants."""
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
    """Image processor inside a processor, by the names that Transformers has for it.

    ``size``, also edge by edge, ``min_pixels``, ``max_pixels``, ``image_mean`` and ``image_std`` may be assigned, and
    hold for all later calls, the first of which refuses limits that contradict each other.

    Args:
        images: that reads them.
        temporal_patch_size: frames in a patch of pixel_values; None for patches of uint8.
        read_files: whether text may name a file.
        assigned: values that may be assigned, which several such objects may share; empty for those of images.
    """

    do_resize = do_convert_rgb = do_rescale = do_normalize = True
    resample, rescale_factor = 3, 1 / 255
    temporal_patch_size: int | None
    _images: ImageProcessor
    _read_files: bool
    _assigned: dict[str, Any]
    _frames: int  # images whose pixels size counts together

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
                f"image_processor.{name}: got {value!r:.80}, want assignments to size, min_pixels, max_pixels, "
                f"image_mean or image_std; {', '.join(NORMALISING[:3])} as options of a call; all else in images="
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.to_dict()})"

    @property
    def images(self) -> ImageProcessor:
        """The ImageProcessor with what was assigned."""
        return with_options(self._images, self._assigned, self._frames)

    @property
    def patch_size(self) -> int:
        """Side of a patch in pixels."""
        return self._images.patch_size

    @property
    def merge_size(self) -> int:
        """Patches on a side of the square that becomes one token."""
        return self._images.spatial_merge_size

    @property
    def min_pixels(self) -> int:
        """Pixels that smaller images are scaled up to."""
        return self.size["shortest_edge"] // self._frames

    @property
    def max_pixels(self) -> int:
        """Most pixels of an image."""
        return self.size["longest_edge"] // self._frames

    @property
    def size(self) -> dict[str, int]:
        """Least and most pixels, as Transformers names them; in GLM-V those of all frames in a patch."""
        return cast("dict[str, int]", self._assigned["size"])

    @property
    def image_mean(self) -> list[float]:
        """Mean of red, green and blue, as parts of 1."""
        return cast("list[float]", self._assigned["image_mean"])

    @property
    def image_std(self) -> list[float]:
        """Standard deviation of red, green and blue, as parts of 1."""
        return cast("list[float]", self._assigned["image_std"])

    @property
    def image_processor_type(self) -> str:
        """Class of Transformers that resizes likewise."""
        kinds = {"qwen-vl": "Qwen2VL", "glm-v": "Glm4v", "paddleocr-vl": "PaddleOCRVL"}
        return f"{kinds[self._images.small_images]}ImageProcessor"

    @property
    def model_input_names(self) -> list[str]:
        """Keys of a call's result."""
        return ["patches" if self.temporal_patch_size is None else "pixel_values", "image_grid_thw"]

    def to_dict(self) -> dict[str, Any]:
        """Return its settings, by which Transformers makes its own image processor."""
        sizes = ("size", "patch_size", "merge_size", "temporal_patch_size", "resample", "do_resize", "do_convert_rgb")
        names = ("image_processor_type", *sizes, *NORMALISING)
        return {name: copy(getattr(self, name)) for name in names}

    def __call__(self, images: object, return_tensors: str | None = None, **options: Any) -> BatchFeature:
        """Make the patches and grids of images; the arguments and errors are those of the processor's call."""
        data: dict[str, object] = {}
        self.process(images, None, options, data)
        return BatchFeature(data, tensor_type=return_tensors)

    preprocess = __call__

    def process(
        self, images: object, texts: int | None, options: Mapping[str, Any], batch: dict[str, Any]
    ) -> tuple[IntArray, IntArray | None]:
        """Put the pixels of images and their grids before merging into a batch.

        Args:
            images: as the processor's call has them.
            texts: number of texts; None where there is no text.
            options: of images.
            batch: of the call's result, changed in place.

        Returns:
            (images, 3) frames, height and width after merging; and (texts,) images of each text, or None.
        """
        used = self._told(options)
        named, counts = flat("images", images, texts)
        processed = process(named, used, self.temporal_patch_size, self._read_files)
        grid_thw = np.array([image.grid.extents for image in processed], np.int64).reshape(-1, 3)
        if processed:
            pixels, grid = self.model_input_names
            batch[grid] = grid_thw * (1, self.merge_size, self.merge_size)
            patches = join_patches("images", processed)
            if patches is not None:
                if used.small_images == "paddleocr-vl" and self.temporal_patch_size is not None:
                    patches = patches.reshape(len(patches), -1, self.patch_size, self.patch_size)
                if not (options.get("do_rescale", True) or options.get("do_normalize", True)):
                    patches = patches.astype(np.uint8)  # as Transformers leaves them
                batch[pixels] = patches
        return grid_thw, counts

    def get_number_of_image_patches(
        self, height: int, width: int, images_kwargs: Mapping[str, Any] | None = None
    ) -> int:
        """Count the patches, before merging, of an image of this size; no pixel is needed."""
        grid = self._told(images_kwargs or {}).grid(height, width)
        return grid.height * grid.width * self.merge_size**2

    def _told(self, options: Mapping[str, Any]) -> ImageProcessor:
        """Return the ImageProcessor with the options of a call.

        Raises:
            InvalidInputError: an option that is not known, or has another value than images have here.
        """
        own = {name: getattr(self, name) for name in ("patch_size", "merge_size", "temporal_patch_size")}
        fixed = {**FIXED, **own}
        for name, value in options.items():
            if name in OF_IMAGES:
                continue
            if name not in fixed:
                raise InvalidInputError(f"{name}: got an argument of this name, want {', '.join(OF_IMAGES)}")
            if value != fixed[name] and (value is not None or fixed[name]):
                other = "make another processor for others" if name in own else "prepare them before the call"
                want = f"{fixed[name]} for images: {other}, and put what is meant for videos alone into videos_kwargs"
                raise InvalidInputError(f"{name}: got {value!r:.80}, want {want}")
        if self.temporal_patch_size is None and self._images.dtype == "uint8":
            for name in options.keys() & set(NORMALISING):
                raise InvalidInputError(
                    f"{name}: got one, want none: patches are bytes, normalised where the model runs"
                )
        changes = {name: value for name, value in options.items() if name in OF_IMAGES}
        return with_options(self.images, changes, self._frames)


class VideoProcessor(Protocol):
    """Video processor of Transformers whose patches span several frames, as those of Qwen-VL models."""

    merge_size: int
    temporal_patch_size: int
    valid_kwargs: Any

    def __call__(self, videos: object, **options: Any) -> Mapping[str, Any]:
        """Decode, sample and cut videos."""

    def get_num_of_video_patches(
        self, num_frames: int, height: int, width: int, videos_kwargs: Mapping[str, Any]
    ) -> int:
        """Count the patches, before merging, of a video of this size."""

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON has them."""


@dataclass(frozen=True)
class VideoSettings:
    """Settings of a processor that takes videos.

    Args:
        processor: of Transformers, which decodes, samples and cuts them.
        token_id: the placeholder of a video, and of each of its patches.
        timestamp: text before each grid of frames, a format of ``seconds``; None for one grid of all frames.
        seconds: whether the scheme places frames by their time.
    """

    processor: VideoProcessor
    token_id: int
    timestamp: str | None
    seconds: bool

    def names(self) -> list[str]:
        """Names of the options that a call may have for videos."""
        return sorted(set(self.processor.valid_kwargs.__annotations__) - {"return_tensors", "device"})


@dataclass(frozen=True)
class Videos:
    """Processed videos of a batch.

    Args:
        values: pixel_values_videos of each.
        grid_thw: (videos, 3) frames, height, width before merging.
        metadata: of each, as Transformers has it.
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
        """Compute the seconds of each grid of frames, the mean of its first and last frame; floats, as Transformers."""
        data, size = self.metadata[video], self.temporal_patch_size
        indices = list(data.frames_indices)
        indices += indices[-1:] * (-len(indices) % size)
        times = [index / (data.fps or 24) for index in indices]
        return [(first + last) / 2 for first, last in zip(times[::size], times[size - 1 :: size], strict=True)]

    def written(self, settings: VideoSettings, around: MarkerIds, tokenizer: Tokenizer) -> list[IntArray]:
        """Write the tokens that stand for each video: a placeholder for each grid, after its time where it has one.

        Args:
            settings: of the processor.
            around: markers that are written around each grid here; None where they are written later.
            tokenizer: encodes timestamps, each by itself.
        """
        if settings.timestamp is None:
            return [np.array([settings.token_id])] * len(self.values)
        grid = [token for token in (around.begin, settings.token_id, around.end) if token is not None]
        rows = []
        for video in range(len(self.values)):
            times = [settings.timestamp.format(seconds=seconds) for seconds in self.timestamps(video)]
            rows.append(np.concatenate([np.array([*tokenizer.encode(text), *grid], np.int64) for text in times]))
        return rows


def flat_videos(videos: object, texts: int | None) -> tuple[list[tuple[str, Any]], IntArray | None]:
    """Name the videos, and count those of each text where they are nested; see ``flat``."""
    return flat("videos", _clips(videos), texts)


def process_videos(
    named: list[tuple[str, Any]],
    settings: VideoSettings,
    images: ImageProcessor,
    options: Mapping[str, Any],
    read_files: bool,
) -> Videos:
    """Process each video; an error names the video.

    Args:
        named: names, and paths, arrays or Frames.
        settings: of the processor.
        images: reads frames that are files.
        options: of videos, by the names that Transformers has for them.
        read_files: whether text may name a file.
    """
    size = options.get("temporal_patch_size") or settings.processor.temporal_patch_size
    told = {name: value for name, value in options.items() if name not in ("video_metadata", "return_metadata")}
    known = _metadata(options.get("video_metadata"), len(named))
    values, grids, metadata = [], [], []
    for (name, video), known_of_it in zip(named, known, strict=True):
        source = _source(name, video, images, read_files)
        try:
            out = settings.processor(
                source, **told, video_metadata=known_of_it, return_metadata=True, return_tensors="pt"
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
    """Return the metadata of each video in a list of its own, as Transformers takes that of one video."""
    if known is None:
        return [None] * videos
    flat_list = [known] if isinstance(known, Mapping) else list(known)
    if any(isinstance(each, list | tuple) for each in flat_list):
        flat_list = [each for row in flat_list for each in row]
    if len(flat_list) != videos:
        raise InvalidInputError(f"video_metadata: got {len(flat_list)} of them, want {videos}, one for each video")
    return [[dict(each)] for each in flat_list]


def _clips(videos: Any) -> Any:
    """Mark the lists that are the frames of one video: those of images."""
    if not isinstance(videos, list | tuple):
        return videos
    if videos and all(_is_frame(each) for each in videos):
        return Frames(tuple(videos))
    return [_clips(each) for each in videos]


def _is_frame(value: Any) -> bool:
    if isinstance(value, list | tuple | str | PathLike | Frames):
        return False
    return getattr(value, "ndim", 3) in (2, 3)


def _source(name: str, video: Any, images: ImageProcessor, read_files: bool) -> object:
    """Return a video as Transformers takes it: the path of a file, or (frames, …) pixels."""
    if isinstance(video, Frames):
        named = ((f"{name}.frames[{k}]", frame) for k, frame in enumerate(video.images))
        return _stacked(name, [_frame(*each, images, read_files) for each in named])
    if isinstance(video, str):
        return str(without_url(name, video, read_files, FRAMES))
    if isinstance(video, PathLike):
        return str(video)
    if getattr(video, "ndim", 0) != 4:
        raise InvalidInputError(f"{name}: got {type(video).__name__}, want the path of a file, {FRAMES}")
    return video


def _frame(name: str, frame: Any, images: ImageProcessor, read_files: bool) -> npt.NDArray[np.uint8]:
    read = read_image(name, frame, read_files) if isinstance(frame, str) else frame
    with naming(name):
        return images.pixels(read)


def _stacked(name: str, frames: Sequence[npt.NDArray[np.uint8]]) -> npt.NDArray[np.uint8]:
    shapes = sorted({frame.shape for frame in frames})
    if len(shapes) != 1:
        raise InvalidInputError(f"{name}: got frames of {shapes or 'no pictures'}, want one size")
    return np.stack(frames)
