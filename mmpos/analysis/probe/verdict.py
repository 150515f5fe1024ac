"""Judge the keys of a layer: whether its ids and its rotation are as meant, and which kv heads are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from mmpos.analysis.diagnosis.diagnosis import Diagnosis
from mmpos.analysis.probe.check import check
from mmpos.analysis.probe.confidence import ONE_KEY, UNKNOWN, Reading, read
from mmpos.analysis.probe.identify import Identification, identify
from mmpos.analysis.probe.keys import UnwrittenError, as_one_head
from mmpos.analysis.probe.ladder import Flags
from mmpos.analysis.probe.traces import MOST
from mmpos.errors import InvalidInputError
from mmpos.positions.place import place
from mmpos.positions.table import PositionTable
from mmpos.positions.table_rows import FIRST_TOKEN
from mmpos.rotary import Rotary
from mmpos.schemes import Scheme
from mmpos.segments.table import SegmentTable
from mmpos.support.cached import cached_property
from mmpos.support.checks import Array

OTHER = "The keys are not those of reference.npz: other weights, heads, or order of channels."

UNWRITTEN = "the keys were never written"

ONE = 1e-5
"""Most that tokens with one key differ, relative: less than the slowest pairs of M-RoPE turn by one id."""


@dataclass(frozen=True, eq=False)
class Meant:
    """The positions that were meant.

    Args:
        documents: what the keys are of, or (axes, tokens) the integers that the engine was given.
        scheme: of documents.
        start: id of each document's first token.
    """

    documents: SegmentTable | Array
    scheme: Scheme | None = None
    start: int = 0

    @cached_property
    def positions(self) -> PositionTable | Array:
        """The table of documents, or the ids."""
        if isinstance(self.documents, SegmentTable):
            return place(self.documents, self.scheme or "rope-tie", self.start)
        return self.documents

    @property
    def changes(self) -> Flags:
        """(tokens,) whose ids are not those of the first."""
        table = self.positions
        ids = table.dense(dtype=np.float64) if isinstance(table, PositionTable) else table
        return np.asarray((ids != ids[:, :1]).any(axis=0))


@dataclass(frozen=True)
class Verdict:
    """What keys of one layer are beside what was meant.

    Args:
        readings: of all kv heads as one, or of each where heads are judged apart.
        equal: whether ids and rotation are as meant.
        first_wrong: the first token that is not, counted over all rows.
        sentences: the result in words.
        cause: why they are not, in words that are the same for heads with one mistake; None if that is not known.
        wrong_heads: kv heads that are wrong where others are right, or wrong in another way.
        foreign: whether the reference is not that of these keys.
        diagnosis: the ids of all heads as one beside those that were meant; None where they were not compared.
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
        """(readings, axes, tokens) which ids were told."""
        return np.stack([reading.known for reading in self.readings])

    @property
    def unknown_tokens(self) -> int:
        """Tokens of which an id could not be told, though the key may be right."""
        explained = np.stack([reading.explained for reading in self.readings])
        return int((explained & ~self.known.all(axis=1)).any(axis=0).sum())

    @property
    def factor_judged(self) -> bool:
        """Whether the attention factor was judged, by a key that was not turned."""
        return all(reading.reference is None for reading in self.readings)

    @property
    def residual(self) -> float:
        """The most rad that an id leaves unexplained."""
        residual = np.concatenate([reading.residual for reading in self.readings])
        return float(residual[np.isfinite(residual)].max(initial=0))

    def foreign_too(self) -> Verdict:
        """Say that the reference is of other keys."""
        return replace(self, equal=False, sentences=(*self.sentences, OTHER), cause=self.cause or OTHER)


