"""Examples into batches, against a copy of what a batch consists of, and a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from mmpos.data.batch import Batch
from mmpos.data.collate import PackedCollator, PaddedCollator
from mmpos.data.examples import Example
from mmpos.positions.table import PositionTable
from mmpos.support.checks import counted
from mmpos_bench.cases import Case, Contestant, Later, Options, Point, Role
from mmpos_bench.examples import evenly
from mmpos_bench.peers.collate_loop import collate_loop
from mmpos_bench.proofs import equal

__all__ = ["cases"]

Loop = tuple[Tensor, Tensor, Tensor, Tensor]


def cases(options: Options) -> Iterator[Later]:
    """A batch of a training step, and batches of more and more documents."""
    documents, tokens, images, side = (4, 64, 2, 4) if options.quick else (32, 8192, 16, 16)
    name = f"{documents} documents of {tokens:,} tokens, {images} images of {side}×{side} each"
    make = partial(evenly, documents, tokens, images, side)
    yield Later("collate", name, partial(_case, "collate", name, make, options))
    for count in (1, 4) if options.quick else (1, 4, 16, 64, 256):
        make = partial(evenly, count, *((64, 2, 4) if options.quick else (2048, 4, 16)))
        group, name = "collate over documents", counted(count, "document")
        yield Later(group, name, partial(_case, group, name, make, options, Point("documents of a batch", count)))


def _case(
    group: str, name: str, make: Callable[[], list[Example]], options: Options, point: Point | None = None
) -> Case:
    """Batches with their dense ids, as a model that knows no tables takes them; and the stages."""
    examples = make()
    packed, padded, sharded = PackedCollator(), PaddedCollator(), PackedCollator(multiple_of=4)(examples)
    loop, tables = collate_loop(examples), [example.sequence.positions for example in examples]

    def ids(collate: Callable[[list[Example]], Batch]) -> tuple[Batch, Tensor]:
        batch = collate(examples)
        return batch, batch.position_ids()

    def both(collate: Callable[[list[Example]], Batch]) -> None:
        batch, found = ids(collate)
        _same(batch, found, loop)

    contestants = [
        Contestant("copies into new tensors", lambda: [tensor.clone() for tensor in loop], Role.LIMIT),
        Contestant("packed, and ids", partial(ids, packed), proof=partial(both, packed)),
        Contestant("padded, and ids", partial(ids, padded), proof=partial(both, padded)),
        Contestant("packed", partial(packed, examples), Role.PART, partial(both, packed)),
        Contestant("padded", partial(padded, examples), Role.PART, partial(both, padded)),
        Contestant(
            "tables joined",
            partial(PositionTable.concatenate, tables),
            Role.PART,
            lambda: equal(PositionTable.concatenate(tables).dense(), loop[2]),
        ),
        Contestant("one of two shards", partial(sharded.shard, 0, 2), Role.PART, partial(_shards, sharded)),
    ]
    if options.peers.get("plain loop", "collate_loop"):
        loops = partial(collate_loop, examples)
        contestants.append(Contestant("plain loop, and ids", loops, Role.PEER, lambda: _equal(loops(), loop)))
    work = {"documents": len(examples), "tokens": loop[0].numel(), "bytes": sum(tensor.nbytes for tensor in loop)}
    return Case(group, name, tuple(contestants), work, "documents", point)


def _same(batch: Batch, ids: Tensor, loop: Loop) -> None:
    """Documents of equal length are the same numbers packed and padded."""
    _equal((batch.input_ids.view(-1), batch.labels.view(-1), ids.flatten(1), batch.cu_seqlens), loop)


def _equal(got: Loop, want: Loop) -> None:
    for one, other in zip(got, want, strict=True):
        equal(one, other)


def _shards(whole: Batch) -> None:
    """Each rank has the first and the last, or the second and the third quarter of every document."""
    quarters = whole.input_ids.view(len(whole.keys), 4, -1)
    for rank in range(2):
        found = whole.shard(rank, 2).input_ids.view(len(whole.keys), 2, -1)
        equal(found, quarters[:, [rank, 3 - rank]])
