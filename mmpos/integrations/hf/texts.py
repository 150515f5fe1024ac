"""Options of a processor's call, and rows of token ids whose placeholders are expanded to the tokens of images."""

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
    "FIXED",
    "NORMALISING",
    "OF_IMAGES",
    "TextOptions",
    "TextRows",
    "VideoTokens",
    "added_tokens",
    "expand",
    "flat_options",
    "sort_options",
]

NORMALISING = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
"""Options of images that say what becomes of a byte, as Transformers has them."""

OF_IMAGES = ("min_pixels", "max_pixels", "max_tokens", "size", *NORMALISING)
"""Options of a call that are of its images; size is that of Transformers, shortest_edge and longest_edge."""

FIXED: Mapping[str, object] = MappingProxyType(
    {
        "do_resize": True,
        "do_convert_rgb": True,
        "resample": 3,
        **dict.fromkeys(("do_pad", "do_center_crop", "default_to_square"), False),
        **dict.fromkeys(("crop_size", "data_format", "input_data_format")),
        **dict.fromkeys(("patch_size", "merge_size", "temporal_patch_size")),
    }
)
"""Options of images in Transformers that have one value here; the last three are those of the processor."""


def sort_options(
    arguments: Mapping[str, Any], of_videos: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Sort the arguments of a call into those of text, of images and of videos; what both have goes to both.

    Args:
        arguments: by name; those in ``images_kwargs`` and ``videos_kwargs`` are of images and of videos alone.
        of_videos: names that the processor of videos takes.

    Raises:
        InvalidInputError: an argument that is given twice, or a group without such an argument.
    """
    text = dict(arguments)
    groups: dict[str, dict[str, Any]] = {}
    takes = {"images_kwargs": {*OF_IMAGES, *FIXED}, "videos_kwargs": set(of_videos)}
    for group, known in takes.items():
        own = _group(text, group)
        for name in own.keys() - known:
            listed = OF_IMAGES if group == "images_kwargs" else of_videos
            want = ", ".join(listed) or "none without a video_processor"
            raise InvalidInputError(f"{group}: got an argument {name!r}, want {want}")
        groups[group] = own
    known_to_text = {each.name for each in fields(TextOptions)}
    for name in text.keys() - known_to_text:
        takers = [group for group, known in takes.items() if name in known]
        value = text.pop(name) if takers else None
        for group in takers:
            if name in groups[group]:
                raise InvalidInputError(f"{name}: got it twice, want it beside {group} or in them")
            groups[group][name] = value
    return text, groups["images_kwargs"], groups["videos_kwargs"]


def _group(arguments: dict[str, Any], group: str) -> dict[str, Any]:
    """Take a group of options out of the arguments."""
    grouped = arguments.pop(group, None) or {}
    if not isinstance(grouped, Mapping):
        raise InvalidInputError(f"{group}: got {type(grouped).__name__}, want options by their names")
    return dict(grouped)


def flat_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the arguments of a call with those in ``text_kwargs``.

    Raises:
        InvalidInputError: an argument that is given twice, or ``text_kwargs`` that have no names.
    """
    flat = dict(arguments)
    for name, value in _group(flat, "text_kwargs").items():
        if name in flat:
            raise InvalidInputError(f"{name}: got it twice, want it beside text_kwargs or in them")
        flat[name] = value
    return flat


@dataclass(frozen=True)
class TextOptions:
    """Arguments of a call, checked; they mean what they mean in Transformers.

    Args:
        return_tensors: "pt" or "np"; None gives lists of rows, and arrays of patches and grids.
        padding: True or "longest", "max_length", or False.
        padding_side: "left" or "right"; None is the tokenizer's.
        pad_to_multiple_of: of which the length of padded rows is made a multiple.
        truncation: whether rows are cut to max_length, on the tokenizer's side, but for the special tokens that it
            adds; never through an image. None is True where max_length is given and padding is False.
        max_length: tokens of a row, of rows that are cut or padded to it; None is model_max_length of the tokenizer,
            and where it has none nothing is cut or padded to it.
        add_special_tokens: whether the tokenizer adds its own around each text; chats bring theirs.
        sanitize_control_tokens: whether ``apply_chat_template`` marked user text; it sets this itself.
        return_mm_token_type_ids: whether to return which tokens are patches.
        return_positions: whether to return positions beside the keys of Transformers; None is the processor's setting.
        return_offsets_mapping: whether to return the characters of each token in the text; tokens of an image have
            those of its placeholder.
        return_text_replacement_offsets: taken and not needed, since offsets are those of the text as it came.
        add_generation_prompt: whether chats end in the start of an answer; not for text.
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
        """Read the options; those that are left out are what the tokenizer was made with, if it was.

        Raises:
            InvalidInputError: an argument that there is not.
        """
        known = [each.name for each in fields(cls)]
        for name in arguments.keys() - set(known):
            want = ", ".join([*known, *OF_IMAGES, "images_kwargs", "videos_kwargs"])
            raise InvalidInputError(f"{name}: got an argument of this name, want {want}")
        made_with = tokenizer.init_kwargs  # what became an attribute may have been changed since
        defaults = {name: getattr(tokenizer, name, made_with[name]) for name in known if name in made_with}
        return cls(**defaults | arguments)

    def encode(self, tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> BatchEncoding:
        """Tokenize each text by itself, neither padded nor cut."""
        marked = {"sanitize_control_tokens": True} if self.sanitize_control_tokens else {}
        cuts = self.limit(tokenizer) is not None
        encoded = tokenizer(
            texts,
            add_special_tokens=self.add_special_tokens,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            return_offsets_mapping=self.return_offsets_mapping,
            return_special_tokens_mask=cuts,
            verbose=not cuts,  # of texts that are too long for the model
            **marked,
        )
        if self.return_offsets_mapping and "offset_mapping" not in encoded:
            why = "sanitize_control_tokens=True" if marked else type(tokenizer).__name__
            raise UnsupportedError(f"return_offsets_mapping: got True, want False: {why} gives no offsets")
        return encoded

    def side(self, tokenizer: PreTrainedTokenizerBase) -> Side:
        """Return the side on which rows are padded."""
        return self.padding_side or cast("Side", tokenizer.padding_side)

    def limit(self, tokenizer: PreTrainedTokenizerBase) -> int | None:
        """Return the most tokens of a row; None where rows are not cut."""
        if self.truncation is None:
            cuts = self.max_length is not None and self.padding is False
        else:
            cuts = self.truncation not in (False, "do_not_truncate")
        return self._length(tokenizer) if cuts else None

    def _length(self, tokenizer: PreTrainedTokenizerBase) -> int | None:
        """Return the tokens of a row that max_length stands for; None where there is no such number."""
        length = tokenizer.model_max_length if self.max_length is None else self.max_length
        return int(length) if length <= INT32_MAX else None

    def width(self, lengths: IntArray, tokenizer: PreTrainedTokenizerBase) -> int | None:
        """Return the tokens of every row of the batch; None where rows are left as they are.

        Raises:
            InvalidInputError: a row that is longer than wanted, or rows of several lengths that are to be a tensor.
        """
        longest = int(lengths.max())
        widths = {False: None, "do_not_pad": None, "max_length": self._length(tokenizer)}
        width = widths.get(self.padding, longest)
        if width is None:
            if self.return_tensors is not None and (lengths != longest).any():
                got, want = f"rows of {lengths.min()} to {longest} tokens", f"return_tensors={self.return_tensors!r}"
                raise InvalidInputError(f"padding: got {got}, want padding=True for {want}")
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
    """Tokens of the videos of a batch.

    Args:
        token_id: the placeholder of a video, and of each of its patches.
        grid_thw: (grids, 3) frames, height and width after merging, of one grid a video or one for each of its frames.
        per_row: (rows,) videos given for each row; None where they are given for all together.
        written: token ids that stand for each video before its grids are expanded, a placeholder for each of them.
        seconds_per_frame: (grids,) or None where the scheme has no use for it.
    """

    token_id: int
    grid_thw: IntArray
    per_row: IntArray | None
    written: Sequence[IntArray]
    seconds_per_frame: Sequence[float] | None = None


@dataclass(frozen=True)
class TextRows:
    """Token ids of several documents, one after the other, and the images and videos in them, here called images.

    Args:
        input_ids: (tokens,) of all rows.
        lengths: (rows,) tokens of each row.
        source: (tokens,) the token, before expansion, that each one comes of.
        first: (images,) first token of each image, a marker before it included.
        stop: (images,) one past its last token, likewise.
        document: (images,) the row of each image.
        grid_thw: (images, 3) frames, height and width after merging.
        markers: the tokens that were put around and into the images.
        seconds_per_frame: (images,) of videos, None for other images; None where there are none.
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
        """Make the table of segments; no token is read."""
        starts = self.lengths.cumsum() - self.lengths
        offsets = self.first + self.markers.margins[0] - starts[self.document]
        separated = self.markers.row is not None
        return SegmentTable.from_spans(
            self.lengths,
            offsets,
            self.grid_thw,
            self.document,
            seconds_per_frame=self.seconds_per_frame,
            row_separator=separated,
        )

    def cut(self, length: int, side: str, added: IntArray) -> TextRows:
        """Cut every row to at most so many tokens, on the right or on the left, but never through an image.

        Args:
            length: most tokens of a row.
            side: "right" or "left".
            added: (rows, 2) tokens at the start and at the end of each row that stay.

        Raises:
            InvalidInputError: an image would be cut, or cut off: its pixels would have no place; or there would be no
                room for what stays.
        """
        long = self.lengths > length
        least = int((added.sum(axis=1) * long).max())
        if least > length:
            raise InvalidInputError(f"max_length: got {length}, want >= {least}, the special tokens of a row")
        # What goes is one run of tokens, before those that stay at the end or behind those at the start.
        begin = length - added[:, 1] if side == "right" else added[:, 0]
        begin = np.where(long, begin, self.lengths)
        kept = np.minimum(self.lengths, length)
        starts = self.lengths.cumsum() - self.lengths
        begin, end = starts + begin, starts + begin + self.lengths - kept
        lost = (self.stop > begin[self.document]) & (self.first < end[self.document])
        if lost.any():
            i = int(lost.argmax())
            row = int(self.document[i])
            raise InvalidInputError(
                f"max_length: got {length}, which cuts image {i} off text[{row}] of {self.lengths[row]} tokens, "
                "want more, or truncation=False"
            )
        token = np.arange(self.input_ids.size)
        inside = (token < begin.repeat(self.lengths)) | (token >= end.repeat(self.lengths))
        before = inside.cumsum() - inside
        return replace(
            self,
            input_ids=self.input_ids[inside],
            lengths=kept,
            source=self.source[inside],
            first=before[self.first],
            stop=before[self.stop - 1] + 1,
        )


def added_tokens(encoded: BatchEncoding) -> IntArray:
    """Count (rows, 2) special tokens that a tokenizer has put before and after each text, by its mask of them."""
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
    """Replace each placeholder by the tokens of its image, or of its video.

    Args:
        texts: token ids of each row, with one placeholder per image and per video.
        grid_thw: (images, 3) frames, height and width after merging, in the order of the placeholders.
        per_row: (rows,) images given for each row; None where they are given for all together.
        markers: the tokens to put around and into the images, and each grid of a video.
        videos: those of a processor that takes videos.

    Raises:
        InvalidInputError: a row without tokens, or other placeholders than images and videos.
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
        ids, source = _write_videos(ids, row, lengths.size, videos)
        row = row[source]
        grids, seconds = _grids(ids, grid_thw, markers.patch, videos)
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


def _grids(
    ids: IntArray, grid_thw: IntArray, patch: int, videos: VideoTokens
) -> tuple[IntArray, Sequence[float | None] | None]:
    """Merge the grids of images and of videos in the order of placeholders, and the seconds of those of videos."""
    of_video = ids[(ids == patch) | (ids == videos.token_id)] == videos.token_id
    grids = np.empty((of_video.size, 3), np.int64)
    grids[of_video], grids[~of_video] = videos.grid_thw, grid_thw
    if not videos.seconds_per_frame:
        return grids, None
    each = iter(videos.seconds_per_frame)
    return grids, [next(each) if video else None for video in of_video.tolist()]


def _write_videos(ids: IntArray, row: IntArray, rows: int, videos: VideoTokens) -> tuple[IntArray, IntArray]:
    """Write the tokens of each video for its placeholder; return them all, and the token that each one comes of."""
    at = ids == videos.token_id
    _check_counts("video", row[at], rows, len(videos.written), videos.per_row)
    counts = np.ones(ids.size, np.int64)
    counts[at] = [written.size for written in videos.written]
    source = np.arange(ids.size).repeat(counts)
    written = ids[source]
    if at.any():
        written[at[source]] = np.concatenate(videos.written)
    return written, source


def _check_counts(kind: str, placeholders: IntArray, rows: int, given: int, per_row: IntArray | None) -> None:
    """Refuse other placeholders than images, or than videos; the row of each placeholder says where they are."""
    if per_row is not None:
        in_rows = np.bincount(placeholders, minlength=rows)
        wrong = in_rows != per_row
        if wrong.any():
            i = int(wrong.argmax())
            want = f"{in_rows[i]}, the placeholders of text[{i}]"
            raise InvalidInputError(f"{kind}s[{i}]: got {counted(per_row[i], kind)}, want {want}")
    elif placeholders.size != given:
        want = f"{placeholders.size}, the placeholders of text"
        raise InvalidInputError(f"{kind}s: got {counted(given, kind)}, want {want}")
