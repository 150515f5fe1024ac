"""Training data: collate and pack examples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial

import numpy as np

from mmpos.segments.kinds import Grid
from mmpos.sequence.builder import SequenceBuilder
from mmpos.support.checks import IntArray, counted
from mmpos.support.extras import needed_for
from mmpos_bench.proofs import equal, holds
from mmpos_bench.suites import Comparison, Contestant, Lineup, Role, SuiteOptions, giving, limit
from mmpos_bench.timing import Budget, one_thread

with needed_for("the data suite", extra="data"):
    import torch
    from torch import Tensor

    from mmpos.data import PackedCollator, Packer, PaddedCollator
    from mmpos.data.batch import Batch
    from mmpos.data.examples import IGNORE_INDEX, Example
    from mmpos.data.packing import PackCounts

_SIZES, _MODES = (8192, 32768), {"whole documents": False, "text split": True}
_PACKING = Budget(3.0, 5)
_BUILDER = SequenceBuilder()

Loop = tuple[Tensor, Tensor, Tensor, Tensor]


def cases(options: SuiteOptions) -> Iterator[Comparison]:
    """Yield every case, running on one thread."""
    with one_thread():
        yield from _collating(options)
        yield from _packing(options)


def labelled(key: str, parts: Sequence[object]) -> Example:
    """Build an example whose labels include all of its text."""
    sequence = _BUILDER.build(list(parts))
    return Example(key, sequence, np.where(sequence.token_type_ids == 1, IGNORE_INDEX, sequence.input_ids))


def evenly(documents: int, tokens: int, images: int, side: int) -> list[Example]:
    """Build documents of equal length with evenly spaced square images."""
    text = np.arange(tokens - images * (side * side + 2)) % 250
    parts = [part for piece in np.array_split(text, images + 1) for part in (piece, Grid(side, side))][:-1]
    return [labelled(f"d{i}", parts) for i in range(documents)]


def mix(documents: int, seed: int = 0) -> Iterator[Example]:
    """Yield a realistic mix of documents that depends only on the seed.

    The text length is log-normal (median 500 tokens, sigma 1). Each text contains 0 to 8 images (uniform) at random
    places, each with 64 to 1024 tokens (log-uniform) plus two markers.
    """
    rng = np.random.default_rng(seed)
    for i in range(documents):
        text = rng.integers(0, 250, max(1, int(rng.lognormal(np.log(500), 1.0))))
        tokens = np.exp(rng.uniform(np.log(64), np.log(1024), rng.integers(0, 9)))
        sides = [(int(n**0.5), int(n / int(n**0.5))) for n in tokens]
        cuts = np.sort(rng.integers(0, text.size + 1, len(sides)))
        parts: list[object] = [text[: cuts[0]] if sides else text]
        for (height, width), piece in zip(sides, np.split(text, cuts)[1:], strict=True):
            parts += [Grid(height, width), piece]
        yield labelled(f"m{i}", parts)


def _collating(options: SuiteOptions) -> Iterator[Comparison]:
    """Yield cases with a few documents and a case with the batch of one training step."""
    for documents in (1, 4) if options.quick else (1, 4, 16):
        name = f"{counted(documents, 'document')} of 1,024 tokens, 2 images of 16×16 each"
        make = partial(evenly, documents, 1024, 2, 16)
        yield Comparison("small, collate", name, partial(_collated, make, options), "documents")
    documents, tokens, images, side = (4, 64, 2, 4) if options.quick else (32, 8192, 16, 16)
    name = f"{documents} documents of {tokens:,} tokens, {images} images of {side}×{side} each"
    make = partial(evenly, documents, tokens, images, side)
    yield Comparison("collate", name, partial(_collated, make, options), "documents")


def _collated(make: Callable[[], list[Example]], options: SuiteOptions) -> Lineup:
    """Line up batches with dense ids (for models without tables) and the individual stages of collating."""
    examples = make()
    packed, padded = PackedCollator(), PaddedCollator()
    want = collate_loop(examples)

    def ids(collate: Callable[[list[Example]], Batch]) -> tuple[Batch, Tensor]:
        batch = collate(examples)
        return batch, batch.position_ids()

    def flat(batch: Batch, positions: Tensor | None = None) -> Loop:
        # Since all documents have the same length, packed and padded batches contain the same numbers.
        positions = batch.position_ids() if positions is None else positions
        return batch.input_ids.view(-1), batch.labels.view(-1), positions.flatten(1), batch.cu_seqlens

    part = partial(giving, role=Role.PART)
    contestants = [
        limit("copies into new tensors", lambda: [tensor.clone() for tensor in want]),
        giving("packed, and ids", partial(ids, packed), want, read=lambda result: flat(*result)),
        giving("padded, and ids", partial(ids, padded), want, read=lambda result: flat(*result)),
        part("packed", partial(packed, examples), want, read=flat),
        part("padded", partial(padded, examples), want, read=flat),
    ]
    if options.peers:
        contestants.append(giving("plain loop, and ids", partial(collate_loop, examples), want, Role.PEER))
    work = {"documents": len(examples), "tokens": want[0].numel(), "bytes": sum(tensor.nbytes for tensor in want)}
    return Lineup(contestants, work)


def collate_loop(examples: Sequence[Example]) -> Loop:
    """Pack a batch and its ids with a plain torch loop over documents.

    Returns:
        (tokens,) token ids and labels, (axes, tokens) position ids, and (documents + 1,) document offsets.
    """
    ids, labels, positions, cu_seqlens = [], [], [], [0]
    for example in examples:
        ids.append(torch.from_numpy(example.sequence.input_ids))
        labels.append(torch.tensor(example.labels))
        labels[-1][0] = IGNORE_INDEX
        positions.append(torch.from_numpy(example.sequence.positions.dense()))
        cu_seqlens.append(cu_seqlens[-1] + example.num_tokens)
    return torch.cat(ids), torch.cat(labels), torch.cat(positions, dim=1), torch.tensor(cu_seqlens, dtype=torch.int32)


def _packing(options: SuiteOptions) -> Iterator[Comparison]:
    """Yield cases that pack a stream of documents, with and without splitting text."""
    documents = 200 if options.quick else 20_000
    examples = cache(lambda: list(mix(documents)))
    for max_tokens in _SIZES:
        for mode, split_text in _MODES.items():
            name, line_up = f"{max_tokens:,} tokens, {mode}", partial(_stream, examples, max_tokens, split_text)
            yield Comparison("packs of a stream", name, line_up, "documents", budget=_PACKING)


def _packer(max_tokens: int, split_text: bool) -> Packer:
    """Build a packer with the default buffer, which truncates overlong documents unless it splits text."""
    return Packer(max_tokens, split_text=split_text, overlong="truncate")


def packed_counts(examples: Sequence[Example], max_tokens: int, split_text: bool) -> tuple[PackCounts, int]:
    """Pack examples and return the packer's counts and the maximum number of buffered examples."""
    packer = _packer(max_tokens, split_text)
    held = 0
    for example in examples:
        packer.add(example)
        held = max(held, len(packer.pending))
    return packer.counts, held


