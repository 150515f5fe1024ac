"""Wrong keys are never reported as equal, and no rotation is blamed for wrong ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from mmpos_probe import check, identify, read
from mmpos_probe.words import counted

from mmpos import place
from mmpos.rotary import Rotary, YaRN
from mmpos.segments import Grid, SegmentTable, Text

Floats = npt.NDArray[np.float64]
PROMPT = SegmentTable.from_documents([[Text(12), Grid(3, 5), Text(93)]])
ROTARIES = {
    "text": (Rotary(64, axes=1), "rope-tie"),
    "rope-tie": (Rotary(128), "rope-tie"),
    "mrope": (Rotary(128, 5e6, allocation="mrope-interleaved"), "mrope-qwen3"),
}
KINDS = [("text", "float32"), ("rope-tie", "bfloat16"), ("mrope", "float32"), ("mrope", "bfloat16")]
"""Rotations, and the dtypes of their keys."""
KEY = np.random.default_rng(5).normal(size=128)


def rotated(rotary: Rotary, ids: npt.ArrayLike, theta: float | None = None) -> Floats:
    """Rotate one key, with its pairs in halves, to (axes, tokens) ids; return (tokens, 1, head_dim) keys."""
    pairs = rotary.num_pairs
    freq = rotary.inv_freq_array if theta is None else theta ** -(np.arange(pairs) / pairs)
    angle = np.asarray(ids, np.float64)[rotary.pair_axis].T * freq
    z = (KEY[:pairs] + 1j * KEY[pairs : 2 * pairs]) * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag], axis=1)[:, None]


def meant(name: str) -> tuple[Rotary, Any, npt.NDArray[np.int64]]:
    """Return a rotary, the documents to pass to check, and their ids."""
    rotary, scheme = ROTARIES[name]
    if name == "text":
        return rotary, np.arange(PROMPT.num_tokens), np.arange(PROMPT.num_tokens)[None]
    table = place(PROMPT, scheme)
    return rotary, table, table.dense()


def noise(keys: Floats) -> Floats:
    return np.random.default_rng(1).normal(size=keys.shape)


def other_phases(keys: Floats) -> Floats:
    """Rotate pairs by random angles, keeping their lengths."""
    x, y = np.split(keys, 2, axis=-1)
    z = (x + 1j * y) * np.exp(1j * np.random.default_rng(1).uniform(-4, 4, x.shape))
    return np.concatenate([z.real, z.imag], axis=-1)


def other_theta(keys: Floats, rotary: Rotary, ids: npt.NDArray[np.int64]) -> Floats:
    return rotated(rotary, ids, theta=5e5)


BROKEN: dict[str, tuple[int, int, Callable[..., Floats]]] = {
    "one NaN": (61, 1, lambda keys, *_: keys * np.nan),
    "one infinity": (61, 1, lambda keys, *_: np.where(np.arange(keys.shape[-1]) == 3, np.inf, keys)),
    "slots never written": (61, 8, lambda keys, *_: 0 * keys),
    "random keys": (61, 8, lambda keys, *_: noise(keys)),
    "random phases": (61, 8, lambda keys, *_: other_phases(keys)),
    "noise": (61, 8, lambda keys, *_: keys + 0.15 * noise(keys)),  # their lengths hardly change
    "another theta": (61, 8, other_theta),
    "no attention factor in decoding": (85, 35, lambda keys, *_: keys / (1.0 + 0.1 * np.log(4.0))),
}
"""The first wrong token, the number of wrong tokens, and the function that changes their keys."""


@pytest.mark.parametrize(("name", "dtype"), KINDS)
@pytest.mark.parametrize("broken", BROKEN)
def test_tokens_with_broken_keys_are_reported_as_different(broken: str, name: str, dtype: str) -> None:
    rotary, documents, ids = meant(name)
    first, count, change = BROKEN[broken]
    changed, wrong = rotated(rotary, ids), slice(first, first + count)
    changed[wrong] = change(changed[wrong], rotary, ids[:, wrong])
    keys = torch.tensor(changed).to(getattr(torch, dtype))
    reading = read(keys, rotary)
    assert np.flatnonzero(~reading.explained).tolist() == list(range(first, first + count))
    assert f"(first: {first}) have keys that no id explains at the noise" in " ".join(reading.notes)
    diagnosis = check(reading, documents)
    assert not diagnosis.equal
    assert (diagnosis.token, diagnosis.different_tokens, diagnosis.explained) == (first, count, count)
    assert diagnosis.cause == f"no id explains the keys of {counted(count, 'token')}"
    assert diagnosis.unknown_tokens == 0
    assert diagnosis.got is not None
    assert np.isnan(diagnosis.got).all()
    assert diagnosis.remedy is not None
    assert "without the attention factor" in diagnosis.remedy
    identification = identify(keys, rotary, documents if name != "text" else ids)
    assert identification.first_wrong == first
    assert identification.as_meant or not identification.named


@pytest.mark.parametrize("since", [5, 20, 100])
def test_tokens_without_the_attention_factor_are_wrong_however_many_there_are(since: int) -> None:
    rotary, ids = Rotary(64, axes=1, scaling=YaRN(4.0, 4096)), np.arange(120)[None]
    keys = rotated(rotary, ids) * np.where(np.arange(120) < since, rotary.attention_factor, 1)[:, None, None]
    reference = rotated(rotary, [[0]])[0]
    reading = read(keys, rotary, reference=reference)
    assert np.flatnonzero(~reading.explained).tolist() == list(range(since, 120))
    assert check(reading, ids).token == since
    assert identify(keys, rotary, ids, reference=reference).first_wrong == since


def test_eight_wrong_tokens_among_twenty_thousand_are_found() -> None:
    rotary, ids = Rotary(64, axes=1), np.arange(20_000)[None]
    keys = rotated(rotary, ids).astype(np.float32)
    keys[15_001:15_009] = rotated(rotary, ids[:, 15_001:15_009], theta=5e5)
    identification = identify(keys, rotary, ids)
    assert (identification.as_meant, identification.first_wrong) == (True, 15_001)
    assert "except those of 8 tokens (first: 15001)" in str(identification)
    diagnosis = check(read(keys, rotary), ids)
    assert (diagnosis.equal, diagnosis.token, diagnosis.different_tokens) == (False, 15_001, 8)
    assert diagnosis.got is not None
    assert np.isnan(diagnosis.got).all()
    assert "got unknown, want 15001 in" in str(diagnosis)


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("off", [0.5, 0.01])
def test_a_few_ids_between_integers_are_reported_as_different(off: float, count: int) -> None:
    rotary, ids = Rotary(64, axes=1), np.arange(2000)[None]
    applied = ids.astype(np.float64)
    applied[:, 700 : 700 + count] += off
    reading = read(rotated(rotary, applied).astype(np.float32), rotary)
    assert np.flatnonzero(~reading.explained).tolist() == list(range(700, 700 + count))
    note = f"{counted(count, 'token')} (first: 700) have keys that no id explains at the noise of the others."
    assert reading.notes == (note,)
    diagnosis = check(reading, ids)
    assert not diagnosis.equal
    assert (diagnosis.token, diagnosis.different_tokens, diagnosis.unknown_tokens) == (700, count, 0)


@pytest.mark.parametrize(
    ("name", "dtype"), [*KINDS, ("text", "float8_e4m3fn"), ("rope-tie", "float16"), ("mrope", "float8_e5m2")]
)
def test_noise_in_healthy_keys_is_not_reported_as_a_difference(name: str, dtype: str) -> None:
    """Keys are stored in few bits, with or without a more precise last chunk; ids are large, and angles are float32."""
    rotary, _, ids = meant(name)
    ids = ids + 120_000
    pairs = rotary.num_pairs
    angle = ids.astype(np.float32)[rotary.pair_axis].T * rotary.inv_freq_array.astype(np.float32)
    z = (KEY[:pairs] + 1j * KEY[pairs : 2 * pairs]) * np.exp(1j * angle.astype(np.float64))
    keys = torch.tensor(np.concatenate([z.real, z.imag], axis=1)[:, None])
    coarse = keys.to(getattr(torch, dtype)).double()
    coarse[100:] = keys[100:]
    for cast in (coarse, keys.to(getattr(torch, dtype))):
        reading = read(cast, rotary)
        assert reading.explained.all()
        assert check(reading, ids).equal
        identification = identify(cast, rotary, ids)
        assert (identification.as_meant, identification.first_wrong) == (True, None)


def test_tokens_after_unexplained_keys_are_read() -> None:
    rotary = ROTARIES["mrope"][0]
    ids = np.tile(np.arange(700), (3, 1))
    keys = rotated(rotary, ids)
    keys[301:309] = rotated(rotary, ids[:, 301:309], theta=5e5)
    reading = read(keys.astype(np.float32), rotary)
    assert np.flatnonzero(~reading.known.all(axis=0)).tolist() == list(range(301, 309))


def test_ids_that_slow_pairs_do_not_separate_are_counted_as_unknown() -> None:
    rotary = Rotary(128, 1e6, allocation="sections", mrope_section=[16, 24, 24])
    table = place(PROMPT, "mrope")
    diagnosis = check(read(torch.tensor(rotated(rotary, table.dense())).bfloat16(), rotary), table)
    assert (diagnosis.equal, diagnosis.num_tokens, diagnosis.unknown_tokens) == (True, 0, 120)
    assert str(diagnosis) == "All ids that could be read are those of mrope. The ids of 120 tokens could not be read."


@pytest.mark.parametrize(("name", "dtype"), KINDS)
@pytest.mark.parametrize(("at", "amount"), [(27, 1), (60, 2), (90, -3), (100, 5)])
def test_no_rotation_is_blamed_for_a_constant_offset_in_ids(at: int, amount: int, name: str, dtype: str) -> None:
    rotary, documents, ids = meant(name)
    applied = ids + amount * (np.arange(ids.shape[1]) >= at)
    keys = torch.tensor(rotated(rotary, applied)).to(getattr(torch, dtype))
    identification = identify(keys, rotary, ids)
    assert identification.as_meant or not identification.named, identification.cause
    assert identification.first_wrong == at
    diagnosis = check(read(keys, rotary), documents)
    offset = f"{abs(amount)} too {'large' if amount > 0 else 'small'}"
    cause = f"from the first difference to the end of the document, ids are {offset}"
    assert (diagnosis.token, diagnosis.cause) == (at, cause)


@pytest.mark.parametrize(("name", "dtype"), KINDS)
def test_an_integer_factor_is_identified(name: str, dtype: str) -> None:
    rotary, documents, ids = meant(name)
    for applied, cause in (
        (2 * ids, "ids are 2 times as large as they should be"),
        (3 * ids, "ids are 3 times as large as they should be"),
        (ids // 2, "ids are divided by 2, and rounded down"),
    ):
        keys = torch.tensor(rotated(rotary, applied)).to(getattr(torch, dtype))
        assert check(read(keys, rotary), documents).cause == cause
        identification = identify(keys, rotary, ids)
        if "times" in cause:
            assert identification.cause == f"all ids or all frequencies are {applied[0, 1]} times the intended ones"
        else:
            assert not identification.named


def test_the_next_document_is_not_blamed_for_a_document_that_begins_too_late() -> None:
    """The first document, which contains the reference, counts padding, so the second would begin at -5."""
    rotary, documents = Rotary(64, axes=2), SegmentTable.from_documents([[Text(16)], [Text(16)]])
    ids = np.tile(np.concatenate([5 + np.arange(16), np.arange(16)]), (2, 1))
    for applied, first in ((ids, 0), (np.roll(ids, 16, axis=1), 16)):
        diagnosis = check(read(rotated(rotary, applied), rotary), documents)
        assert (diagnosis.document, diagnosis.token, diagnosis.different_tokens) == (first // 16, 0, 16)
        assert diagnosis.got == (5.0, 5.0)
