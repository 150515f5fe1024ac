"""What a call of a processor may be told, in the words of Transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.positions.table import Side
from mmpos.support.checks import INT32_MAX, IntArray, boolean, integer, one_of

__all__ = ["Options", "flat_options"]


def flat_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call, those of ``text_kwargs`` beside the others.

    Raises:
        InvalidInputError: an argument that is given twice, or ``text_kwargs`` that have no names.
    """
    flat = dict(given)
    grouped = flat.pop("text_kwargs", None) or {}
    if not isinstance(grouped, Mapping):
        raise InvalidInputError(f"text_kwargs: got {type(grouped).__name__}, want options by their names")
    for name, value in grouped.items():
        if name in flat:
            raise InvalidInputError(f"{name}: got it twice, want it beside text_kwargs or in them")
        flat[name] = value
    return flat


@dataclass(frozen=True)
class Options:
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
        sanitize_control_tokens: that user text was marked by ``apply_chat_template``, which sets this.
        return_mm_token_type_ids: whether to say which tokens are patches.
        return_offsets_mapping: whether to say of which characters of the text each token is; those of an image are of
            its placeholder.
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
            if each.type == "bool":
                boolean(each.name, getattr(self, each.name))

    @classmethod
    def of(cls, given: Mapping[str, Any], tokenizer: Any) -> Options:
        """The options among arguments, of which ``text_kwargs`` may hold some, as Transformers groups them.

        Those that are not given are what the tokenizer was made with, if it was.

        Raises:
            InvalidInputError: an argument that there is not, or that is given twice.
        """
        flat = flat_options(given)
        known = [each.name for each in fields(cls)]
        for name in flat.keys() - set(known):
            raise InvalidInputError(f"{name}: got an argument of this name, want {', '.join(known)}")
        made_with = tokenizer.init_kwargs  # what became an attribute may have been changed since
        return cls(**{name: getattr(tokenizer, name, made_with[name]) for name in known if name in made_with} | flat)

    def encode(self, tokenizer: Any, texts: list[str]) -> Any:
        """The tokens of each text by itself, neither padded nor cut."""
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

    def side(self, tokenizer: Any) -> Side:
        """The side on which rows are padded."""
        side: Side = self.padding_side or tokenizer.padding_side
        return side

    def limit(self, tokenizer: Any) -> int | None:
        """Most tokens of a row; None where rows are not to be cut."""
        if self.truncation is None:
            cuts = self.max_length is not None and self.padding is False
        else:
            cuts = self.truncation not in (False, "do_not_truncate")
        return self._length(tokenizer) if cuts else None

    def _length(self, tokenizer: Any) -> int | None:
        """Tokens of a row that max_length stands for; None where there is no such number."""
        length = tokenizer.model_max_length if self.max_length is None else self.max_length
        return int(length) if length <= INT32_MAX else None

    def width(self, lengths: IntArray, tokenizer: Any) -> int | None:
        """Tokens of every row of the batch; None where rows are left as they are.

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
