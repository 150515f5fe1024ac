"""MMPosProcessor: text or chats with images to everything that a model of Transformers takes, positions included."""

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
from mmpos.integrations.hf.chat import images_beside, is_chat, read_conversations
from mmpos.integrations.hf.texts import (
    TextOptions,
    TextRows,
    VideoTokens,
    added_tokens,
    expand,
    flat_options,
    sort_options,
)
from mmpos.integrations.hf.vision import ImagesOfProcessor, VideoProcessor, VideoSettings, flat_videos, process_videos
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

_NOT_TENSORS = ["positions", "offset_mapping", "video_metadata"]  # read token by token, which tensors are slow at


class MMPosProcessor(ProcessorMixin):
    """Processor of Transformers that gives positions with the tokens; saved and loaded as any other.

    Text holds one placeholder, the patch marker, for each image, and another for each video; the tokens of the image or
    the video come in its place. Chats hold their images themselves, and need a chat template that writes placeholders.

    Args:
        tokenizer: of Transformers.
        images: an ImageProcessor, or its fields as JSON has them; None is the default one.
        scheme: a name from mmpos.SCHEMES, a scheme object, or its name and parameters as JSON has them.
        markers: the special tokens of images, or their fields as JSON has them; None is Markers().
        add_markers: whether begin and end are put around the patches; False where the text has them already.
        start: id of the first token of every row.
        temporal_patch_size: None for ``patches``, bytes to be normalised where the model runs; frames in a patch for
            ``pixel_values``, as the vision encoders of Transformers take them.
        chat_template: in Jinja; None is the tokenizer's.
        return_positions: whether calls return positions beside the keys of Transformers, unless they say otherwise;
            with False ``model.generate(**batch)`` takes the batch of a model that Transformers knows.
        read_files: whether text may name a file: False for chats of strangers.
        video_processor: of Transformers, or its fields as JSON has them; None takes no videos.
        video_token: placeholder of a video and of each of its patches, by name or id.
        timestamp: text before each grid of frames of a video, a format of ``seconds`` as Qwen3-VL has it; None for all
            frames in one grid.

    Raises:
        TypeError: a tokenizer that is not of Transformers.
        InvalidInputError: a marker that is not one token of the tokenizer, or a setting of the wrong type.
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
        self.images = ImageProcessor() if images is None else images  # type: ignore[assignment]  # or its fields
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
            got, want = ("video_token", "video_processor")[:: 1 if video_processor is None else -1]
            raise InvalidInputError(f"{want}: got None beside a {got}, want both or none")
        self._videos: VideoSettings | None = None
        if video_processor is not None:
            made, merge = video_processor_of(video_processor), self.images.spatial_merge_size
            if made.merge_size != merge:
                raise InvalidInputError(
                    f"video_processor.merge_size: got {made.merge_size}, want {merge}, as of images"
                )
            self._videos = VideoSettings(
                made,
                _token_id(video_token, self._adapted),
                timestamp,
                getattr(self.scheme, "tokens_per_second", None) is not None,
            )

    @classmethod
    def get_attributes(cls) -> list[str]:
        """Return the parts that have files of their own: the tokenizer; all else is in processor_config.json."""
        return ["tokenizer"]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | PathLike[str], *args: Any, **kwargs: Any) -> Self:
        """Read the processor of a folder that ``save_pretrained`` wrote, as Transformers does.

        Raises:
            InvalidInputError: no processor of this class was saved there.
        """
        try:
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        except InvalidInputError as error:
            if "markers" in cls.get_processor_dict(pretrained_model_name_or_path, **kwargs)[0]:
                raise
            want = f"one that it saved, or {cls.__name__}.from_hf_config(…) of the folder of a model"
            got = f"{str(pretrained_model_name_or_path)!r}, with no {cls.__name__} ({error})"
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
        """Make the processor of a model of Transformers, whose calls give the keys that the model takes.

        Its text is that of the model's own processor: the chat template writes the tokens around images. That of a
        folder is in its chat_template.jinja, chat_template.json or processor_config.json, or else the tokenizer's.

        Args:
            config: of the model, or the path of its config.json or folder; see ``mmpos.from_hf_config``.
            tokenizer: of the model; None reads that of the folder.
            images: None reads the folder's preprocessor_config.json.
            video_processor: None reads the folder's, if it has one that is known, and else takes no videos; of Qwen-VL
                models preprocessor_config.json is enough, as in Transformers.
            settings: other arguments of the processor, such as ``return_positions=True`` or ``chat_template``.

        Raises:
            InvalidInputError: a config of no known model, or one beside which something is missing.
            UnsupportedError: a model whose placeholders, patches or timestamps are not known.
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
                raise InvalidInputError("tokenizer: got None beside a config, want the tokenizer, or a folder with it")
            tokenizer = AutoTokenizer.from_pretrained(folder)
        known = MODEL_TYPES[model.model_type]
        timed = known.timestamps or not known.frames_apart  # what stands between frames is known
        if video_processor is None and folder is not None and timed and model.placeholders.video is not None:
            video_processor = video_processor_in(folder, known.videos_as_images)
        told: dict[str, Any] = {
            "images": images or model.image_processor(),
            "scheme": model.scheme,
            "markers": model.markers,
            "add_markers": False,
            "temporal_patch_size": frames,
            "return_positions": False,
            "chat_template": None if folder is None else cls.get_processor_dict(folder)[0].get("chat_template"),
        }
        if video_processor is not None:
            if model.placeholders.video is None or not timed:
                raise UnsupportedError(f"video_processor: got one for {model.model_type!r}, want None: images only")
            timestamp = QWEN3_VL if model.frames_apart else None
            told |= {"video_processor": video_processor, "timestamp": timestamp}
            told["video_token"] = model.placeholders.video
        return cls(tokenizer, **told | settings)

    @property
    def image_token_id(self) -> int:
        """Id of every patch of an image in input_ids."""
        return self._marker_ids.patch

    @property
    def image_token(self) -> str:
        """Placeholder of an image in text."""
        token: str = self.tokenizer.convert_ids_to_tokens(self.image_token_id)
        return token

    @property
    def image_processor(self) -> ImagesOfProcessor:
        """Its images by the names of Transformers, limits that may be assigned, and a call of its own."""
        return ImagesOfProcessor(self._images, self.temporal_patch_size, self.read_files, self._assigned)

    @property
    def images(self) -> ImageProcessor:
        """Reads images, with what was assigned to image_processor."""
        return self.image_processor.images

    @images.setter
    def images(self, images: ImageProcessor) -> None:
        self._images = object_of("images", ImageProcessor, images)
        self._assigned: dict[str, Any] = {}

    @property
    def video_processor(self) -> VideoProcessor | None:
        """Processor of videos; None where none are taken."""
        return None if self._videos is None else self._videos.processor

    @property
    def video_token_id(self) -> int | None:
        """Id of every patch of a video in input_ids; None where no videos are taken."""
        return None if self._videos is None else self._videos.token_id

    @property
    def video_token(self) -> str | None:
        """Placeholder of a video in text; likewise."""
        return None if self._videos is None else str(self.tokenizer.convert_ids_to_tokens(self._videos.token_id))

    @property
    def model_input_names(self) -> list[str]:
        """Keys of a call's result that a model takes."""
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
        """Make tokens, patches and positions of a batch.

        Args:
            images: any that ImageProcessor takes, or text, a path or a data: URL: one, a list for all texts, or a list
                for each text.
            text: one or several, each with one placeholder per image and per video; or a chat, or several.
            videos: files, arrays of (frames, height, width, 3), or lists of frames: one, a list, or a list for each
                text.
            audio: None; audio is refused.
            options: ``return_tensors``, ``padding``, ``max_length``, ``return_positions`` and the others of
                ``mmpos.integrations.hf.texts.TextOptions``; ``min_pixels``, ``max_pixels``, ``max_tokens``, ``size``,
                ``do_rescale``, ``rescale_factor``, ``do_normalize``, ``image_mean`` and ``image_std`` of images, also
                in ``images_kwargs``; and those of the video_processor, also in ``videos_kwargs``. What both have goes
                to both, and is refused where images cannot have it.

        Returns:
            A BatchFeature, all new: ``input_ids``, ``attention_mask`` and ``mm_token_type_ids`` (1 for patches of
            images, 2 of videos), (batch, seq); with images ``image_grid_thw`` (images, 3) before merging, and
            ``patches`` or ``pixel_values`` of all of them, where their pixels are known; with videos
            ``video_grid_thw``, ``pixel_values_videos`` and, where the scheme counts seconds, ``second_per_grid_ts``.
            With positions also ``mm_position_ids`` (axes, batch, seq) int64, or float64 for fractional schemes;
            ``positions``, the PositionTable that they are of; and ``mm_next_positions`` and ``deltas`` (batch,), where
            all rows have them.

        Raises:
            InvalidInputError: other images than placeholders, an image that cannot be read, rows that cannot be
                padded or cut as wanted.
            UnsupportedError: audio, videos without a video_processor, or a row that the scheme has no place for.
        """
        self._check_media(videos, audio)
        arguments = flat_options(options)
        of_text, of_images, of_videos = self._sorted(arguments)
        chosen = TextOptions.of(of_text, self.tokenizer)
        if is_chat(text):
            return self._of_chat(text, images, videos, arguments)
        if chosen.add_generation_prompt:
            raise InvalidInputError("add_generation_prompt: got True with text, want a chat, whose template writes it")
        texts = _texts(text, images, videos)
        count = None if texts is None else len(texts)
        pixels: dict[str, Any] = {}
        if images is None and videos is not None:
            of_images = {}
        grid_thw, counts = self.image_processor.process(images, count, of_images, pixels)
        video_tokens = self._process_videos_of(videos, count, of_videos, pixels)
        batch = {} if texts is None else self._tokens(texts, grid_thw, counts, video_tokens, chosen)
        return PositionBatch(batch | pixels, chosen.return_tensors)

    def _check_media(self, videos: object, audio: object) -> None:
        if audio is not None:
            raise UnsupportedError(f"audio: got {type(audio).__name__}, want None: a processor of images and videos")
        if videos is not None and self._videos is None:
            want = "None, or a processor with a video_processor and its video_token"
            raise UnsupportedError(f"videos: got {type(videos).__name__}, want {want}")

    def _of_chat(self, chat: object, images: object, videos: object, arguments: dict[str, Any]) -> Any:
        """Make the batch of a chat that was given as text."""
        if videos is not None:
            raise InvalidInputError("videos: got videos beside a chat, want them in its blocks of type 'video'")
        prompt = arguments.pop("add_generation_prompt", False)
        arguments = arguments if images is None else {**arguments, "images": images}
        return self.apply_chat_template(
            chat, tokenize=True, return_dict=True, add_generation_prompt=prompt, processor_kwargs=arguments
        )

    def apply_chat_template(  # type: ignore[override]  # all else by its name, so that none is missed below
        self, conversation: object, chat_template: str | None = None, **kwargs: Any
    ) -> Any:
        """Write a chat, or several, as text; with ``tokenize=True, return_dict=True`` as the batch of a call.

        As in Transformers, whose arguments it takes by name, but for four things: images and videos are given as
        objects, bytes, paths or base64 and never fetched; audio is refused; the tokenizer adds no special tokens, which
        templates write; and what users say stays text where it spells special tokens, placeholders included, unless
        ``sanitize_control_tokens=False``, or the mask of the assistant's tokens is wanted, for which Transformers has
        no way to do so.

        Raises:
            InvalidInputError: as for a call; the message names the block of content.
            UnsupportedError: audio, or a video without a video_processor.
        """
        if chat_template is None and self.chat_template is None:
            want = "one in the call, of the processor, of its tokenizer or in the folder that it is made of"
            raise InvalidInputError(f"chat_template: got None, want {want}")
        conversation = read_conversations(conversation, self.read_files, videos=self._videos is not None)
        if kwargs.get("tokenize"):
            call_options = {"add_special_tokens": False, **flat_options(kwargs.get("processor_kwargs") or {})}
            for arguments in (call_options, kwargs):
                if arguments.get("images") is not None:
                    arguments["images"] = images_beside(conversation, arguments["images"])
            if "return_tensors" in call_options:
                # The mask of the assistant's tokens is of this type, too.
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
        """Find the segments of rows that were padded, joined or cut after the call, from their tokens.

        Args:
            input_ids: (batch, seq), or (tokens,) of one row.
            image_grid_thw: (images, 3) before merging.
            attention_mask: (batch, seq) of 0 and 1; None where no row is padded.
            video_grid_thw: (videos, 3) likewise.
            second_per_grid_ts: (videos,) seconds from one grid of frames to the next; None where the scheme does not
                count them.

        Raises:
            InvalidInputError: the first image or video that does not fit its placeholders, with both counts.
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
        """Place such rows; the arguments and errors are those of ``segments``."""
        return place(self.segments(input_ids, image_grid_thw, attention_mask, **videos), self.scheme, self.start)

    def to_dict(self) -> dict[str, object]:
        """Return the settings as JSON has them, without tokenizer and chat template, which have files of their own.

        Raises:
            UnsupportedError: the scheme is the caller's own.
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
        """Count the tokens and patches of images and videos of these sizes, as engines ask before they have pixels.

        Args:
            image_sizes: (height, width) of each.
            video_sizes: (frames, height, width) of each.
            options: of a call.
        """
        of_text, of_images, of_videos = self._sorted(flat_options(options))
        TextOptions.of(of_text, self.tokenizer)
        merged = self.images.spatial_merge_size**2
        counts: dict[str, list[int]] = {}
        if image_sizes is not None:
            count = self.image_processor.get_number_of_image_patches
            patches = [count(height, width, of_images) for height, width in image_sizes]
            counts = {"num_image_tokens": [each // merged for each in patches], "num_image_patches": patches}
        if video_sizes is not None:
            if self._videos is None:
                raise UnsupportedError("video_sizes: got sizes, want None, or a processor with a video_processor")
            in_video = self._videos.processor.get_num_of_video_patches
            try:
                counts["num_video_tokens"] = [
                    in_video(frames, height, width, of_videos) // merged for frames, height, width in video_sizes
                ]
            except (KeyError, TypeError, ValueError) as error:
                raise InvalidInputError(f"video_sizes: video: {error}") from error
        return MultiModalData(**counts)

    def _sorted(self, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Sort the arguments of a call into those of text, of images and of videos."""
        by_kind = sort_options(arguments, () if self._videos is None else self._videos.names())
        merge, want = by_kind[2].get("merge_size"), self.image_processor.merge_size
        if merge not in (None, want):
            raise InvalidInputError(f"merge_size: got {merge!r:.80}, want {want}, by which tokens are counted")
        return by_kind

    def _process_videos_of(
        self, videos: object, texts: int | None, options: Mapping[str, Any], batch: dict[str, Any]
    ) -> VideoTokens | None:
        """Put the pixels of videos and their grids into a batch, and return their tokens; None of such a processor."""
        settings = self._videos
        if settings is None:
            return None
        named, counts = flat_videos(videos, texts)
        made = process_videos(named, settings, self.images, options, self.read_files)
        merge = self.images.spatial_merge_size
        grids = made.grid_thw // (1, merge, merge)
        if settings.timestamp is not None:
            grids = (grids * (0, 1, 1) + (1, 0, 0)).repeat(grids[:, 0], axis=0)
        seconds = made.seconds_per_grid if settings.seconds else None
        if named:
            batch |= {"pixel_values_videos": np.concatenate(made.values), "video_grid_thw": made.grid_thw}
            if seconds is not None:
                batch["second_per_grid_ts"] = seconds
            if options.get("return_metadata"):
                batch["video_metadata"] = made.metadata
        around = self._marker_ids if not self.add_markers else self._marker_ids._replace(begin=None, end=None)
        return VideoTokens(settings.token_id, grids, counts, made.written(settings, around, self._adapted), seconds)

    def _tokens(
        self,
        texts: list[str],
        grid_thw: IntArray,
        counts: IntArray | None,
        videos: VideoTokens | None,
        options: TextOptions,
    ) -> dict[str, Any]:
        """Make everything that follows from the texts and from the sizes of the images and videos."""
        encoded = options.encode(self.tokenizer, texts)
        markers = self._marker_ids if self.add_markers else self._marker_ids._replace(begin=None, end=None)
        rows = expand(encoded["input_ids"], grid_thw, counts, markers, videos)
        limit = options.limit(self.tokenizer)
        if limit is not None:
            rows = rows.cut(limit, self.tokenizer.truncation_side, added_tokens(encoded))
        values = {"input_ids": rows.input_ids, "attention_mask": np.ones(rows.input_ids.size, np.int64)}
        if options.return_mm_token_type_ids:
            # No other token has the ids of patches.
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
    """Look up the id of the placeholder of videos."""
    token_id = tokenizer.token_to_id(token) if isinstance(token, str) else token
    if token_id is None:
        raise InvalidInputError(f"video_token: got {token!r}, want a token that is one id of the tokenizer")
    return integer("video_token", token_id, minimum=0, maximum=INT32_MAX)


def _texts(text: object, images: object, videos: object) -> list[str] | None:
    """Return the texts of a call; None where only images or videos are given."""
    if text is None:
        if images is None and videos is None:
            raise InvalidInputError("text: got None, want text, a chat or images")
        return None
    texts = [text] if isinstance(text, str) else text
    if not isinstance(texts, list | tuple) or not texts:
        raise InvalidInputError(f"text: got {text!r:.80}, want a text, a chat, or a list of one kind")
    for i, each in enumerate(texts):
        if not isinstance(each, str):
            raise InvalidInputError(f"text[{i}]: got {type(each).__name__}, want a text")
    return list(texts)


class PositionBatch(BatchFeature):
    """BatchFeature whose position ids keep their numbers when the batch is cast to another dtype."""

    skip_tensor_conversion = _NOT_TENSORS  # of the class, since Transformers forgets that of a pickled batch

    def __init__(self, data: dict[str, object], tensor_type: str | None = None) -> None:
        super().__init__(data, tensor_type=tensor_type, skip_tensor_conversion=_NOT_TENSORS)

    def convert_to_tensors(
        self, tensor_type: str | TensorType | None = None, skip_tensor_conversion: list[str] | set[str] | None = None
    ) -> PositionBatch:
        """Convert lists of rows of one length to tensors, in the shapes that a call with ``return_tensors`` gives."""
        ids = self.data.get("mm_position_ids")
        if tensor_type is not None and isinstance(ids, list) and len({rows.shape for rows in ids}) == 1:
            self.data["mm_position_ids"] = np.stack(ids, axis=1)
        super().convert_to_tensors(tensor_type, skip_tensor_conversion)
        return self

    def to(self, *args: object, **kwargs: object) -> PositionBatch:
        """Move all tensors and cast floating ones, except fractional position ids, which bfloat16 would round."""
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
    """Collect everything with an entry per token: padded arrays, or a list with one array for each row.

    Args:
        values: (tokens, …) of all rows, one after the other; what is padded is 0, but for input_ids.
        lengths: (rows,) of the rows.
        width: tokens of each row; None where they are not padded.
        tokenizer: its padding side and token are the defaults.
        options: padding and type of the result.
    """
    batch: dict[str, Any]
    if width is None:
        split = lengths.cumsum()[:-1]
        batch = {name: np.split(each, split) for name, each in values.items()}
    else:
        fill = tokenizer.pad_token_id
        if fill is None and (lengths < width).any():
            raise InvalidInputError("tokenizer.pad_token: got None, want a token to pad with")
        side, fills = options.side(tokenizer), {"input_ids": fill or 0}
        batch = {name: _padded(each, lengths, width, side, fills.get(name, 0)) for name, each in values.items()}
    for name in batch:
        if options.return_tensors is None or name in _NOT_TENSORS:
            batch[name] = [row.tolist() for row in batch[name]]
    return batch


def _positions(
    table: PositionTable, rows: TextRows, width: int | None, side: Side, return_tensors: str | None
) -> dict[str, Any]:
    """Return the dense ids of all rows, padded as the rows are, and their table."""
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
    """Pad the values of all rows, one after the other, to (rows, width, …)."""
    out = np.full((lengths.size, width, *values.shape[1:]), fill, values.dtype)
    column = np.arange(width)
    real = column < lengths[:, None] if side == "right" else column >= width - lengths[:, None]
    out[real] = values
    return out


def video_processor_of(source: Any) -> VideoProcessor:
    """Return a video processor of Transformers as it is, or make it of its fields in JSON.

    Raises:
        InvalidInputError: something else, or fields that do not name a video processor of Transformers.
    """
    made = source
    if isinstance(source, Mapping):
        kind = source.get("video_processor_type")
        make = getattr(import_module("transformers"), str(kind), None)
        made = make(**source) if str(kind).endswith("VideoProcessor") and callable(make) else None
    if not callable(made) or not hasattr(made, "valid_kwargs"):
        want = "a video processor of Transformers, or its fields, video_processor_type among them"
        raise InvalidInputError(f"video_processor: got {source!r:.80}, want {want}")
    return made


def video_processor_in(folder: Path, as_images: bool) -> VideoProcessor | None:
    """Read the video processor of a folder, which may be that of its images; None where it has none."""
    whole = folder / "processor_config.json"
    inside = whole.is_file() and "video_processor" in json.loads(whole.read_bytes())
    names = ["video_preprocessor_config.json"] + ["preprocessor_config.json"] * as_images
    if not inside and not any((folder / name).is_file() for name in names):
        return None
    made: VideoProcessor = import_module("transformers").AutoVideoProcessor.from_pretrained(folder)
    return made


def scheme_of(source: str | Scheme | Mapping[str, Any]) -> Scheme:
    """Return a scheme as it is, by its name, or made of its name and parameters in JSON."""
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
    """Return the name of a scheme and its parameters.

    Raises:
        UnsupportedError: a scheme of the caller's own, which no file can name.
    """
    if SCHEMES.get(scheme.name) is not type(scheme):
        raise UnsupportedError(f"scheme: got {type(scheme).__name__}, want one of mmpos.SCHEMES to write it to a file")
    return {"name": scheme.name, **to_json(scheme)}


def object_of(name: str, kind: type[T], source: object) -> T:
    """Return an object of this kind as it is, or make one of its fields in JSON.

    Raises:
        InvalidInputError: something else, or a field that the kind does not have.
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
    """Convert a frozen object to JSON: tuples become lists, fractions "3/2", and numpy's numbers Python's."""
    return {each.name: _plain(getattr(settings, each.name)) for each in fields(settings) if each.init}


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, np.generic):
        return value.item()
    return str(value) if isinstance(value, Fraction) else value