def judge(
    keys: npt.NDArray[Any],
    rotary: Rotary,
    meant: Meant | None = None,
    *,
    lengths: npt.ArrayLike | None = None,
    reference: npt.NDArray[Any] | None = None,
    trusted: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Verdict:
    """Read the keys of a layer and of each kv head, and compare ids and rotation with those that were meant.

    Args:
        keys: as ``read`` takes them, of numpy.
        rotary: the rotation that was meant.
        meant: the positions; None compares nothing.
        lengths: as ``read`` takes them.
        reference: (kv_heads, head_dim) a key that was not turned.
        trusted: whether the reference is known to be that of the keys; else keys that are not like it are read without.
        progress: as ``read`` takes it.

    Raises:
        InvalidInputError: as for ``read`` and ``check``.
    """
    keys, rotary, reference = as_one_head(keys, rotary, reference)
    fits = trusted or reference is None or reference.shape == keys.shape[-2:]
    layer = _Layer(keys, rotary, meant, lengths, reference if fits else None, trusted, foreign=not fits)
    found = layer.judged(progress)
    says_nothing = (reference is None or trusted) and found.readings[0].num_tokens == 1
    if keys.shape[-2] > 1 and rotary.head_axes is None and not says_nothing:
        found = _by_head(layer, found)
    return found.foreign_too() if found.foreign else found


@dataclass(frozen=True, eq=False)
class _Layer:
    """Keys of all heads of a layer, or of one, and what is given with them; see ``judge``.

    Args:
        foreign: whether there was a reference of other keys, which is left out.
    """

    keys: npt.NDArray[Any]
    rotary: Rotary
    meant: Meant | None
    lengths: npt.ArrayLike | None
    reference: npt.NDArray[Any] | None
    trusted: bool
    foreign: bool = False

    def head(self, head: int) -> _Layer:
        """Return one kv head alone, with its row of the reference."""
        here = slice(head, head + 1)
        row = None if self.reference is None else self.reference[here]
        return replace(self, keys=self.keys[..., here, :], reference=row)

    @property
    def tokens(self) -> npt.NDArray[Any]:
        """(tokens, kv_heads, head_dim) keys of all rows that count."""
        rows = self.keys.reshape(-1, *self.keys.shape[-3:])
        if self.lengths is None:
            return rows.reshape(-1, *self.keys.shape[-2:])
        return np.asarray(rows[np.arange(rows.shape[1]) < np.asarray(self.lengths)[:, None]])

    @property
    def written(self) -> Flags:
        """(tokens, kv_heads) which keys are finite numbers, not all zero."""
        tokens = self.tokens
        return np.asarray(np.isfinite(tokens).all(axis=-1) & tokens.any(axis=-1))

    @cached_property
    def identified(self) -> Identification:
        """The rotation that explains the keys."""
        positions = None if self.meant is None else self.meant.positions
        return identify(self.keys, self.rotary, positions, reference=self.reference, lengths=self.lengths)

    @property
    def as_meant(self) -> bool:
        """Whether all keys are those of the rotation and the positions that were meant."""
        try:
            return bool(self.written.any()) and self.identified.as_meant and self.identified.first_wrong is None
        except UnwrittenError:
            return False

    @cached_property
    def verdict(self) -> Verdict:
        """What is said of the keys as one."""
        return self.judged()

    def judged(self, progress: Callable[[int, int], None] | None = None) -> Verdict:
        """Judge heads as one, by the reference where most tokens that were written are like it."""
        try:
            reading = read(self.keys, self.rotary, reference=self.reference, lengths=self.lengths, progress=progress)
        except UnwrittenError as error:
            return self._unwritten(self._unread(), f"{error}.")
        if self.reference is not None and reading.alike.mean() <= MOST:
            written = self.written
            if not written.any():
                return self._unwritten(reading, "All keys are zeros, NaN or infinity: they were never written.")
            like = reading.alike[written.all(axis=1)]
            if not self.trusted and not (like.size and like.mean() > MOST):
                return replace(self, reference=None, foreign=True).judged(progress)
        try:
            return self._compared(reading)
        except InvalidInputError as error:  # of keys in another layout, which the notes see
            raise InvalidInputError(f"{error}; {' '.join(reading.notes)}".rstrip("; ")) from error

    def _unwritten(self, reading: Reading, sentence: str) -> Verdict:
        return Verdict((reading,), False, 0, (sentence,), UNWRITTEN, foreign=self.foreign)

    def _unread(self) -> Reading:
        """Make the reading in which nothing is told, since the token that ids are relative to was never written."""
        rows = self.keys.reshape(-1, *self.keys.shape[-3:])
        lengths = np.full(len(rows), rows.shape[1]) if self.lengths is None else np.asarray(self.lengths)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        tokens, no = int(offsets[-1]), np.zeros(int(offsets[-1]), np.bool_)
        ids, ones = np.full((self.rotary.axes, tokens), UNKNOWN), np.ones(tokens, np.int64)
        return Reading(ids, ones, np.full(tokens, np.nan), np.zeros(ids.shape), no, no, 0, offsets, ())

    def _compared(self, reading: Reading) -> Verdict:
        """Compare a reading with the positions that were meant, and the rotation with its own."""
        meant, notes = self.meant, [note for note in reading.notes if note != ONE_KEY]
        alone = reading.reference is not None and reading.num_tokens == 1  # it is what it is compared with
        diagnosis, wrong, said = None, None, list[str]()
        if meant is None:
            notes.append("Nothing was compared: give --spec or --ids, the positions that were meant.")
        elif reading.known.any() and not alone:
            diagnosis = check(reading, meant.documents, meant.scheme, meant.start)
            wrong, said = diagnosis.token, [*diagnosis.difference]
            if wrong is not None and diagnosis.document and isinstance(meant.positions, PositionTable):
                wrong += int(meant.positions.documents[FIRST_TOKEN, diagnosis.document])
                said.insert(1, f"Counted over all rows, this is token {wrong}.")
            if diagnosis.equal and reading.reference is not None:
                notes.append(f"Ids are relative to token {reading.reference}: what all have too much is not seen.")
        equal, cause = diagnosis is not None and diagnosis.equal, None if diagnosis is None else diagnosis.cause
        verdict = partial(Verdict, (reading,), foreign=self.foreign, diagnosis=diagnosis)
        if not equal and not alone and self._one_key(reading):
            if wrong is None and meant is not None:
                wrong = int(meant.changes.argmax())
            notes += [ONE_KEY, "To do: dump keys as they enter the cache, after their rotation."]
            return verdict(False, wrong, (*said, *notes), ONE_KEY)
        if not alone:
            identified = self.identified  # ids may be read through a wrong rotation
            first, other = identified.first_wrong, identified.named and not identified.as_meant
            earlier = first is not None and (wrong is None or first < wrong)
            differs = diagnosis is not None and not diagnosis.equal
            equal = equal and identified.as_meant and first is None
            wrong = first if earlier else wrong
            if other or earlier or (not differs and (not equal or reading.notes)):
                notes.append(str(identified))
            if other:  # the cause in the ids is what they look like through the rotation that was meant
                return verdict(equal, wrong, (*said, *notes), identified.kind)
        if diagnosis is not None:
            said += diagnosis.explanation
        return verdict(equal, wrong, (*said, *notes), cause)

    def _one_key(self, reading: Reading) -> bool:
        """Tell whether tokens have one key, also where its pairs are too few to tell ids, though ids should differ."""
        if reading.known.all():
            return reading.num_tokens > 1 and bool((reading.position_ids == reading.position_ids[:, :1]).all())
        if self.meant is None or self.meant.changes.size != reading.num_tokens or not self.meant.changes.any():
            return False
        tokens = self.tokens
        first = tokens[0].astype(np.float64)
        off = ((tokens - first) ** 2).mean(axis=(1, 2))
        return bool((off <= ONE**2 * (first**2).mean()).all())


def _by_head(layer: _Layer, whole: Verdict) -> Verdict:
    """Judge each kv head alone, and name those that are wrong where not all are, or not for one cause."""
    heads = [layer.head(head) for head in range(layer.keys.shape[-2])]
    if layer.meant is None:
        if not whole.foreign or all(head.verdict.foreign for head in heads):
            return whole
        return replace(whole, foreign=False, sentences=("Kv heads were not turned alike.", *whole.sentences))
    found = {number: head.verdict for number, head in enumerate(heads) if not head.as_meant}
    apart = [number for number, one in found.items() if one.foreign]
    foreign = whole.foreign and (layer.reference is None or len(apart) == len(heads))
    if not foreign:
        found |= {number: found[number].foreign_too() for number in apart}
    causes: dict[str | None, list[int]] = {}
    for number, one in found.items():
        if not one.equal:
            causes.setdefault(one.cause, []).append(number)
    wrong = sorted(number for some in causes.values() for number in some)
    of_one_cause = whole.cause not in (None, UNWRITTEN) or len(causes) == 1
    if not wrong or (whole.foreign == foreign and len(wrong) == len(heads) and of_one_cause):
        return replace(whole, foreign=foreign)
    sentences = []
    for some in causes.values():
        names = f"{'head' if len(some) == 1 else 'heads'} {', '.join(map(str, some))}"
        sentences += [f"Of {len(heads)} kv heads, {names} alone:", *found[some[0]].sentences]
    first = min((at for number in wrong if (at := found[number].first_wrong) is not None), default=None)
    readings = tuple(reading for head in heads for reading in head.verdict.readings)
    cause = next(iter(causes)) if len(causes) == 1 else None
    return Verdict(readings, False, first, tuple(sentences), cause, tuple(wrong), foreign)