def _stream(examples: Callable[[], list[Example]], max_tokens: int, split_text: bool) -> Lineup:
    """Line up the packer, with a copy of all token ids as the limit, even though the packer does not read token ids."""
    documents = examples()
    lengths = [example.num_tokens for example in documents]

    def pack() -> object:
        packer = _packer(max_tokens, split_text)
        return [pack for example in documents for pack in packer.add(example)] + packer.flush()

    def facts() -> Mapping[str, float]:
        counts, held = packed_counts(documents, max_tokens, split_text)
        totals = {"packs": counts.packs, "cuts": counts.splits, "truncated": counts.truncated, "most held": held}
        return {"fill": counts.fill, "fill in order of arrival": _fill_in_order(lengths, max_tokens), **totals}

    prove = partial(_prove_packs, documents, max_tokens, split_text)
    contestants = (
        limit("copy of the token ids", lambda: np.concatenate([x.sequence.input_ids for x in documents])),
        Contestant("mmpos", pack, proof=prove),
    )
    return Lineup(contestants, {"documents": len(documents), "tokens": sum(lengths)}, facts)


def _prove_packs(examples: list[Example], max_tokens: int, split_text: bool) -> None:
    """Check that no pack is too long and that each document equals its joined pieces, except for truncated tokens."""
    packer = _packer(max_tokens, split_text)
    packs = [pack for example in examples for pack in packer.add(example)] + packer.flush()
    longest = max(pack.num_tokens for pack in packs)
    holds(longest <= max_tokens, f"a pack of {longest} tokens", f"at most {max_tokens}")
    pieces: defaultdict[str, list[IntArray]] = defaultdict(list)
    for piece in (piece for pack in packs for piece in pack.examples):
        pieces[piece.key].append(piece.sequence.input_ids)
    lost = 0
    for example in examples:
        input_ids = example.sequence.input_ids
        joined = np.concatenate([input_ids[:0], *pieces[example.key]])
        equal(joined, input_ids[: joined.size])
        lost += input_ids.size - joined.size
    holds(lost == packer.counts.tokens_lost, f"{lost} tokens lost", f"{packer.counts.tokens_lost} as counted")


def _fill_in_order(lengths: Sequence[int], max_tokens: int) -> float:
    """Compute how full packs are if each is closed when the next document does not fit."""
    packs, used = 1, 0
    lengths = [min(length, max_tokens) for length in lengths]
    for length in lengths:
        if used + length > max_tokens:
            packs, used = packs + 1, 0
        used += length
    return sum(lengths) / (packs * max_tokens)
