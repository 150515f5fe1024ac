"""MMPosProcessor: convert text and images to the inputs of a Transformers model, with positions under any scheme."""

from __future__ import annotations

import inspect
import os.path
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname

import numpy as np
import numpy.typing as npt
import transformers
from transformers import BatchFeature, PreTrainedTokenizerBase, ProcessorMixin

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.images import ImageProcessor
from mmpos.images.decode import read_data_url
from mmpos.positions.place import place
from mmpos.positions.table import PositionTable, Side
from mmpos.schemes import RATIONAL_PARAMETERS, SCHEMES, Scheme, get_scheme
from mmpos.segments.kinds import Grid
from mmpos.segments.table import SegmentTable
from mmpos.sequence.builder import Markers, join_patches
from mmpos.sequence.tokenizers import adapt
from mmpos.support.checks import INT32_MAX, INT32_MIN, IntArray, boolean, counted, integer, naming, one_of

__all__ = ["MMPosProcessor"]

T = TypeVar("T")

_SANITIZES = "sanitize_control_tokens" in inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters


class MMPosProcessor(ProcessorMixin):
    """Transformers processor that returns positions with the tokens. It is saved and loaded like any other processor.

    In text, the patch marker is the placeholder for an image; it is replaced with the tokens of the image. A chat
    template writes one placeholder for each image of a chat.

    Args:
        tokenizer: tokenizer from Transformers.
        images: an ImageProcessor, or its fields as JSON values; None uses ImageProcessor().
        scheme: a name from mmpos.SCHEMES, a scheme object, or its name and parameters as JSON values.
        markers: the special tokens of images, or the fields of Markers as JSON values; None uses Markers(). If texts
            already contain the tokens around images, set begin and end to None.
        start: id of the first token in every row.
        temporal_patch_size: None returns ``patches``, uint8 for the model to normalise; a number of frames per patch
            returns ``pixel_values``, as the vision encoders in Transformers expect.
        chat_template: Jinja template; None uses the tokenizer's template.
        read_files: whether a string may be a file path; use False for chats from untrusted users.

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
        start: int = 0,
        temporal_patch_size: int | None = None,
        chat_template: str | dict[str, str] | None = None,
        read_files: bool = True,
    ) -> None:
        template = getattr(tokenizer, "chat_template", None) if chat_template is None else chat_template
        super().__init__(tokenizer, chat_template=template)  # type: ignore[no-untyped-call]
        self.images = ImageProcessor() if images is None else _object_of("images", ImageProcessor, images)
        self.scheme = _scheme_of(scheme)
        self.markers = Markers() if markers is None else _object_of("markers", Markers, markers)
        self.start = integer("start", start, minimum=INT32_MIN, maximum=INT32_MAX)
        if temporal_patch_size is not None:
            temporal_patch_size = integer("temporal_patch_size", temporal_patch_size, minimum=1)
        self.temporal_patch_size = temporal_patch_size
        self.read_files = boolean("read_files", read_files)
        self._marker_ids = self.markers.ids(adapt(tokenizer))

    @classmethod
    def get_attributes(cls) -> list[str]:
        """Return the names of the parts saved in separate files: only the tokenizer."""
        return ["tokenizer"]

    @property
    def image_token_id(self) -> int:
        """Token id of each image patch in input_ids."""
        return self._marker_ids.patch

    @property
    def image_token(self) -> str:
        """Placeholder of an image in text."""
        return str(self.tokenizer.convert_ids_to_tokens(self.image_token_id))

    def __call__(
        self,
        images: object = None,
        text: str | Sequence[str] | None = None,
        videos: None = None,
        audio: None = None,
        *,
        return_tensors: str | None = None,
        padding: bool | str = False,
        padding_side: Side | None = None,
        max_length: int | None = None,
        add_special_tokens: bool = True,
        sanitize_control_tokens: bool = False,
    ) -> PositionBatch:
        """Compute the tokens, patches and positions of a batch.

        Args:
            images: one image, a list of images for all texts, or a list that contains a list of images for each text.
                Each image is in a form that ImageProcessor accepts, or it is a string with a path or a data: URL.
            text: one or more texts, each with one placeholder per image.
            videos: must be None.
            audio: must be None.
            return_tensors: "pt" or "np"; None returns rows as lists, but patches and grids as arrays.
            padding: with return_tensors, True or "longest", "max_length", or False for rows of equal length.
            padding_side: "left" or "right"; None uses the tokenizer's side.
            max_length: number of tokens to which rows are padded with ``padding="max_length"``.
            add_special_tokens: whether the tokenizer adds special tokens around each text.
            sanitize_control_tokens: passed to the tokenizer; ``apply_chat_template`` sets it when it has marked the
                text of users, so that special tokens in it remain text.

        Returns:
            A BatchFeature of new arrays: (batch, seq) ``input_ids``, ``attention_mask`` and ``mm_token_type_ids`` (1
            for image patches); (axes, batch, seq) ``mm_position_ids``, int64, or float64 for fractional schemes;
            ``positions``, their PositionTable; and (batch,) ``mm_next_positions`` and ``deltas`` if all rows have them.
            With images, also (images, 3) ``image_grid_thw`` before merging and, if the pixels are known, ``patches`` or
            ``pixel_values``.

        Raises:
            InvalidInputError: the numbers of images and placeholders differ, an image cannot be read, or rows cannot be
                padded as requested.
            UnsupportedError: videos or audio were passed, the scheme cannot place a row, or Transformers does not
                sanitize chats (before 5.23).
        """
        for name, value in (("videos", videos), ("audio", audio)):
            if value is not None:
                raise UnsupportedError(f"{name}: got {type(value).__name__}, want None; only images are supported")
        one_of("return_tensors", return_tensors, (None, "pt", "np"))
        one_of("padding_side", padding_side, (None, "left", "right"))
        texts = _texts(text)
        grids, counts, pixels = self._process(images, len(texts))
        rows = self._expand(self._encode(texts, add_special_tokens, sanitize_control_tokens), grids, counts)
        table = place(self._packed(rows, pixels.get("image_grid_thw")), self.scheme, self.start)
        if return_tensors is None:
            batch = self._unpadded(rows, table, padding)
        else:
            batch = self._padded(rows, table, _width(rows, padding, max_length), padding_side)
        if table.resumable.all():
            batch["mm_next_positions"], batch["deltas"] = np.array(table.next_positions), np.array(table.deltas)
        return PositionBatch(batch | pixels, return_tensors)

    def segments(
        self,
        input_ids: npt.ArrayLike,
        image_grid_thw: npt.ArrayLike | None = None,
        attention_mask: npt.ArrayLike | None = None,
    ) -> SegmentTable:
        """Build the segments of rows from their tokens, for rows that were padded, joined or cut after the call.

        Args:
            input_ids: (batch, seq), or (tokens,) for one row.
            image_grid_thw: (images, 3) before merging.
            attention_mask: (batch, seq) of 0 and 1; None if no row is padded.

        Raises:
            InvalidInputError: an image does not match its placeholders; the message contains both counts.
        """
        return SegmentTable.from_input_ids(
            input_ids,
            self._marker_ids.placeholders,
            image_grid_thw,
            spatial_merge_size=self.images.spatial_merge_size,
            attention_mask=attention_mask,
        )

    def positions(
        self,
        input_ids: npt.ArrayLike,
        image_grid_thw: npt.ArrayLike | None = None,
        attention_mask: npt.ArrayLike | None = None,
    ) -> PositionTable:
        """Compute the positions of rows from their tokens; arguments and errors are as for ``segments``."""
        return place(self.segments(input_ids, image_grid_thw, attention_mask), self.scheme, self.start)

    def to_dict(self) -> dict[str, object]:
        """Return the settings as JSON values, except for the tokenizer and chat template, which are saved separately.

        Raises:
            UnsupportedError: the scheme is not in mmpos.SCHEMES.
        """
        scheme = self.scheme
        if SCHEMES.get(scheme.name) is not type(scheme):
            want = "one of mmpos.SCHEMES to write it to a file"
            raise UnsupportedError(f"scheme: got {type(scheme).__name__}, want {want}")
        return {
            "processor_class": type(self).__name__,
            "images": _json(self.images),
            "scheme": {"name": scheme.name, **_json(scheme)},
            "markers": _json(self.markers),
            "start": self.start,
            "temporal_patch_size": self.temporal_patch_size,
            "read_files": self.read_files,
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.tokenizer).__name__}, {self.images}, {self.scheme}, {self.markers})"

    def _process(self, images: object, texts: int) -> tuple[list[Grid], list[int] | None, dict[str, Any]]:
        """Return the grids of all images, the number of images per text if they are nested, and the keys of images."""
        named, counts = _flatten(images, texts)
        processed = []
        for name, image in named:
            source = _read(name, image, self.read_files) if isinstance(image, str) else image
            with naming(name):
                processed.append(self.images.process(source, temporal_patch_size=self.temporal_patch_size))
        grids = [replace(image.grid, row_separator=self._marker_ids.row is not None) for image in processed]
        batch: dict[str, Any] = {}
        if grids:
            merge = self.images.spatial_merge_size
            batch["image_grid_thw"] = np.array([grid.extents for grid in grids], np.int64) * (1, merge, merge)
        patches = join_patches("images", processed)
        if patches is not None:
            batch["patches" if self.temporal_patch_size is None else "pixel_values"] = patches
        return grids, counts, batch

    def _encode(self, texts: list[str], special: bool, sanitize: bool) -> list[IntArray]:
        if sanitize and not _SANITIZES:
            got = f"True, which Transformers {transformers.__version__} ignores"
            raise UnsupportedError(f"sanitize_control_tokens: got {got}, want False, or Transformers >= 5.23")
        options = {"add_special_tokens": special, **({"sanitize_control_tokens": True} if sanitize else {})}
        encoded = self.tokenizer(texts, padding=False, truncation=False, **options)
        return [np.array(ids, np.int64) for ids in encoded["input_ids"]]

    def _expand(self, rows: list[IntArray], grids: list[Grid], counts: list[int] | None) -> list[IntArray]:
        """Replace each placeholder in the token ids of each row with the tokens of its image."""
        placeholders = [(row == self.image_token_id).nonzero()[0] for row in rows]
        if counts is None and sum(at.size for at in placeholders) != len(grids):
            want = f"{sum(at.size for at in placeholders)}, the placeholders of text"
            raise InvalidInputError(f"images: got {counted(len(grids), 'image')}, want {want}")
        for i, (row, at) in enumerate(zip(rows, placeholders, strict=True)):
            if not row.size:
                raise InvalidInputError(f"text[{i}]: got no tokens, want at least one")
            if counts is not None and counts[i] != at.size:
                want = f"{at.size}, the placeholders of text[{i}]"
                raise InvalidInputError(f"images[{i}]: got {counted(counts[i], 'image')}, want {want}")
        remaining = iter(grids)
        return [self._expanded(row, at, remaining) for row, at in zip(rows, placeholders, strict=True)]

    def _expanded(self, row: IntArray, placeholders: IntArray, grids: Iterator[Grid]) -> IntArray:
        first, *others = np.split(row, placeholders)
        pieces = [first]
        for piece, grid in zip(others, grids, strict=False):  # every piece begins with a placeholder
            pieces += [self._marker_ids.ids_of(grid), piece[1:]]
        return np.concatenate(pieces)

    def _packed(self, rows: list[IntArray], image_grid_thw: IntArray | None) -> SegmentTable:
        """Build the segments of rows without padding."""
        return SegmentTable.from_input_ids(
            np.concatenate(rows),
            self._marker_ids.placeholders,
            image_grid_thw,
            spatial_merge_size=self.images.spatial_merge_size,
            cu_seqlens=np.cumsum([0, *(row.size for row in rows)]),
        )

    def _unpadded(self, rows: list[IntArray], table: PositionTable, padding: bool | str) -> dict[str, Any]:
        """Return lists with one entry per row."""
        if padding is not False:
            raise InvalidInputError(f"padding: got {padding!r} without return_tensors, want False")
        ids = table.dense(dtype=None if table.fractional else np.int64)
        return {
            "input_ids": [row.tolist() for row in rows],
            "attention_mask": [[1] * row.size for row in rows],
            "mm_token_type_ids": [(row == self.image_token_id).astype(np.int64).tolist() for row in rows],
            "mm_position_ids": np.split(ids, table.cu_seqlens[1:-1], axis=1),
            "positions": table,
        }

    def _padded(
        self, rows: list[IntArray], table: PositionTable, length: int | None, side: Side | None
    ) -> dict[str, Any]:
        """Return arrays in which every row has the same number of tokens."""
        side = side or self.tokenizer.padding_side
        ids, mask = table.padded(length, side, None if table.fractional else np.int64)
        pad_id, real = self.tokenizer.pad_token_id, mask == 1
        if pad_id is None and not real.all():
            raise InvalidInputError("tokenizer.pad_token: got None, want a padding token")
        input_ids = np.full(mask.shape, pad_id or 0)
        input_ids[real] = np.concatenate(rows)
        return {
            "input_ids": input_ids,
            "attention_mask": mask,
            "mm_token_type_ids": (real & (input_ids == self.image_token_id)).astype(np.int64),
            "mm_position_ids": ids,
            "positions": table.pad(length, side),
        }


class PositionBatch(BatchFeature):
    """BatchFeature whose position ids keep their dtype when the batch is cast to another dtype."""

    def __init__(self, data: dict[str, object], tensor_type: str | None = None) -> None:
        super().__init__(data, tensor_type=tensor_type, skip_tensor_conversion=["positions"])

    def to(self, *args: object, **kwargs: object) -> PositionBatch:
        """Move all tensors, and cast floating-point ones except fractional position ids, which would be rounded."""
        ids = self.data.get("mm_position_ids")
        super().to(*args, **kwargs)
        if ids is not None and hasattr(ids, "to"):
            self.data["mm_position_ids"] = ids.to(self.data["mm_position_ids"].device)
        return self


def _texts(text: object) -> list[str]:
    texts = [text] if isinstance(text, str) else text
    if isinstance(texts, list | tuple) and texts and all(isinstance(each, str) for each in texts):
        return list(texts)
    raise InvalidInputError(f"text: got {text!r:.80}, want text or a list of texts; apply_chat_template converts chats")


def _width(rows: list[IntArray], padding: bool | str, max_length: int | None) -> int | None:
    """Return the number of tokens to which rows are padded; None for those of the longest row."""
    one_of("padding", padding, (True, False, "longest", "max_length"))
    if (max_length is not None) != (padding == "max_length"):
        raise InvalidInputError(f"max_length: got {max_length} with padding={padding!r}, want both or neither")
    lengths = [row.size for row in rows]
    if padding is False and len(set(lengths)) > 1:
        raise InvalidInputError("padding: got False for rows of different lengths, want True")
    if max_length is not None and max(lengths) > max_length:
        got = f"text[{lengths.index(max(lengths))}]: got {max(lengths)} tokens"
        raise InvalidInputError(f"{got}, want <= max_length = {max_length}")
    return max_length


def _flatten(images: object, texts: int) -> tuple[list[tuple[str, Any]], list[int] | None]:
    """Return all images with their names, and the number of images per text if they are nested, else None."""
    if images is None:
        return [], None
    if not isinstance(images, list | tuple):
        return [("images", images)], None
    nested = [isinstance(each, list | tuple) for each in images]
    if not any(nested):
        return [(f"images[{i}]", image) for i, image in enumerate(images)], None
    if not all(nested):
        got = f"images[{nested.index(False)}]: got {type(images[nested.index(False)]).__name__}"
        raise InvalidInputError(f"{got}, want all images in lists, or none in lists")
    if len(images) != texts:
        raise InvalidInputError(f"images: got {len(images)} lists, want {texts}, one per text")
    named = [(f"images[{i}][{n}]", image) for i, each in enumerate(images) for n, image in enumerate(each)]
    return named, [len(each) for each in images]


def _read(name: str, text: str, read_files: bool) -> bytes | Path:
    """Decode a data: URL, or return the path of an image file; remote URLs are never fetched."""
    if text[:5].lower() == "data:":
        return read_data_url(name, text)
    got, other = f"{name}: got the text {text[:80]!r}", "bytes, a Pillow image, an array or a data: URL"
    scheme, slashes, _ = text.partition("://")
    if slashes and scheme.lower() != "file":
        raise InvalidInputError(f"{got}, want the path of a file, {other}; URLs are never fetched")
    if not read_files:
        raise InvalidInputError(f"{got}, want {other}; read_files=False forbids paths")
    path = url2pathname(urlsplit(text).path) if slashes else text
    if not os.path.isfile(path):
        raise InvalidInputError(f"{got}, want the path of an existing file, {other}")
    return Path(path)


def _scheme_of(source: str | Scheme | Mapping[str, Any]) -> Scheme:
    """Return a scheme unchanged, look it up by name, or create it from its name and parameters as JSON values."""
    if not isinstance(source, Mapping):
        return get_scheme(source)
    parameters = dict(source)
    kind = type(get_scheme(parameters.pop("name", None)))
    for name in parameters.keys() & RATIONAL_PARAMETERS:
        number = parameters[name]
        try:
            parameters[name] = Fraction(number) if isinstance(number, str) else number
        except (ValueError, ZeroDivisionError):
            raise InvalidInputError(f"scheme.{name}: got {number!r}, want a fraction such as 3/2") from None
    return _object_of("scheme", kind, parameters)


def _object_of(name: str, kind: type[T], source: object) -> T:
    """Return an object of this class unchanged, or create one from its JSON fields."""
    if isinstance(source, kind):
        return source
    if not isinstance(source, Mapping):
        raise InvalidInputError(f"{name}: got {type(source).__name__}, want {kind.__name__} or its fields")
    known = [each.name for each in fields(kind) if each.init]  # type: ignore[arg-type]
    for field in source.keys() - set(known):
        raise InvalidInputError(f"{name}: got the field {field!r}, want {', '.join(known)}")
    return kind(**{field: tuple(value) if isinstance(value, list) else value for field, value in source.items()})


def _json(settings: Any) -> dict[str, object]:
    """Convert the fields of a frozen object to JSON values: fractions to "3/2", numpy scalars to Python scalars."""
    values = {each.name: getattr(settings, each.name) for each in fields(settings) if each.init}
    values |= {name: str(value) for name, value in values.items() if isinstance(value, Fraction)}
    return values | {name: value.item() for name, value in values.items() if isinstance(value, np.generic)}
