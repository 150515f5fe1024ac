"""Options for calls to a processor, and the expansion of placeholders into image and video tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any, cast

import numpy as np
from transformers import BatchEncoding, PreTrainedTokenizerBase

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.positions.table import Side
from mmpos.segments.table import SegmentTable, separator_tokens
from mmpos.sequence.builder import MarkerIds
from mmpos.support.checks import INT32_MAX, IntArray, boolean, counted, integer, one_of

__all__ = [
    "FIXED_OPTIONS",
    "IMAGE_OPTIONS",
    "PIXEL_OPTIONS",
    "TextOptions",
    "TextRows",
    "VideoTokens",
    "added_tokens",
    "expand",
    "flat_options",
    "sort_options",
]

PIXEL_OPTIONS = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
"""Transformers options that control how bytes are rescaled and normalised."""

IMAGE_OPTIONS = ("min_pixels", "max_pixels", "max_tokens", "size", *PIXEL_OPTIONS)
"""Image options; size has shortest_edge and longest_edge, as in Transformers."""

FIXED_OPTIONS: Mapping[str, object] = MappingProxyType(
    {
        "do_resize": True,
        "do_convert_rgb": True,
        "resample": 3,
        **dict.fromkeys(("do_pad", "do_center_crop", "default_to_square"), False),
        **dict.fromkeys(("crop_size", "data_format", "input_data_format")),
        **dict.fromkeys(("patch_size", "merge_size", "temporal_patch_size")),
    }
)
"""Transformers' image options, each with the only value accepted here; the last three must equal the processor's
settings.
"""


def sort_options(
    arguments: Mapping[str, Any], video_options: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Sort the arguments of a call into options for text, images and videos.

    An option that exists for images and for videos is passed to both.

    Args:
        arguments: arguments by name; ``images_kwargs`` and ``videos_kwargs`` contain the options that apply only to
            images and only to videos, respectively.
        video_options: names of the options that the video processor accepts.

    Raises:
        InvalidInputError: an argument is passed twice, or a group contains an unknown option.
    """
    text = dict(arguments)
    groups: dict[str, dict[str, Any]] = {}
    known = {"images_kwargs": {*IMAGE_OPTIONS, *FIXED_OPTIONS}, "videos_kwargs": set(video_options)}
    for group, names in known.items():
        groups[group] = _pop_group(text, group)
        for name in groups[group].keys() - names:
            listed = IMAGE_OPTIONS if group == "images_kwargs" else video_options
            want = ", ".join(listed) or "none without a video_processor"
            raise InvalidInputError(f"{group}: got an unknown option {name!r}, want {want}")
    text_options = {each.name for each in fields(TextOptions)}
    for name in text.keys() - text_options:
        matching = [group for group, names in known.items() if name in names]
        value = text.pop(name) if matching else None
        for group in matching:
            if name in groups[group]:
                raise InvalidInputError(f"{name} cannot be combined with {group}[{name!r}]")
            groups[group][name] = value
    return text, groups["images_kwargs"], groups["videos_kwargs"]


def _pop_group(arguments: dict[str, Any], group: str) -> dict[str, Any]:
    """Remove a group of options from the arguments and return it."""
    options = arguments.pop(group, None) or {}
    if not isinstance(options, Mapping):
        raise InvalidInputError(f"{group}: got {type(options).__name__}, want a mapping from names to options")
    return dict(options)


