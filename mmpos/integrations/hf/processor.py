"""MMPosProcessor: converts text or chats with images to the inputs of a Transformers model and their positions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from fractions import Fraction
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
from transformers import AutoTokenizer, BatchFeature, PreTrainedTokenizerBase, ProcessorMixin, TensorType
from transformers.processing_utils import MultiModalData

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.images import ImageProcessor
from mmpos.integrations.hf.chat import flatten, is_chat, read_conversations, separate_images
from mmpos.integrations.hf.texts import (
    TextOptions,
    TextRows,
    VideoTokens,
    added_tokens,
    expand,
    flat_options,
    sort_options,
)
from mmpos.integrations.hf.vision import ImagesOfProcessor, VideoProcessor, VideoSettings, process_videos, with_frames
from mmpos.integrations.models import MODEL_TYPES, from_hf_config
from mmpos.integrations.models.from_config import config_folder
from mmpos.positions.place import place
from mmpos.positions.table import PositionTable, Side
from mmpos.schemes import RATIONAL_PARAMETERS, SCHEMES, Scheme, get_scheme
from mmpos.segments.table import SegmentTable
from mmpos.sequence.builder import Markers
from mmpos.sequence.tokenizers import Tokenizer, adapt
from mmpos.sequence.video import QWEN3_VL
from mmpos.support.checks import INT32_MAX, INT32_MIN, IntArray, boolean, integer

__all__ = ["MMPosProcessor", "scheme_of", "scheme_to_json"]

T = TypeVar("T")

_NOT_TENSORS = [
    "positions",
    "offset_mapping",
    "video_metadata",
]  # accessed token by token; tensors would be too slow


class MMPosProcessor(ProcessorMixin):
    """Transformers processor that returns positions with the tokens. It is saved and loaded like any other processor.

    In text, the patch marker is the placeholder for an image, and ``video_token`` is the placeholder for a video; each
    is replaced with the tokens of its image or video. Chats contain their images and require a chat template that
    writes placeholders.

    Args:
        tokenizer: tokenizer from Transformers.
        images: an ImageProcessor, or its fields as JSON values; None uses ImageProcessor().
        scheme: a name from mmpos.SCHEMES, a scheme object, or its name and parameters as JSON values.
        markers: the special tokens of images, or the fields of Markers as JSON values; None uses Markers().
        add_markers: whether to insert the begin and end markers around the patches; False if the text contains them.
        start: id of the first token in every row.
        temporal_patch_size: None returns ``patches``, uint8 for the model to normalise; a number of frames per patch
            returns ``pixel_values``, as the vision encoders in Transformers expect.
        chat_template: Jinja template; None uses the tokenizer's template.
        return_positions: whether calls return positions in addition to Transformers' keys, unless a call sets the
            option of the same name. With False, ``model.generate(**batch)`` of a Transformers model accepts the batch.
        read_files: whether a string may be a file path; use False for chats from untrusted users.
        video_processor: video processor from Transformers, or its fields as JSON values; with None, videos are refused.
        video_token: placeholder for a video and for each of its patches, as text or token id.
        timestamp: format string for the text before each grid of frames, with the field ``seconds``, as in Qwen3-VL;
            None if all frames of a video form one grid.

    Raises:
        TypeError: the tokenizer is not from Transformers.
        InvalidInputError: a marker is not a single token of the tokenizer, or a setting has the wrong type.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        images: ImageProcessor | Mapping[str, object] | None = None,
        scheme: str | Scheme | Mapping[str, Any] = "rope-tie",
        markers: Markers | Mapping[str, object] | None = None,
        add_markers: bool = True,
        start: int = 0,
        temporal_patch_size: int | None = None,
        chat_template: str | dict[str, str] | None = None,
        return_positions: bool = True,
        read_files: bool = True,
        video_processor: VideoProcessor | Mapping[str, Any] | None = None,
        video_token: str | int | None = None,
        timestamp: str | None = None,
    ) -> None:
        template = getattr(tokenizer, "chat_template", None) if chat_template is None else chat_template
        super().__init__(tokenizer, chat_template=template)  # type: ignore[no-untyped-call]
        self.images = ImageProcessor() if images is None else images  # type: ignore[assignment]  # may be a mapping
        self.scheme = scheme_of(scheme)
        self.markers = Markers() if markers is None else object_of("markers", Markers, markers)
        self.add_markers = boolean("add_markers", add_markers)
        self.start = integer("start", start, minimum=INT32_MIN, maximum=INT32_MAX)
        if temporal_patch_size is not None:
            temporal_patch_size = integer("temporal_patch_size", temporal_patch_size, minimum=1)
        self.temporal_patch_size = temporal_patch_size
        self.return_positions = boolean("return_positions", return_positions)
        self.read_files = boolean("read_files", read_files)
        self._adapted = adapt(tokenizer)
        self._marker_ids = self.markers.ids(self._adapted)
        if (video_processor is None) != (video_token is None):
            got, missing = ("video_token", "video_processor")[:: 1 if video_processor is None else -1]
            raise InvalidInputError(f"{got} requires {missing}")
        self._videos: VideoSettings | None = None
        if video_processor is not None:
            processor, merge = video_processor_of(video_processor), self.images.spatial_merge_size
            if processor.merge_size != merge:
                raise InvalidInputError(
                    f"video_processor.merge_size: got {processor.merge_size}, want {merge}, as for images"
                )
            self._videos = VideoSettings(
                processor,
                _token_id(video_token, self._adapted),
                timestamp,
                getattr(self.scheme, "tokens_per_second", None) is not None,
            )

    @classmethod
    def get_attributes(cls) -> list[str]:
        """Return the names of the parts saved in separate files: only the tokenizer."""
        return ["tokenizer"]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | PathLike[str], *args: Any, **kwargs: Any) -> Self:
        """Load a processor from a folder written by ``save_pretrained``.

        Raises:
            InvalidInputError: the folder contains no processor of this class.
        """
        try:
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        except InvalidInputError as error:
            if "markers" in cls.get_processor_dict(pretrained_model_name_or_path, **kwargs)[0]:
                raise
            got = f"{str(pretrained_model_name_or_path)!r}, which contains no {cls.__name__} ({error})"
            want = f"a folder in which one was saved, or {cls.__name__}.from_hf_config(…) for the folder of a model"
            raise InvalidInputError(f"pretrained_model_name_or_path: got {got}, want {want}") from error

    @classmethod
    def from_hf_config(
        cls,
        config: object,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        images: ImageProcessor | None = None,
        video_processor: VideoProcessor | None = None,
        **settings: Any,
    ) -> Self:
        """Create the processor for a Transformers model; its calls return the inputs of that model.

        As with the model's own processor, the chat template writes the tokens around images. The template is read from
        chat_template.jinja, chat_template.json or processor_config.json in the folder, else from the tokenizer.

        Args:
            config: config of the model, or the path of its config.json or its folder; see ``mmpos.from_hf_config``.
            tokenizer: tokenizer of the model; None loads it from the folder.
            images: None reads preprocessor_config.json in the folder.
            video_processor: None loads a supported video processor from the folder; if the folder has none, videos are
                refused. For Qwen-VL models, preprocessor_config.json is sufficient, as in Transformers.
            settings: other arguments of the processor, such as ``return_positions=True`` or ``chat_template``.

        Raises:
            InvalidInputError: the config does not belong to a known model, or a file or argument is missing.
            UnsupportedError: the placeholders, patches or timestamps of the model are not supported.
        """
        model = from_hf_config(config)
        frames = model.temporal_patch_size
        if frames is None and model.image_file is not None:
            frames = model.image_file.temporal_patch_size
        if frames is None:
            want = "a model whose config has temporal_patch_size"
            raise UnsupportedError(f"config: got {model.model_type!r}, want {want}")
        folder = config_folder(config)
        if tokenizer is None:
            if folder is None:
                raise InvalidInputError("tokenizer: got None with a config, want a tokenizer, or config as a folder")
            tokenizer = AutoTokenizer.from_pretrained(folder)
        known = MODEL_TYPES[model.model_type]
        takes_videos = model.placeholders.video is not None and (known.timestamps or not known.frames_apart)
        if video_processor is None and folder is not None and takes_videos:
            video_processor = video_processor_in(folder, known.videos_as_images)
        arguments: dict[str, Any] = {
            "images": images or model.image_processor(),
            "scheme": model.scheme,
            "markers": model.markers,
            "add_markers": False,
            "temporal_patch_size": frames,
            "return_positions": False,
            "chat_template": None if folder is None else cls.get_processor_dict(folder)[0].get("chat_template"),
        }
        if video_processor is not None:
            if not takes_videos:
                raise UnsupportedError(
                    f"video_processor: got one for {model.model_type!r}, want None; its videos are unsupported"
                )
            arguments["video_processor"] = video_processor
            arguments["video_token"] = model.placeholders.video
            arguments["timestamp"] = QWEN3_VL if model.frames_apart else None
        return cls(tokenizer, **arguments | settings)

    @property
    def image_token_id(self) -> int:
        """Token id of each image patch in input_ids."""
        return self._marker_ids.patch

    @property
    def image_token(self) -> str:
        """Placeholder of an image in text."""
        token: str = self.tokenizer.convert_ids_to_tokens(self.image_token_id)
        return token

    @property
    def image_processor(self) -> ImagesOfProcessor:
        """Image processor with Transformers' interface; its limits can be changed by assignment."""
        return ImagesOfProcessor(self._images, self.temporal_patch_size, self.read_files, self._assigned)

    @property
    def images(self) -> ImageProcessor:
        """The ImageProcessor, with the values that were assigned to image_processor."""
        return self.image_processor.images

    @images.setter
    def images(self, images: ImageProcessor) -> None:
        self._images = object_of("images", ImageProcessor, images)
        self._assigned: dict[str, Any] = {}

    @property
    def video_processor(self) -> VideoProcessor | None:
        """The video processor; None if videos are refused."""
        return None if self._videos is None else self._videos.processor

    @property
    def video_token_id(self) -> int | None:
        """Token id of each video patch in input_ids; None if videos are refused."""
        return None if self._videos is None else self._videos.token_id

    @property
    def video_token(self) -> str | None:
        """Placeholder of a video in text; None if videos are refused."""
        return None if self._videos is None else str(self.tokenizer.convert_ids_to_tokens(self._videos.token_id))

    @property
    def model_input_names(self) -> list[str]:
        """Keys of a result that a model accepts."""
        names = ["input_ids", "attention_mask", "mm_token_type_ids", *self.image_processor.model_input_names]
        if self._videos is not None:
            names += ["pixel_values_videos", "video_grid_thw"] + ["second_per_grid_ts"] * self._videos.seconds
        return names + ["mm_position_ids"] * self.return_positions

    def __call__(
        self,
        images: object = None,
        text: object = None,
        videos: object = None,
        audio: object = None,
        **options: object,
    ) -> PositionBatch:
        """Compute the tokens, patches and positions of a batch.

        Args:
            images: one image, a list of images for all texts, or a list that contains a list of images for each text.
                Each image is in a form that ImageProcessor accepts, or it is a string with a path or a data: URL.
            text: one or more texts, each with one placeholder per image and per video; or one or more chats.
            videos: one video, a list of videos for all texts, or a list that contains a list of videos for each text.
                Each video is a file, an array of (frames, height, width, 3) or a list of frames.
            audio: must be None.
            options: ``return_tensors``, ``padding``, ``max_length``, ``return_positions`` and the other fields of
                ``mmpos.integrations.hf.texts.TextOptions``; for images, ``min_pixels``, ``max_pixels``, ``max_tokens``,
                ``size``, ``do_rescale``, ``rescale_factor``, ``do_normalize``, ``image_mean`` and ``image_std``, which
                can also be passed in ``images_kwargs``; for videos, the options of the video_processor, which can also
                be passed in ``videos_kwargs``. An option that exists for both images and videos applies to both, and is
                refused if it is not supported for images.

        Returns:
            A BatchFeature of new arrays: (batch, seq) ``input_ids``, ``attention_mask`` and ``mm_token_type_ids`` (1
            for image patches, 2 for video patches). With images, also (images, 3) ``image_grid_thw`` before merging
            and, if the pixels are known, ``patches`` or ``pixel_values``. With videos, also ``video_grid_thw``,
            ``pixel_values_videos`` and, if the scheme uses seconds, ``second_per_grid_ts``. With positions, also (axes,
            batch, seq) ``mm_position_ids``, int64, or float64 for fractional schemes; ``positions``, their
            PositionTable; and (batch,) ``mm_next_positions`` and ``deltas`` if all rows have them.

        Raises:
            InvalidInputError: the numbers of images and placeholders differ, an image cannot be read, or rows cannot be
                padded or truncated as requested.
            UnsupportedError: audio was passed, videos were passed without a video_processor, or the scheme cannot place
                a row.
        """
        self._check_media(videos, audio)
        arguments = flat_options(options)
        text_arguments, image_options, video_options = self._sorted(arguments)
        text_options = TextOptions.of(text_arguments, self.tokenizer)
        if is_chat(text):
            return self._process_chat(text, images, videos, arguments)
        if text_options.add_generation_prompt:
            raise InvalidInputError(
                "add_generation_prompt: got True with text, want a chat, whose template writes the prompt"
            )
        texts = _texts(text, images, videos)
        count = None if texts is None else len(texts)
        pixels: dict[str, Any] = {}
        if images is None and videos is not None:
            image_options = {}
        grid_thw, counts = self.image_processor.process(images, count, image_options, pixels)
        video_tokens = self._encode_videos(videos, count, video_options, pixels)
        batch = {} if texts is None else self._tokens(texts, grid_thw, counts, video_tokens, text_options)
        return PositionBatch(batch | pixels, text_options.return_tensors)

    def _check_media(self, videos: object, audio: object) -> None:
        if audio is not None:
            raise UnsupportedError(f"audio: got {type(audio).__name__}, want None; audio is not supported")
        if videos is not None and self._videos is None:
            raise UnsupportedError("videos requires a processor with video_processor and video_token")

    def _process_chat(self, chat: object, images: object, videos: object, arguments: dict[str, Any]) -> Any:
        """Return the batch for a chat passed as ``text``."""
        if videos is not None:
            raise InvalidInputError("videos cannot be combined with a chat: pass them in its blocks of type 'video'")
        prompt = arguments.pop("add_generation_prompt", False)
        arguments = arguments if images is None else {**arguments, "images": images}
        return self.apply_chat_template(
            chat, tokenize=True, return_dict=True, add_generation_prompt=prompt, processor_kwargs=arguments
        )

    def apply_chat_template(  # type: ignore[override]  # the others are keyword-only, to find them in kwargs
        self, conversation: object, chat_template: str | None = None, **kwargs: Any
    ) -> Any:
        """Render one or more chats as text, or as a batch with ``tokenize=True, return_dict=True``.

        This method takes the arguments of Transformers' method by name, but differs from that method in four ways.
        Images and videos are passed as objects, bytes, paths or base64, and are never fetched. Audio is refused. The
        tokenizer adds no special tokens, because templates write them. Special tokens and placeholders that users spell
        out remain text, unless ``sanitize_control_tokens=False`` is passed or the mask of the assistant's tokens is
        requested, because Transformers cannot combine that mask with sanitizing.

        Raises:
            InvalidInputError: as for a call; the message contains the index of the content block.
            UnsupportedError: a chat contains audio, or a video without a video_processor.
        """
        if chat_template is None and self.chat_template is None:
            want = "a template from the call, the processor, its tokenizer or the model's folder"
            raise InvalidInputError(f"chat_template: got None, want {want}")
        conversation = read_conversations(conversation, self.read_files, videos=self._videos is not None)
        if kwargs.get("tokenize"):
            call_options = {"add_special_tokens": False, **flat_options(kwargs.get("processor_kwargs") or {})}
            for arguments in (call_options, kwargs):
                if arguments.get("images") is not None:
                    arguments["images"] = separate_images(conversation, arguments["images"])
            if "return_tensors" in call_options:  # this option also applies to the mask of the assistant's tokens
                kwargs.setdefault("return_tensors", call_options["return_tensors"])
            kwargs["processor_kwargs"] = call_options
            kwargs.setdefault("sanitize_control_tokens", not kwargs.get("return_assistant_tokens_mask", False))
        return super().apply_chat_template(conversation, chat_template, **kwargs)

    def segments(
        self,
        input_ids: npt.ArrayLike,
        image_grid_thw: npt.ArrayLike | None = None,
        attention_mask: npt.ArrayLike | None = None,
        *,
        video_grid_thw: npt.ArrayLike | None = None,
        second_per_grid_ts: Sequence[float] | None = None,
    ) -> SegmentTable:
        """Build the segments of rows from their tokens, for rows that were padded, joined or cut after the call.

        Args:
            input_ids: (batch, seq), or (tokens,) for one row.
            image_grid_thw: (images, 3) before merging.
            attention_mask: (batch, seq) of 0 and 1; None if no row is padded.
            video_grid_thw: (videos, 3) before merging.
            second_per_grid_ts: (videos,) seconds from one grid of frames to the next; None if the scheme does not use
                seconds.

        Raises:
            InvalidInputError: an image or video does not match its placeholders; the message contains both counts.
        """
        return SegmentTable.from_input_ids(
            input_ids,
            replace(self._marker_ids.placeholders, video=self.video_token_id),
            image_grid_thw,
            video_grid_thw,
            spatial_merge_size=self.images.spatial_merge_size,
            attention_mask=attention_mask,
            seconds_per_frame=None if second_per_grid_ts is None else [float(each) for each in second_per_grid_ts],
            frames_apart=self._videos is not None and self._videos.timestamp is not None,
        )

    def positions(
        self,
        input_ids: npt.ArrayLike,
        image_grid_thw: npt.ArrayLike | None = None,
        attention_mask: npt.ArrayLike | None = None,
        **videos: Any,
    ) -> PositionTable:
        """Compute the positions of rows from their tokens; arguments and errors are as for ``segments``."""
        return place(self.segments(input_ids, image_grid_thw, attention_mask, **videos), self.scheme, self.start)

    def to_dict(self) -> dict[str, object]:
        """Return the settings as JSON values, except for the tokenizer and chat template, which are saved separately.

        Raises:
            UnsupportedError: the scheme is not in mmpos.SCHEMES.
        """
        return {
            "processor_class": type(self).__name__,
            "images": to_json(self.images),
            "scheme": scheme_to_json(self.scheme),
            "markers": to_json(self.markers),
            "add_markers": self.add_markers,
            "start": self.start,
            "temporal_patch_size": self.temporal_patch_size,
            "return_positions": self.return_positions,
            "read_files": self.read_files,
            "video_processor": None if self._videos is None else self._videos.processor.to_dict(),
            "video_token": self.video_token_id,
            "timestamp": None if self._videos is None else self._videos.timestamp,
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.tokenizer).__name__}, {self.images}, {self.scheme}, {self.markers})"

    def _get_num_multimodal_tokens(
        self,
        image_sizes: Sequence[Sequence[int]] | None = None,
        video_sizes: Sequence[Sequence[int]] | None = None,
        **options: Any,
    ) -> MultiModalData:
        """Compute the token and patch counts of images and videos from their sizes, for engines that lack the pixels.

        Args:
            image_sizes: (height, width) of each image.
            video_sizes: (frames, height, width) of each video.
            options: options of a call.
        """
        text_arguments, image_options, video_options = self._sorted(flat_options(options))
        TextOptions.of(text_arguments, self.tokenizer)
        merge_area = self.images.spatial_merge_size**2
        counts: dict[str, list[int]] = {}
        if image_sizes is not None:
            image_patches = self.image_processor.get_number_of_image_patches
            patches = [image_patches(height, width, image_options) for height, width in image_sizes]
            counts = {"num_image_tokens": [count // merge_area for count in patches], "num_image_patches": patches}
        if video_sizes is not None:
            if self._videos is None:
                raise UnsupportedError("video_sizes requires a processor with video_processor and video_token")
            video_patches = self._videos.processor.get_num_of_video_patches
            try:
                counts["num_video_tokens"] = [
                    video_patches(frames, height, width, video_options) // merge_area
                    for frames, height, width in video_sizes
                ]
            except (KeyError, TypeError, ValueError) as error:
                raise InvalidInputError(f"video_sizes: video: {error}") from error
        return MultiModalData(**counts)

    def _sorted(self, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Sort the arguments of a call into options for text, images and videos."""
        options = sort_options(arguments, () if self._videos is None else self._videos.names())
        merge, want = options[2].get("merge_size"), self.image_processor.merge_size
        if merge not in (None, want):
            raise InvalidInputError(f"merge_size: got {merge!r:.80}, want {want}, the merge_size of images")
        return options

    def _encode_videos(
        self, videos: object, texts: int | None, options: Mapping[str, Any], batch: dict[str, Any]
    ) -> VideoTokens | None:
        """Add the pixels and grids of videos to a batch; return the video tokens, or None without a video processor."""
        settings = self._videos
        if settings is None:
            return None
        named, counts = flatten("videos", with_frames(videos), texts)
        processed = process_videos(named, settings, self.images, options, self.read_files)
        merge = self.images.spatial_merge_size
        grids = processed.grid_thw // (1, merge, merge)
        if settings.timestamp is not None:
            grids = (grids * (0, 1, 1) + (1, 0, 0)).repeat(grids[:, 0], axis=0)
        seconds = processed.seconds_per_grid if settings.seconds else None
        if named:
            batch |= {"pixel_values_videos": np.concatenate(processed.values), "video_grid_thw": processed.grid_thw}
            if seconds is not None:
                batch["second_per_grid_ts"] = seconds
            if options.get("return_metadata"):
                batch["video_metadata"] = processed.metadata
        markers = self._marker_ids if not self.add_markers else self._marker_ids._replace(begin=None, end=None)
        unexpanded = processed.unexpanded(settings, markers, self._adapted)
        return VideoTokens(settings.token_id, grids, counts, unexpanded, seconds)

    def _tokens(
        self,
        texts: list[str],
        grid_thw: IntArray,
        counts: IntArray | None,
        videos: VideoTokens | None,
        options: TextOptions,
    ) -> dict[str, Any]:
        """Compute all keys that depend only on the texts and the sizes of images and videos."""
        encoded = options.encode(self.tokenizer, texts)
        markers = self._marker_ids if self.add_markers else self._marker_ids._replace(begin=None, end=None)
        rows = expand(encoded["input_ids"], grid_thw, counts, markers, videos)
        limit = options.limit(self.tokenizer)
        if limit is not None:
            rows = rows.truncated(limit, self.tokenizer.truncation_side, added_tokens(encoded))
        values = {"input_ids": rows.input_ids, "attention_mask": np.ones(rows.input_ids.size, np.int64)}
        if options.return_mm_token_type_ids:
            # Only patches have either of these ids.
            types = (rows.input_ids == self.image_token_id).astype(np.int64)
            values["mm_token_type_ids"] = types + 2 * (rows.input_ids == self.video_token_id)
        if options.return_offsets_mapping:
            values["offset_mapping"] = np.concatenate(encoded["offset_mapping"])[rows.source]
        width = options.width(rows.lengths, self.tokenizer)
        batch = _per_token(values, rows.lengths, width, self.tokenizer, options)
        if self.return_positions if options.return_positions is None else options.return_positions:
            table = place(rows.segments(), self.scheme, self.start)
            batch |= _positions(table, rows, width, options.side(self.tokenizer), options.return_tensors)
            if table.resumable.all():
                batch["mm_next_positions"], batch["deltas"] = np.array(table.next_positions), np.array(table.deltas)
        return batch


def _token_id(token: str | int | None, tokenizer: Tokenizer) -> int:
    """Return the token id of the video placeholder."""
    token_id = tokenizer.token_to_id(token) if isinstance(token, str) else token
    if token_id is None:
        raise InvalidInputError(f"video_token: got {token!r}, want a token with a single id in the tokenizer")
    return integer("video_token", token_id, minimum=0, maximum=INT32_MAX)


def _texts(text: object, images: object, videos: object) -> list[str] | None:
    """Return the texts of a call; None if there are only images or videos."""
    if text is None:
        if images is None and videos is None:
            raise InvalidInputError("text: got None, want text, a chat, images or videos")
        return None
    texts = [text] if isinstance(text, str) else text
    if not isinstance(texts, list | tuple) or not texts:
        raise InvalidInputError(f"text: got {text!r:.80}, want text, a chat, a list of texts or a list of chats")
    for i, each in enumerate(texts):
        if not isinstance(each, str):
            raise InvalidInputError(f"text[{i}]: got {type(each).__name__}, want text")
    return list(texts)


class PositionBatch(BatchFeature):
    """BatchFeature whose position ids keep their dtype when the batch is cast to another dtype."""

    skip_tensor_conversion = _NOT_TENSORS  # set on the class, because pickling a batch loses the instance attribute

    def __init__(self, data: dict[str, object], tensor_type: str | None = None) -> None:
        super().__init__(data, tensor_type=tensor_type, skip_tensor_conversion=_NOT_TENSORS)

    def convert_to_tensors(
        self, tensor_type: str | TensorType | None = None, skip_tensor_conversion: list[str] | set[str] | None = None
    ) -> PositionBatch:
        """Convert lists of equally long rows to tensors, with the same shapes as a call with ``return_tensors``."""
        ids = self.data.get("mm_position_ids")
        if tensor_type is not None and isinstance(ids, list) and len({rows.shape for rows in ids}) == 1:
            self.data["mm_position_ids"] = np.stack(ids, axis=1)
        super().convert_to_tensors(tensor_type, skip_tensor_conversion)
        return self

    def to(self, *args: object, **kwargs: object) -> PositionBatch:
        """Move all tensors, and cast floating-point ones except fractional position ids, which would be rounded."""
        ids = self.data.get("mm_position_ids")
        super().to(*args, **kwargs)
        if ids is not None and hasattr(ids, "to"):
            self.data["mm_position_ids"] = ids.to(self.data["mm_position_ids"].device)
        return self


def _per_token(
    values: Mapping[str, npt.NDArray[np.integer]],
    lengths: IntArray,
    width: int | None,
    tokenizer: PreTrainedTokenizerBase,
    options: TextOptions,
) -> dict[str, Any]:
    """Convert values per token to padded arrays, or to lists with one array per row.

    Args:
        values: (tokens, …) concatenated values of all rows. Padding is 0, except in input_ids.
        lengths: (rows,) number of tokens in each row.
        width: number of tokens to which rows are padded; None if they are not padded.
        tokenizer: supplies the padding token and the default side.
        options: supplies the padding side and the type of the result.
    """
    batch: dict[str, Any]
    if width is None:
        split = lengths.cumsum()[:-1]
        batch = {name: np.split(each, split) for name, each in values.items()}
    else:
        pad_id = tokenizer.pad_token_id
        if pad_id is None and (lengths < width).any():
            raise InvalidInputError("tokenizer.pad_token: got None, want a padding token")
        side, fills = options.side(tokenizer), {"input_ids": pad_id or 0}
        batch = {name: _padded(each, lengths, width, side, fills.get(name, 0)) for name, each in values.items()}
    for name in batch:
        if options.return_tensors is None or name in _NOT_TENSORS:
            batch[name] = [row.tolist() for row in batch[name]]
    return batch


def _positions(
    table: PositionTable, rows: TextRows, width: int | None, side: Side, return_tensors: str | None
) -> dict[str, Any]:
    """Return the dense ids of all rows, padded like the rows, and their table."""
    dtype = None if table.fractional else np.int64
    if width is None:
        return {
            "mm_position_ids": np.split(table.dense(dtype=dtype), rows.lengths.cumsum()[:-1], axis=1),
            "positions": table,
        }
    ids, _ = table.padded(width, side, dtype)
    return {
        "mm_position_ids": ids if return_tensors else list(ids.swapaxes(0, 1)),
        "positions": table.pad(width, side),
    }


def _padded(
    values: npt.NDArray[np.integer], lengths: IntArray, width: int, side: str, fill: int = 0
) -> npt.NDArray[np.integer]:
    """Pad the concatenated values of all rows to (rows, width, …)."""
    out = np.full((lengths.size, width, *values.shape[1:]), fill, values.dtype)
    column = np.arange(width)
    real = column < lengths[:, None] if side == "right" else column >= width - lengths[:, None]
    out[real] = values
    return out


def video_processor_of(source: Any) -> VideoProcessor:
    """Return a Transformers video processor unchanged, or create one from its JSON fields.

    Raises:
        InvalidInputError: the source has another type, or does not name a Transformers video processor.
    """
    processor = source
    if isinstance(source, Mapping):
        name = str(source.get("video_processor_type"))
        kind = getattr(import_module("transformers"), name, None)
        processor = kind(**source) if name.endswith("VideoProcessor") and callable(kind) else None
    if not callable(processor) or not hasattr(processor, "valid_kwargs"):
        want = "a video processor of Transformers, or its fields including video_processor_type"
        raise InvalidInputError(f"video_processor: got {source!r:.80}, want {want}")
    return processor


def video_processor_in(folder: Path, videos_as_images: bool) -> VideoProcessor | None:
    """Load the video processor from a folder, or return None if the folder has no file for it."""
    config = folder / "processor_config.json"
    in_config = config.is_file() and "video_processor" in json.loads(config.read_bytes())
    names = ["video_preprocessor_config.json"] + ["preprocessor_config.json"] * videos_as_images
    if not in_config and not any((folder / name).is_file() for name in names):
        return None
    processor: VideoProcessor = import_module("transformers").AutoVideoProcessor.from_pretrained(folder)
    return processor


def scheme_of(source: str | Scheme | Mapping[str, Any]) -> Scheme:
    """Return a scheme unchanged, look it up by name, or create it from its name and parameters as JSON values."""
    if not isinstance(source, Mapping):
        return get_scheme(source)
    parameters = dict(source)
    name = parameters.pop("name", None)
    kind = type(get_scheme(name))
    for parameter in parameters.keys() & RATIONAL_PARAMETERS:
        number = parameters[parameter]
        try:
            parameters[parameter] = Fraction(number) if isinstance(number, str) else number
        except (ValueError, ZeroDivisionError):
            raise InvalidInputError(f"scheme.{parameter}: got {number!r}, want a fraction such as 3/2") from None
    return object_of("scheme", kind, parameters)


def scheme_to_json(scheme: Scheme) -> dict[str, object]:
    """Return the name of a scheme and its parameters as JSON values.

    Raises:
        UnsupportedError: the scheme is not in mmpos.SCHEMES, so a file cannot refer to it.
    """
    if SCHEMES.get(scheme.name) is not type(scheme):
        raise UnsupportedError(f"scheme: got {type(scheme).__name__}, want one of mmpos.SCHEMES to write it to a file")
    return {"name": scheme.name, **to_json(scheme)}


def object_of(name: str, kind: type[T], source: object) -> T:
    """Return an object of this class unchanged, or create one from its JSON fields.

    Raises:
        InvalidInputError: the source has another type, or contains a field that the class does not have.
    """
    if isinstance(source, kind):
        return source
    if not isinstance(source, Mapping):
        raise InvalidInputError(f"{name}: got {type(source).__name__}, want {kind.__name__} or its fields")
    known = [each.name for each in fields(kind) if each.init]  # type: ignore[arg-type]
    for field in source.keys() - set(known):
        raise InvalidInputError(f"{name}: got the field {field!r}, want {', '.join(known)}")
    return kind(**{field: tuple(value) if isinstance(value, list) else value for field, value in source.items()})


def to_json(settings: Any) -> dict[str, object]:
    """Convert a frozen object to JSON values: tuples to lists, fractions to "3/2", numpy scalars to Python scalars."""
    return {each.name: _plain(getattr(settings, each.name)) for each in fields(settings) if each.init}


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, np.generic):
        return value.item()
    return str(value) if isinstance(value, Fraction) else value
