"""Tokenizers: the byte-level default and the adapters for other libraries."""

from typing import Any

import pytest
from refusals import assert_refused
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel

from mmpos import ByteTokenizer, Grid, SequenceBuilder
from mmpos.sequence.tokenizers import adapt


def trained_bpe() -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    special = [AddedToken(name, special=True) for name in ("[IMG]", "[/IMG]", "[PATCH]")]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["the dog chased another dog"] * 20, trainer)
    return tokenizer


class Plain:
    """A tokenizer that encodes every character as its code point, and [X] as a single id."""

    def encode(self, text: str) -> list[int]:
        return [7] if text == "[X]" else [ord(c) for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join("[X]" if i == 7 else chr(i) for i in ids)


def test_bytes_are_ids_and_special_tokens_follow_them() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aé[IMG]") == [97, 195, 169, 91, 73, 77, 71, 93]
    assert [tokenizer.token_to_id(t) for t in ("[IMG]", "[/IMG]", "[PATCH]", "[X]")] == [256, 257, 258, None]
    assert tokenizer.decode([97, 195, 169, 256, 258, 257]) == "aé[IMG][PATCH][/IMG]"
    assert tokenizer.decode([0, 195]) == "\0\N{REPLACEMENT CHARACTER}"
    assert_refused("ids: got 259, want <= 258", lambda: tokenizer.decode([259]))


@pytest.mark.parametrize("library", ["tokenizers", "transformers"])
def test_a_tokenizer_of_a_library_encodes_without_adding_tokens(library: str) -> None:
    inner, text = trained_bpe(), "the dog is café"
    want = inner.encode(text, add_special_tokens=False).ids
    if library == "transformers":
        inner = pytest.importorskip("transformers").PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[IMG]")
    tokenizer = adapt(inner)
    assert (tokenizer.encode(text), tokenizer.decode(want)) == (want, text)
    assert (tokenizer.token_to_id("[PATCH]"), tokenizer.token_to_id("[X]")) == (2, None)


def test_other_objects_require_encode_and_decode() -> None:
    tokenizer = adapt(Plain())
    assert (tokenizer.encode("ab"), tokenizer.decode([97, 98])) == ([97, 98], "ab")
    assert (tokenizer.token_to_id("[X]"), tokenizer.token_to_id("[Y]")) == (7, None)
    assert_refused("tokenizer: got object, want an object with encode and decode", lambda: adapt(object()))


def words() -> Any:
    """Build a tokenizer with six words and the special tokens for images, whose ids follow the order listed."""
    names = ["an", "old", "dog", "of", "my", "town", "[IMG]", "[/IMG]", "[PATCH]", "<pad>"]
    tokenizer = Tokenizer(models.WordLevel({name: token for token, name in enumerate(names)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


LIMITS: list[dict[str, Any]] = [{"truncation": {"max_length": 2}}, {"padding": {"length": 9}}]
LIMITS.append(LIMITS[0] | LIMITS[1])


@pytest.mark.parametrize("library", ["tokenizers", "transformers"])
@pytest.mark.parametrize("limits", LIMITS)
def test_a_tokenizers_truncation_and_padding_do_not_apply_to_parts(library: str, limits: dict[str, Any]) -> None:
    inner = backend = words()
    if library == "transformers":
        inner = pytest.importorskip("transformers").PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>")
        backend = inner.backend_tokenizer
    before = SequenceBuilder(inner)
    for name, setting in limits.items():
        getattr(backend, f"enable_{name}")(**setting)  # as a truncating and padding call in transformers does
    settings = [backend.truncation, backend.padding]
    parts = ["an old dog of my town", Grid(1, 2), "my dog"]
    for builder in (before, SequenceBuilder(inner)):
        assert builder.build(parts).input_ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 8, 8, 7, 4, 2]
    assert [backend.truncation, backend.padding] == settings  # the caller's tokenizer is unchanged


def test_a_limited_tokenizer_that_cannot_be_copied_is_refused() -> None:
    class Spaces:
        def pre_tokenize(self, text: Any) -> None:
            text.split(lambda _, piece: piece.split(" ", "removed"))

    inner = words()
    inner.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Spaces())
    tokenizer = adapt(inner)
    assert tokenizer.encode("an old dog") == [0, 1, 2]
    inner.enable_truncation(2)
    assert_refused("tokenizer: got truncation or padding, want neither", lambda: tokenizer.encode("an old dog"))