def flat_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the arguments of a call with those in ``text_kwargs``.

    Raises:
        InvalidInputError: an argument is passed twice, or ``text_kwargs`` is not a mapping.
    """
    flat = dict(arguments)
    for name, value in _pop_group(flat, "text_kwargs").items():
        if name in flat:
            raise InvalidInputError(f"{name} cannot be combined with text_kwargs[{name!r}]")
        flat[name] = value
    return flat


@dataclass(frozen=True)
class TextOptions:
    """Validated arguments of a call, with the same meanings as in Transformers.

    Args:
        return_tensors: "pt" or "np"; None returns rows as lists, but patches and grids as arrays.
        padding: True or "longest", "max_length", or False.
        padding_side: "left" or "right"; None uses the tokenizer's side.
        pad_to_multiple_of: the length of padded rows is rounded up to a multiple of this number.
        truncation: whether to truncate rows to max_length, on the side set in the tokenizer. Special tokens added by
            the tokenizer are kept, and images are never cut. None means True if max_length is set and padding is False.
        max_length: number of tokens to which rows are truncated or padded; None uses the tokenizer's model_max_length;
            if that is not set either, rows are neither truncated nor padded to a maximum length.
        add_special_tokens: whether the tokenizer adds special tokens around each text; chat templates write their own.
        sanitize_control_tokens: whether user text is marked, so that Transformers keeps special tokens in it as text;
            ``apply_chat_template`` sets this option when it marks user text.
        return_mm_token_type_ids: whether to return token types: text, image or video.
        return_positions: whether to return positions in addition to Transformers' keys; None uses the processor's
            setting.
        return_offsets_mapping: whether to return each token's range of characters in the text; the tokens of an image
            have the range of its placeholder.
        return_text_replacement_offsets: accepted but ignored, because offsets always refer to the original text.
        add_generation_prompt: whether chats end with the start of an answer; not supported for text.
    """

    return_tensors: str | None = None
    padding: bool | str = False
    padding_side: Side | None = None
    pad_to_multiple_of: int | None = None
    truncation: bool | str | None = None
    max_length: int | None = None
    add_special_tokens: bool = True
    sanitize_control_tokens: bool = False
    return_mm_token_type_ids: bool = True
    return_positions: bool | None = None
    return_offsets_mapping: bool = False
    return_text_replacement_offsets: bool = False
    add_generation_prompt: bool = False

    def __post_init__(self) -> None:
        one_of("return_tensors", self.return_tensors, (None, "pt", "np"))
        one_of("padding", self.padding, (True, False, "longest", "max_length", "do_not_pad"))
        one_of("padding_side", self.padding_side, (None, "left", "right"))
        one_of("truncation", self.truncation, (None, True, False, "longest_first", "only_first", "do_not_truncate"))
        for name in ("pad_to_multiple_of", "max_length"):
            if getattr(self, name) is not None:
                integer(name, getattr(self, name), minimum=1, maximum=INT32_MAX)
        for each in fields(self):
            if each.type == "bool" or (each.type == "bool | None" and getattr(self, each.name) is not None):
                boolean(each.name, getattr(self, each.name))

    @classmethod
    def of(cls, arguments: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> TextOptions:
        """Build the options; arguments with which the tokenizer was created serve as defaults.

        Raises:
            InvalidInputError: an argument is unknown.
        """
        known = [each.name for each in fields(cls)]
        for name in arguments.keys() - set(known):
            want = ", ".join([*known, *IMAGE_OPTIONS, "images_kwargs", "videos_kwargs"])
            raise InvalidInputError(f"{name}: got an unknown option, want {want}")
        initial = tokenizer.init_kwargs  # attributes with these names may have changed since then
        defaults = {name: getattr(tokenizer, name, initial[name]) for name in known if name in initial}
        return cls(**defaults | arguments)

    def encode(self, tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> BatchEncoding:
        """Tokenize each text separately, without padding or truncation."""
        marked = {"sanitize_control_tokens": True} if self.sanitize_control_tokens else {}
        truncates = self.limit(tokenizer) is not None
        encoded = tokenizer(
            texts,
            add_special_tokens=self.add_special_tokens,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            return_offsets_mapping=self.return_offsets_mapping,
            return_special_tokens_mask=truncates,
            verbose=not truncates,  # otherwise it warns about texts longer than the model's limit
            **marked,
        )
        if self.return_offsets_mapping and "offset_mapping" not in encoded:
            cause = "sanitize_control_tokens=True" if marked else type(tokenizer).__name__
            raise UnsupportedError(f"return_offsets_mapping: got True, want False: {cause} returns no offsets")
        return encoded

    def side(self, tokenizer: PreTrainedTokenizerBase) -> Side:
        """Return the side on which rows are padded."""
        return self.padding_side or cast("Side", tokenizer.padding_side)

    def limit(self, tokenizer: PreTrainedTokenizerBase) -> int | None:
        """Return the number of tokens to which rows are truncated; None if they are not truncated."""
        if self.truncation is None:
            truncates = self.max_length is not None and self.padding is False
        else:
            truncates = self.truncation not in (False, "do_not_truncate")
        return self._max_length(tokenizer) if truncates else None

    def _max_length(self, tokenizer: PreTrainedTokenizerBase) -> int | None:
        """Return max_length, or the tokenizer's model_max_length; None if neither is set."""
        length = tokenizer.model_max_length if self.max_length is None else self.max_length
        return int(length) if length <= INT32_MAX else None

    def width(self, lengths: IntArray, tokenizer: PreTrainedTokenizerBase) -> int | None:
        """Return the number of tokens to which every row is padded; None if rows keep their lengths.

        Raises:
            InvalidInputError: a row is too long, or a tensor is requested for rows of different lengths.
        """
        longest = int(lengths.max())
        widths = {False: None, "do_not_pad": None, "max_length": self._max_length(tokenizer)}
        width = widths.get(self.padding, longest)
        if width is None:
            if self.return_tensors is not None and (lengths != longest).any():
                raise InvalidInputError(
                    f"padding: got {self.padding} for rows of {lengths.min()} to {longest} tokens, "
                    f"want True for return_tensors={self.return_tensors!r}"
                )
            return None if self.return_tensors is None else longest
        if longest > width:
            got = f"text[{int(lengths.argmax())}]: got {longest} tokens"
            raise InvalidInputError(f"{got}, want <= max_length = {width}, or truncation=True")
        multiple, limit = self.pad_to_multiple_of or 1, self.limit(tokenizer)
        if limit is not None and limit % multiple:
            raise InvalidInputError(f"pad_to_multiple_of: got {multiple}, want a divisor of max_length = {limit}")
        return -(-width // multiple) * multiple


@dataclass(frozen=True)
class VideoTokens:
    """Tokens of the videos in a batch.

    Args:
        token_id: token id of the placeholder for a video, and of each video patch.
        grid_thw: (grids, 3) frames, height and width after merging; one grid per video, or one per frame.
        per_row: (rows,) number of videos passed for each row; None if they are passed as one list for all rows.
        unexpanded: token ids of each video, with one placeholder per grid.
        seconds_per_frame: (grids,) seconds per frame, or None if the scheme does not use seconds.
    """

    token_id: int
    grid_thw: IntArray
    per_row: IntArray | None
    unexpanded: Sequence[IntArray]
    seconds_per_frame: Sequence[float] | None = None


@dataclass(frozen=True)
class TextRows:
    """Concatenated token ids of several rows, and the images in them; videos and frames count as images.

    Args:
        input_ids: (tokens,) token ids of all rows.
        lengths: (rows,) number of tokens in each row.
        source: (tokens,) index, before expansion, of the token from which each token was expanded.
        first: (images,) first token of each image, counting its start marker.
        stop: (images,) one past the last token of each image, counting its end marker.
        document: (images,) row of each image.
        grid_thw: (images, 3) frames, height and width after merging.
        markers: marker tokens inserted around and inside images.
        seconds_per_frame: (images,) seconds for videos and None for images; None if no image has seconds.
    """

    input_ids: IntArray
    lengths: IntArray
    source: IntArray
    first: IntArray
    stop: IntArray
    document: IntArray
    grid_thw: IntArray
    markers: MarkerIds
    seconds_per_frame: Sequence[float | None] | None = field(default=None, kw_only=True)

    def segments(self) -> SegmentTable:
        """Build the table of segments from the spans of images."""
        starts = self.lengths.cumsum() - self.lengths
        return SegmentTable.from_spans(
            self.lengths,
            self.first + self.markers.margins[0] - starts[self.document],
            self.grid_thw,
            self.document,
            seconds_per_frame=self.seconds_per_frame,
            row_separator=self.markers.row is not None,
        )

    def truncated(self, length: int, side: str, added: IntArray) -> TextRows:
        """Truncate every row to at most ``length`` tokens without removing any image token.

        Args:
            length: maximum number of tokens in a row.
            side: "right" or "left".
            added: (rows, 2) number of tokens to keep at the start and at the end of each row.

        Raises:
            InvalidInputError: an image token would be removed although the image's pixels remain, or more than
                ``length`` tokens must be kept.
        """
        is_long = self.lengths > length
        least = int((added.sum(axis=1) * is_long).max())
        if least > length:
            raise InvalidInputError(f"max_length: got {length}, want >= {least}, the number of special tokens in a row")
        # Remove one run of tokens, just before the kept tokens at the end or just after those at the start.
        begin = length - added[:, 1] if side == "right" else added[:, 0]
        begin = np.where(is_long, begin, self.lengths)
        lengths = np.minimum(self.lengths, length)
        starts = self.lengths.cumsum() - self.lengths
        begin, end = starts + begin, starts + begin + self.lengths - lengths
        is_cut = (self.stop > begin[self.document]) & (self.first < end[self.document])
        if is_cut.any():
            i = int(is_cut.argmax())
            row = int(self.document[i])
            raise InvalidInputError(
                f"max_length: got {length}, which removes tokens of image {i} from text[{row}] of {self.lengths[row]} "
                "tokens, want a larger value or truncation=False"
            )
        token = np.arange(self.input_ids.size)
        kept = (token < begin.repeat(self.lengths)) | (token >= end.repeat(self.lengths))
        before = kept.cumsum() - kept
        return replace(
            self,
            input_ids=self.input_ids[kept],
            lengths=lengths,
            source=self.source[kept],
            first=before[self.first],
            stop=before[self.stop - 1] + 1,
        )


def added_tokens(encoded: BatchEncoding) -> IntArray:
    """Return (rows, 2) counts of the special tokens that a tokenizer added before and after each text."""
    runs = [
        (mask.index(0), mask[::-1].index(0)) if 0 in mask else (len(mask), 0)
        for mask in encoded.get("special_tokens_mask", [[0]] * len(encoded["input_ids"]))
    ]
    return np.array(runs, np.int64)


def expand(
    texts: Sequence[Sequence[int]],
    grid_thw: IntArray,
    per_row: IntArray | None,
    markers: MarkerIds,
    videos: VideoTokens | None = None,
) -> TextRows:
    """Replace each placeholder with the tokens of its image or video.

    Args:
        texts: token ids of each row, with one placeholder per image and per video.
        grid_thw: (images, 3) frames, height and width after merging, in the order of the placeholders.
        per_row: (rows,) number of images passed for each row; None if they are passed as one list for all rows.
        markers: marker tokens to insert around and inside each image and each grid of a video.
        videos: tokens of the videos; None if the processor does not support videos.

    Raises:
        InvalidInputError: a row has no tokens, or the number of placeholders differs from the number of images or
            videos.
    """
    before = np.fromiter(accumulate(map(len, texts), initial=0), np.int64, len(texts) + 1)
    lengths = np.diff(before)
    if not lengths.all():
        raise InvalidInputError(f"text[{int(lengths.argmin())}]: got no tokens, want at least one")
    ids = np.concatenate([np.asarray(text, np.int64) for text in texts])
    row = np.arange(lengths.size).repeat(lengths)
    _check_counts("image", row[ids == markers.patch], lengths.size, len(grid_thw), per_row)
    source = np.arange(ids.size)
    seconds: Sequence[float | None] | None = None
    grids = grid_thw
    if videos is not None:
        ids, source = _insert_videos(ids, row, lengths.size, videos)
        row = row[source]
        grids, seconds = _merge_grids(ids, grid_thw, markers.patch, videos)
    patch = ids == markers.patch if videos is None else (ids == markers.patch) | (ids == videos.token_id)
    (at,) = patch.nonzero()
    frames, height, width = grids.T
    front, back = markers.margins
    tokens = frames * height * (width + (markers.row is not None)) + front + back
    counts = np.ones(ids.size, np.int64)
    counts[at] = tokens
    expanded = np.arange(ids.size).repeat(counts)
    stop = counts.cumsum()[at]
    lengths = np.bincount(row[expanded], minlength=lengths.size)
    rows = TextRows(
        ids[expanded],
        lengths,
        source[expanded],
        stop - tokens,
        stop,
        row[at],
        grids,
        markers,
        seconds_per_frame=seconds,
    )
    spans = np.stack([rows.first + front, stop - back], axis=1)
    markers.write(rows.input_ids, spans, separator_tokens(rows.segments()))
    return rows


def _merge_grids(
    ids: IntArray, grid_thw: IntArray, patch: int, videos: VideoTokens
) -> tuple[IntArray, Sequence[float | None] | None]:
    """Merge the grids and seconds of images and videos in the order of their placeholders."""
    is_video = ids[(ids == patch) | (ids == videos.token_id)] == videos.token_id
    grids = np.empty((is_video.size, 3), np.int64)
    grids[is_video], grids[~is_video] = videos.grid_thw, grid_thw
    if not videos.seconds_per_frame:
        return grids, None
    seconds = iter(videos.seconds_per_frame)
    return grids, [next(seconds) if video else None for video in is_video.tolist()]


def _insert_videos(ids: IntArray, row: IntArray, rows: int, videos: VideoTokens) -> tuple[IntArray, IntArray]:
    """Replace the placeholder of each video with its unexpanded tokens; return all ids and the source of each id."""
    at = ids == videos.token_id
    _check_counts("video", row[at], rows, len(videos.unexpanded), videos.per_row)
    counts = np.ones(ids.size, np.int64)
    counts[at] = [tokens.size for tokens in videos.unexpanded]
    source = np.arange(ids.size).repeat(counts)
    inserted = ids[source]
    if at.any():
        inserted[at[source]] = np.concatenate(videos.unexpanded)
    return inserted, source


def _check_counts(kind: str, placeholders: IntArray, rows: int, number: int, per_row: IntArray | None) -> None:
    """Check that there is one placeholder per image or video; ``placeholders`` contains the row of each placeholder."""
    if per_row is not None:
        in_rows = np.bincount(placeholders, minlength=rows)
        wrong = in_rows != per_row
        if wrong.any():
            i = int(wrong.argmax())
            want = f"{in_rows[i]}, the placeholders of text[{i}]"
            raise InvalidInputError(f"{kind}s[{i}]: got {counted(per_row[i], kind)}, want {want}")
    elif placeholders.size != number:
        want = f"{placeholders.size}, the placeholders of text"
        raise InvalidInputError(f"{kind}s: got {counted(number, kind)}, want {want}")
