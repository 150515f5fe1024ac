"""MMPosProcessor: text or chats with images to everything that a model of Transformers takes, positions included."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from transformers import BatchFeature, PreTrainedTokenizerBase, ProcessorMixin, TensorType

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.images import ImageProcessor
from mmpos.integrations.hf.chat import flat, images_beside, is_chat, patches_of, process, read_conversations
from mmpos.integrations.hf.rows import Options, Rows, added_tokens, expand, flat_options
from mmpos.positions.place import place
from mmpos.positions.table import PositionTable, Side
from mmpos.schemes import SCHEMES, Scheme, get_scheme
from mmpos.segments.table import SegmentTable
from mmpos.sequence.tokenizers import Markers, adapt
from mmpos.support.checks import INT32_MAX, INT32_MIN, IntArray, boolean, integer

__all__ = ["MMPosProcessor", "scheme_of", "scheme_to_json"]

T = TypeVar("T")

_NOT_TENSORS = ["positions", "offset_mapping"]  # read token by token, which tensors are slow at


class MMPosProcessor(ProcessorMixin):
    """Processor of Transformers that gives positions with the tokens; saved and loaded as any other.

    Text holds one placeholder, the patch marker, for each image; the tokens of the image come in its place. Chats
    hold their images themselves, and need a chat template that writes the placeholder.

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
    ) -> None:
        template = getattr(tokenizer, "chat_template", None) if chat_template is None else chat_template
        super().__init__(tokenizer, chat_template=template)  # type: ignore[no-untyped-call]
        self.images = ImageProcessor() if images is None else object_of("images", ImageProcessor, images)
        self.scheme = scheme_of(scheme)
        self.markers = Markers() if markers is None else object_of("markers", Markers, markers)
        self.add_markers = boolean("add_markers", add_markers)
        self.start = integer("start", start, minimum=INT32_MIN, maximum=INT32_MAX)
        if temporal_patch_size is not None:
            temporal_patch_size = integer("temporal_patch_size", temporal_patch_size, minimum=1)
        self.temporal_patch_size = temporal_patch_size
        self._marker_ids = self.markers.ids(adapt(tokenizer))

    @property
    def image_token_id(self) -> int:
        """Id of every patch in input_ids."""
        return self._marker_ids.patch

    @property
    def image_token(self) -> str:
        """Placeholder of an image in text."""
        token: str = self.tokenizer.convert_ids_to_tokens(self.image_token_id)
        return token

    @property
    def model_input_names(self) -> list[str]:
        """Keys of a call's result that a model takes."""
        pixels = "patches" if self.temporal_patch_size is None else "pixel_values"
        return ["input_ids", "attention_mask", "mm_token_type_ids", "mm_position_ids", pixels, "image_grid_thw"]

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
            images: any that ImageProcessor takes, or data: URLs: one, a list for all texts, or a list for each text.
            text: one or several, each with one placeholder per image; or a chat, or several.
            videos: None; a video is refused.
            audio: None, likewise.
            options: ``return_tensors``, ``padding``, ``max_length`` and the others of
                ``mmpos.integrations.hf.rows.Options``.

        Returns:
            A BatchFeature, all new: ``input_ids``, ``attention_mask`` and ``mm_token_type_ids`` (1 for patches),
            (batch, seq); ``mm_position_ids`` (axes, batch, seq) int64, or float64 for fractional schemes;
            ``positions``, the PositionTable that they are of; ``mm_next_positions`` and ``deltas`` (batch,), where
            the scheme has them; and with images ``image_grid_thw`` (images, 3) before merging, and ``patches`` or
            ``pixel_values`` of all of them, where their pixels are known.

        Raises:
            InvalidInputError: other images than placeholders, an image that cannot be read, rows that cannot be
                padded or cut as wanted.
            UnsupportedError: videos or audio, or a row that the scheme has no place for.
        """
        for name, value in (("videos", videos), ("audio", audio)):
            if value is not None:
                raise UnsupportedError(f"{name}: got {type(value).__name__}, want None: a processor of images and text")
        arguments = flat_options(options)
        chosen = Options.of(arguments, self.tokenizer)
        if is_chat(text):
            generate = arguments.pop("add_generation_prompt", False)
            arguments = arguments if images is None else {**arguments, "images": images}
            return self.apply_chat_template(
                text, tokenize=True, return_dict=True, add_generation_prompt=generate, processor_kwargs=arguments
            )
        if chosen.add_generation_prompt:
            raise InvalidInputError("add_generation_prompt: got True with text, want a chat, whose template writes it")
        texts = _texts(text, images)
        named, counts = flat(images, None if texts is None else len(texts))
        processed = process(named, self.images, self.temporal_patch_size)
        grid_thw = np.array([image.grid.extents for image in processed], np.int64).reshape(-1, 3)
        batch = {} if texts is None else self._tokens(texts, grid_thw, counts, chosen)
        if processed:
            merge = self.images.spatial_merge_size
            batch["image_grid_thw"] = grid_thw * (1, merge, merge)
            pixels = patches_of(processed)
            if pixels is not None:
                batch["patches" if self.temporal_patch_size is None else "pixel_values"] = pixels
        return PositionBatch(batch, chosen.return_tensors)

    def apply_chat_template(  # type: ignore[override]  # all else by its name, so that none is missed below
        self, conversation: object, chat_template: str | None = None, **kwargs: Any
    ) -> Any:
        """Write a chat, or several, as text; with ``tokenize=True, return_dict=True`` as the batch of a call.

        As in Transformers, whose arguments it takes by name, but for four things: images are given as objects, bytes,
        paths or base64 and never fetched; videos and audio are refused; the tokenizer adds no special tokens, which
        templates write; and what users say stays text where it spells special tokens, placeholders included, unless
        ``sanitize_control_tokens=False``, or the mask of the assistant's tokens is wanted, for which Transformers has
        no way to do so.

        Raises:
            InvalidInputError: as for a call; the message names the block of content.
            UnsupportedError: a video or audio.
        """
        conversation = read_conversations(conversation)
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
    ) -> SegmentTable:
        """Find the segments of rows that were padded, joined or cut after the call, from their tokens.

        Args:
            input_ids: (batch, seq), or (tokens,) of one row.
            image_grid_thw: (images, 3) before merging.
            attention_mask: (batch, seq) of 0 and 1; None where no row is padded.

        Raises:
            InvalidInputError: the first image that does not fit its placeholders, with both counts.
        """
        return SegmentTable.from_input_ids(
            input_ids,
            image_grid_thw,
            image_token_id=self.image_token_id,
            spatial_merge_size=self.images.spatial_merge_size,
            attention_mask=attention_mask,
            row_token_id=self._marker_ids.row,
            last_row_token_id=self._marker_ids.last_row,
        )

    def positions(
        self,
        input_ids: npt.ArrayLike,
        image_grid_thw: npt.ArrayLike | None = None,
        attention_mask: npt.ArrayLike | None = None,
    ) -> PositionTable:
        """Place such rows; the arguments and errors are those of ``segments``."""
        return place(self.segments(input_ids, image_grid_thw, attention_mask), self.scheme, self.start)

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
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.tokenizer).__name__}, {self.images}, {self.scheme}, {self.markers})"

    def _tokens(
        self, texts: list[str], grid_thw: IntArray, counts: IntArray | None, options: Options
    ) -> dict[str, object]:
        """Make everything that follows from the texts and from the sizes of the images."""
        encoded = options.encode(self.tokenizer, texts)
        markers = self._marker_ids if self.add_markers else self._marker_ids._replace(begin=None, end=None)
        rows = expand(encoded["input_ids"], grid_thw, counts, markers)
        limit = options.limit(self.tokenizer)
        if limit is not None:
            rows = rows.cut(limit, self.tokenizer.truncation_side, added_tokens(encoded))
        table = place(rows.segments(), self.scheme, self.start)
        values = {"input_ids": rows.input_ids}
        if options.return_mm_token_type_ids:
            # No other token has the id of patches.
            values["mm_token_type_ids"] = (rows.input_ids == self.image_token_id).astype(np.int64)
        if options.return_offsets_mapping:
            values["offset_mapping"] = np.concatenate(encoded["offset_mapping"])[rows.source]
        batch = _per_token(values, rows, table, self.tokenizer, options)
        if self.scheme.resumable:
            batch["mm_next_positions"], batch["deltas"] = np.array(table.next_positions), np.array(table.deltas)
        return batch


def _texts(text: object, images: object) -> list[str] | None:
    """Return the texts of a call; None where only images are given."""
    if text is None:
        if images is None:
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
    rows: Rows,
    positions: PositionTable,
    tokenizer: PreTrainedTokenizerBase,
    options: Options,
) -> dict[str, object]:
    """Collect everything with an entry per token, and its table: padded arrays, or a list with one array for each row.

    Args:
        values: (tokens, …) of all rows, one after the other; what is padded is 0, but for input_ids.
        rows: their lengths.
        positions: of all rows, without padding.
        tokenizer: its padding side and token are the defaults.
        options: padding and type of the result.
    """
    width = options.width(rows.lengths, tokenizer)
    dtype = None if positions.fractional else np.int64
    if width is None:
        split = rows.lengths.cumsum()[:-1]
        batch: dict[str, Any] = {name: np.split(each, split) for name, each in values.items()}
        batch["attention_mask"] = np.split(np.ones(rows.input_ids.size, np.int64), split)
        batch["mm_position_ids"] = np.split(positions.dense(dtype=dtype), split, axis=1)
    else:
        side: Side = options.side(tokenizer)
        fill = tokenizer.pad_token_id
        if fill is None and (rows.lengths < width).any():
            raise InvalidInputError("tokenizer.pad_token: got None, want a token to pad with")
        fills = {"input_ids": fill or 0}
        batch = {name: _padded(each, rows.lengths, width, side, fills.get(name, 0)) for name, each in values.items()}
        ids, batch["attention_mask"] = positions.padded(width, side, dtype)
        batch["mm_position_ids"] = ids if options.return_tensors else list(ids.swapaxes(0, 1))
        positions = positions.pad(width, side)
    for name in batch.keys() - {"mm_position_ids"}:
        if options.return_tensors is None or name in _NOT_TENSORS:
            batch[name] = [row.tolist() for row in batch[name]]
    return {**batch, "positions": positions}


def _padded(
    values: npt.NDArray[np.integer], lengths: IntArray, width: int, side: str, fill: int = 0
) -> npt.NDArray[np.integer]:
    """Pad the values of all rows, one after the other, to (rows, width, …)."""
    out = np.full((lengths.size, width, *values.shape[1:]), fill, values.dtype)
    column = np.arange(width)
    real = column < lengths[:, None] if side == "right" else column >= width - lengths[:, None]
    out[real] = values
    return out


def scheme_of(source: str | Scheme | Mapping[str, Any]) -> Scheme:
    """Return a scheme as it is, by its name, or made of its name and parameters in JSON."""
    if not isinstance(source, Mapping):
        return get_scheme(source)
    parameters = dict(source)
    name = parameters.pop("name", None)
    kind = type(get_scheme(name))
    rate = parameters.get("tokens_per_second")
    if isinstance(rate, str):
        try:
            parameters["tokens_per_second"] = Fraction(rate)
        except (ValueError, ZeroDivisionError):
            raise InvalidInputError(f"scheme.tokens_per_second: got {rate!r}, want a fraction such as 3/2") from None
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
