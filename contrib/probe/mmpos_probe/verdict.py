"""Verdicts on the keys of a layer: whether its ids and its rotation are as intended, and which kv heads differ."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial  # noqa: TID251  # no data loader forks while it probes
from typing import Any

import numpy as np
import numpy.typing as npt

from mmpos import Diagnosis, PositionTable, Scheme, SegmentTable, place
from mmpos.errors import InvalidInputError
from mmpos.rotary import Rotary
from mmpos_probe.check import check
from mmpos_probe.confidence import ONE_KEY, UNKNOWN, Reading, read
from mmpos_probe.identify import Identification, identify
from mmpos_probe.keys import UnwrittenError
from mmpos_probe.traces import MOST
from mmpos_probe.words import Array, Flags

OTHER = "The keys do not belong to reference.npz: weights, heads or the order of channels differ."

UNWRITTEN = "the keys were never written"

ONE = 1e-5
"""Largest relative difference between keys that count as equal; one id rotates even M-RoPE's slowest pairs by more."""


@dataclass(frozen=True, eq=False)
class Meant:
    """The intended positions.

    Args:
        documents: the documents of the keys, or the ids that were passed to the engine, as (axes, tokens) integers.
        scheme: the scheme of the documents; None means "rope-tie".
        start: id of each document's first token.
    """

    documents: SegmentTable | Array
    scheme: Scheme | None = None
    start: int = 0

    @cached_property
    def positions(self) -> PositionTable | Array:
        """The placed documents, or the ids."""
        if isinstance(self.documents, SegmentTable):
            return place(self.documents, self.scheme or "rope-tie", self.start)
        return self.documents

    @property
    def changes(self) -> Flags:
        """(tokens,) whether a token's ids differ from those of the first token."""
        table = self.positions
        ids = table.dense(dtype=np.float64) if isinstance(table, PositionTable) else table
        return np.asarray((ids != ids[:, :1]).any(axis=0))


@dataclass(frozen=True)
class Verdict:
    """The result of comparing the keys of one layer with the intended positions and rotation.

    Args:
        readings: one reading of all kv heads, or one for each head if heads are judged separately.
        equal: whether ids and rotation are as intended.
        first_wrong: the first wrong token, counted over all documents.
        sentences: the result in sentences.
        cause: the cause, worded alike for heads with the same mistake; None if it is unknown.
        wrong_heads: wrong kv heads, if other heads are right, or wrong for another reason.
        foreign: whether the reference belongs to other keys.
        diagnosis: the diagnosis of the ids of all heads; None if ids were not compared.
    """

    readings: tuple[Reading, ...]
    equal: bool
    first_wrong: int | None
    sentences: tuple[str, ...]
    cause: str | None = None
    wrong_heads: tuple[int, ...] = ()
    foreign: bool = False
    diagnosis: Diagnosis | None = None

    @property
    def known(self) -> Flags:
        """(readings, axes, tokens) whether an id is known."""
        return np.stack([reading.known for reading in self.readings])

    @property
    def unknown_tokens(self) -> int:
        """Number of tokens with an unknown id whose key may be right."""
        explained = np.stack([reading.explained for reading in self.readings])
        return int((explained & ~self.known.all(axis=1)).any(axis=0).sum())

    @property
    def factor_judged(self) -> bool:
        """Whether the attention factor was judged, which requires an unrotated reference key."""
        return all(reading.reference is None for reading in self.readings)

    @property
    def residual(self) -> float:
        """The largest residual in rad."""
        residual = np.concatenate([reading.residual for reading in self.readings])
        return float(residual[np.isfinite(residual)].max(initial=0))

    def as_foreign(self) -> Verdict:
        """Return the verdict with the note that the reference belongs to other keys."""
        return replace(self, equal=False, sentences=(*self.sentences, OTHER), cause=self.cause or OTHER)


