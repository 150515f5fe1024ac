"""Packs of a realistic mix of documents: time per document, and how full the packs are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial

import numpy as np

from mmpos.data.examples import Example
from mmpos.data.packing import Pack, PackCounts, Packer, first_fit_decreasing
from mmpos.support.checks import IntArray
from mmpos_bench.cases import Case, Contestant, Later, Options, Role
from mmpos_bench.examples import mix
from mmpos_bench.proofs import equal, holds
from mmpos_bench.timing import Budget

__all__ = ["cases", "packed_counts"]

_SIZES, _MODES = (8192, 4096, 32768), {"whole documents": False, "text split": True}
_BUDGET = Budget(3.0, 5)


def cases(options: Options) -> Iterator[Later]:
    """Streams into packs, with documents whole and cut; and many lengths at once."""
    documents = 200 if options.quick else 20_000
    examples = cache(lambda: list(mix(documents)))
    for max_tokens in _SIZES:
        for mode, split_text in _MODES.items():
            name = f"{max_tokens:,} tokens, {mode}"
            make = partial(_stream, name, examples, max_tokens, split_text, options)
            yield Later("packs of a stream", name, make)
    name = f"{_SIZES[0]:,} tokens"
    yield Later("packs of lengths known at once", name, partial(_at_once, name, examples, options))


def packed_counts(examples: Sequence[Example], max_tokens: int, split_text: bool) -> tuple[PackCounts, int]:
    """Pack with the default buffer; without splitting, longer documents are truncated. Returns the peak buffer too."""
    packer = Packer(max_tokens, split_text=split_text, overlong="truncate")
    held = 0
    for example in examples:
        packer.add(example)
        held = max(held, len(packer.pending))
    return packer.counts, held


def _packs(examples: Sequence[Example], max_tokens: int, split_text: bool) -> tuple[list[Pack], PackCounts]:
    packer = Packer(max_tokens, split_text=split_text, overlong="truncate")
    packs = [pack for example in examples for pack in packer.add(example)]
    return packs + packer.flush(), packer.counts


def _stream(
    name: str, examples: Callable[[], list[Example]], max_tokens: int, split_text: bool, options: Options
) -> Case:
    """The packer, against a copy of all token ids, which it does not read."""
    given = examples()
    lengths = [example.num_tokens for example in given]

    def limit() -> object:
        return np.concatenate([example.sequence.input_ids for example in given])

    def facts() -> Mapping[str, float]:
        counts, held = packed_counts(given, max_tokens, split_text)
        known = {"packs": counts.packs, "cuts": counts.splits, "truncated": counts.truncated, "most held": held}
        return {"fill": counts.fill, "fill in order of arrival": _fill_in_order(lengths, max_tokens), **known}

    contestants = (
        Contestant("copy of the token ids", limit, Role.LIMIT),
        Contestant(
            "mmpos",
            partial(_packs, given, max_tokens, split_text),
            proof=partial(_prove, given, max_tokens, split_text),
        ),
    )
    work = {"documents": len(given), "tokens": sum(lengths)}
    budget = None if options.quick else _BUDGET
    return Case("packs of a stream", name, contestants, work, "documents", budget=budget, facts=facts)


def _prove(examples: list[Example], max_tokens: int, split_text: bool) -> None:
    """No pack is too long; the pieces of a document are the document, but for what was truncated and counted."""
    packs, counts = _packs(examples, max_tokens, split_text)
    longest = max(pack.num_tokens for pack in packs)
    holds(longest <= max_tokens, f"a pack of {longest} tokens", f"at most {max_tokens}")
    pieces: dict[str, list[IntArray]] = {example.key: [example.sequence.input_ids[:0]] for example in examples}
    for pack in packs:
        for piece in pack.examples:
            pieces[piece.key].append(piece.sequence.input_ids)
    lost = 0
    for example in examples:
        found = np.concatenate(pieces[example.key])
        equal(found, example.sequence.input_ids[: found.size])
        lost += example.num_tokens - found.size
    holds(lost == counts.tokens_lost, f"{lost} tokens lost", f"the {counts.tokens_lost} that were counted")


def _at_once(name: str, examples: Callable[[], list[Example]], options: Options) -> Case:
    """First-fit decreasing, against sorting the lengths, with which it begins."""
    max_tokens, count = _SIZES[0], 1000 if options.quick else 100_000
    known = np.minimum([example.num_tokens for example in examples()], max_tokens)
    lengths = np.random.default_rng(0).choice(known, count)

    def prove() -> None:
        groups = first_fit_decreasing(lengths, max_tokens)
        equal(np.sort(np.concatenate(groups)), np.arange(count))
        fullest = max(int(lengths[group].sum()) for group in groups)
        holds(fullest <= max_tokens, f"a pack of {fullest} tokens", f"at most {max_tokens}")

    def facts() -> Mapping[str, float]:
        groups = first_fit_decreasing(lengths, max_tokens)
        return {"fill": float(lengths.sum()) / (len(groups) * max_tokens), "packs": len(groups)}

    contestants = (
        Contestant("sort of the lengths", lambda: np.sort(lengths), Role.LIMIT),
        Contestant("first-fit decreasing", partial(first_fit_decreasing, lengths, max_tokens), proof=prove),
    )
    work = {"documents": count, "tokens": int(lengths.sum())}
    budget = None if options.quick else _BUDGET
    return Case("packs of lengths known at once", name, contestants, work, "documents", budget=budget, facts=facts)


def _fill_in_order(lengths: Sequence[int], max_tokens: int) -> float:
    """Where a pack ends when the next document does not fit."""
    packs, used = 1, 0
    for length in (min(length, max_tokens) for length in lengths):
        if used + length > max_tokens:
            packs, used = packs + 1, 0
        used += length
    return sum(min(length, max_tokens) for length in lengths) / (packs * max_tokens)