def judge(
    keys: npt.NDArray[Any],
    rotary: Rotary,
    meant: Meant,
    *,
    reference: npt.NDArray[Any] | None = None,
    trusted: bool = True,
) -> Verdict:
    """Read the keys of a layer and of each kv head, and compare ids and rotation with the intended ones.

    Args:
        keys: (tokens, kv_heads, head_dim) as for ``read``, as a numpy array.
        rotary: the intended rotation.
        meant: the intended positions.
        reference: (kv_heads, head_dim) an unrotated key.
        trusted: whether the reference is known to belong to the keys; if False, it is ignored for keys unlike it.

    Raises:
        InvalidInputError: as for ``read`` and ``check``.
    """
    fits = trusted or reference is None or reference.shape == keys.shape[-2:]
    layer = _Layer(keys, rotary, meant, reference if fits else None, trusted, foreign=not fits)
    verdict = layer.judged()
    undecidable = (reference is None or trusted) and verdict.readings[0].num_tokens == 1
    if keys.shape[-2] > 1 and not undecidable:
        verdict = _by_head(layer, verdict)
    return verdict.as_foreign() if verdict.foreign else verdict


@dataclass(frozen=True, eq=False)
class _Layer:
    """Keys of all heads of a layer, or of one head, with the arguments of ``judge``.

    Args:
        foreign: whether a reference that belongs to other keys was dropped.
    """

    keys: npt.NDArray[Any]
    rotary: Rotary
    meant: Meant
    reference: npt.NDArray[Any] | None
    trusted: bool
    foreign: bool = False

    def head(self, head: int) -> _Layer:
        """Return the layer with one kv head only, and its row of the reference."""
        here = slice(head, head + 1)
        row = None if self.reference is None else self.reference[here]
        return replace(self, keys=self.keys[:, here], reference=row)

    @property
    def written(self) -> Flags:
        """(tokens, kv_heads) whether a key is finite and not all zero."""
        return np.asarray(np.isfinite(self.keys).all(axis=-1) & self.keys.any(axis=-1))

    @cached_property
    def identified(self) -> Identification:
        """The rotation that explains the keys."""
        positions = self.meant.positions
        return identify(self.keys, self.rotary, positions, reference=self.reference)

    @property
    def as_meant(self) -> bool:
        """Whether all keys have the intended rotation and positions."""
        try:
            return bool(self.written.any()) and self.identified.as_meant and self.identified.first_wrong is None
        except UnwrittenError:
            return False

    @cached_property
    def verdict(self) -> Verdict:
        """The verdict on all heads together."""
        return self.judged()

    def judged(self) -> Verdict:
        """Judge all heads together, with the reference if most written tokens resemble it."""
        try:
            reading = read(self.keys, self.rotary, reference=self.reference)
        except UnwrittenError as error:
            return self._unwritten(self._unread(), f"{error}.")
        if self.reference is not None and reading.alike.mean() <= MOST:
            written = self.written
            if not written.any():
                return self._unwritten(reading, "All keys are zeros, NaN or infinity: they were never written.")
            like = reading.alike[written.all(axis=1)]
            if not self.trusted and not (like.size and like.mean() > MOST):
                return replace(self, reference=None, foreign=True).judged()
        try:
            return self._compared(reading)
        except InvalidInputError as error:  # the keys have another layout, which the notes mention
            raise InvalidInputError(f"{error}; {' '.join(reading.notes)}".rstrip("; ")) from error

    def _unwritten(self, reading: Reading, sentence: str) -> Verdict:
        return Verdict((reading,), False, 0, (sentence,), UNWRITTEN, foreign=self.foreign)

    def _unread(self) -> Reading:
        """Return a reading without known ids, for a reference token that was never written."""
        tokens, false = len(self.keys), np.zeros(len(self.keys), np.bool_)
        ids, ones = np.full((self.rotary.axes, tokens), UNKNOWN), np.ones(tokens, np.int64)
        return Reading(ids, ones, np.full(tokens, np.nan), np.zeros(ids.shape), false, false, 0, ())

    def _compared(self, reading: Reading) -> Verdict:
        """Compare a reading with the intended positions, and the keys with the intended rotation."""
        meant, notes = self.meant, [note for note in reading.notes if note != ONE_KEY]
        alone = reading.reference is not None and reading.num_tokens == 1  # the only token is the reference
        diagnosis, wrong, sentences = None, None, list[str]()
        if reading.known.any() and not alone:
            diagnosis = check(reading, meant.documents, meant.scheme, meant.start)
            wrong, sentences = diagnosis.token, [*diagnosis.difference]
            if wrong is not None and diagnosis.document and isinstance(meant.positions, PositionTable):
                wrong += int(meant.positions.cu_seqlens[diagnosis.document])
                sentences.insert(1, f"Counted over all documents, this is token {wrong}.")
            if diagnosis.equal and reading.reference is not None:
                notes.append(f"Ids are relative to token {reading.reference}: an offset of all ids cannot be seen.")
        equal, cause = diagnosis is not None and diagnosis.equal, None if diagnosis is None else diagnosis.cause
        verdict = partial(Verdict, (reading,), foreign=self.foreign, diagnosis=diagnosis)
        if not equal and not alone and self._one_key(reading):
            if wrong is None:
                wrong = int(meant.changes.argmax())
            notes += [ONE_KEY, "To do: dump keys as they enter the cache, after their rotation."]
            return verdict(False, wrong, (*sentences, *notes), ONE_KEY)
        if not alone:
            identified = self.identified  # ids may be read through a wrong rotation
            first, other = identified.first_wrong, identified.named and not identified.as_meant
            earlier = first is not None and (wrong is None or first < wrong)
            differs = diagnosis is not None and not diagnosis.equal
            equal = equal and identified.as_meant and first is None
            wrong = first if earlier else wrong
            if other or earlier or (not differs and (not equal or reading.notes)):
                notes.append(str(identified))
            if other:  # the cause in the ids is an artefact of reading them with the intended rotation
                return verdict(equal, wrong, (*sentences, *notes), identified.kind)
        if diagnosis is not None:
            sentences += diagnosis.explanation
        return verdict(equal, wrong, (*sentences, *notes), cause)

    def _one_key(self, reading: Reading) -> bool:
        """Return whether all tokens have one key although their ids should differ, even if ids cannot be read."""
        if reading.known.all():
            return reading.num_tokens > 1 and bool((reading.position_ids == reading.position_ids[:, :1]).all())
        if self.meant.changes.size != reading.num_tokens or not self.meant.changes.any():
            return False
        first = self.keys[0].astype(np.float64)
        off = ((self.keys - first) ** 2).mean(axis=(1, 2))
        return bool((off <= ONE**2 * (first**2).mean()).all())


def _by_head(layer: _Layer, together: Verdict) -> Verdict:
    """Judge each kv head separately, and name the wrong ones unless all are wrong for the same reason."""
    heads = [layer.head(head) for head in range(layer.keys.shape[-2])]
    verdicts = {number: head.verdict for number, head in enumerate(heads) if not head.as_meant}
    foreign_heads = [number for number, verdict in verdicts.items() if verdict.foreign]
    foreign = together.foreign and (layer.reference is None or len(foreign_heads) == len(heads))
    if not foreign:
        verdicts |= {number: verdicts[number].as_foreign() for number in foreign_heads}
    causes: dict[str | None, list[int]] = {}
    for number, verdict in verdicts.items():
        if not verdict.equal:
            causes.setdefault(verdict.cause, []).append(number)
    wrong = sorted(number for numbers in causes.values() for number in numbers)
    one_cause = together.cause not in (None, UNWRITTEN) or len(causes) == 1
    if not wrong or (together.foreign == foreign and len(wrong) == len(heads) and one_cause):
        return replace(together, foreign=foreign)
    sentences = []
    for numbers in causes.values():
        names = f"{'head' if len(numbers) == 1 else 'heads'} {', '.join(map(str, numbers))}"
        sentences += [f"Kv {names} (of {len(heads)}):", *verdicts[numbers[0]].sentences]
    first = min((at for number in wrong if (at := verdicts[number].first_wrong) is not None), default=None)
    readings = tuple(reading for head in heads for reading in head.verdict.readings)
    cause = next(iter(causes)) if len(causes) == 1 else None
    return Verdict(readings, False, first, tuple(sentences), cause, tuple(wrong), foreign)
