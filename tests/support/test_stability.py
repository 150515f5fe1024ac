"""Files in tests/golden/stability, written by an earlier commit, have the values that docs/stability.md promises.

``PYTHONPATH=tests/helpers python tests/support/test_stability.py`` writes the files again, which is right only with a
new number of a format. The tests of each room show that it refuses other numbers.
"""

from __future__ import annotations

import json
import pickle
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

import mmpos
from mmpos import Grid, SegmentTable, Text, data, rotary
from mmpos.schemes import RopeTieV2
from mmpos.segments import Audio, Clip, Thumbnail, Tile

GOLDEN = Path(__file__).parents[1] / "golden" / "stability"
STORED = "memory://stability/sequences.parquet"
KEYS = ["pixels", "sizes", "text", "separators"]
VIDEO: list[Any] = [Text(3), Grid(2, 3, frames=2, seconds_per_frame=Fraction(1, 3)), Audio(2)]
KINDS: list[Any] = [VIDEO, [Text(1), Clip(1, 1, frames=3, audio=20, seconds_per_frame=Fraction(2, 3)), Text(1)]]


def positions() -> mmpos.PositionTable:
    return mmpos.place(SegmentTable.from_documents(KINDS), "tmrope-qwen3", start=[5, 0]).slice(2, 30)


def examples() -> list[Any]:
    tokenizer = mmpos.ByteTokenizer(("[IMG]", "[/IMG]", "[PATCH]", "[ROW]"))
    images = mmpos.ImageProcessor("pillow", patch_size=2, min_pixels=16)
    photo = np.arange(96, dtype=np.uint8).reshape(4, 8, 3)
    documents: list[list[object]] = [["a", photo], [Grid(2, 3), "b"], ["é"], ["a", Grid(2, 1)]]
    built = []
    for key, parts in zip(KEYS, documents, strict=True):
        markers = mmpos.Markers(row="[ROW]" if key == "separators" else None)
        sequence = mmpos.SequenceBuilder(tokenizer, images, scheme="rope-tie-v2", markers=markers).build(parts)
        built.append(data.Example(key, sequence, sequence.input_ids))
    return built


def loader() -> Any:
    shards, packer = [data.SequenceShard(GOLDEN / "sequences.parquet")], data.Packer(max_tokens=10, buffer=2)
    return data.RankLoader(data.BatchDataset(shards, data.get_example, packer, None, seed=3, shuffle=2))


def objects() -> list[object]:
    qwen = rotary.Rotary(64, axes=3, allocation="sections", mrope_section=[8, 12, 12], scaling=rotary.Linear(4.0))
    segments = SegmentTable.from_documents([*KINDS, [Thumbnail(1, 3), Tile(1, 2, tokens_after=1), Text(2)]])
    return [positions(), segments, examples(), RopeTieV2(rounding="floor"), qwen]


def messages() -> dict[str, Any]:
    from mmpos.rpc.positions import put_query, put_table
    from mmpos.rpc.sequences import put_sequence
    from mmpos.rpc.v1 import positions_pb2, sequences_pb2, table_pb2

    query, table, sequence = positions_pb2.PositionsQuery(), table_pb2.PositionTable(), sequences_pb2.Sequence()
    views, dense = (mmpos.client.Decode(2), mmpos.client.Window([0], [1], [9])), mmpos.client.Dense(axes=(0, 0, 1))
    source = SegmentTable.from_documents(KINDS)
    put_query(query, mmpos.client.PositionsQuery(source, "tmrope", 7, views=views, dense=dense))
    put_table(table, positions())
    put_sequence(sequence, examples()[0].sequence)
    return {"query": query, "table": table, "sequence": sequence}


def test_files_states_pickles_and_messages_are_read() -> None:
    import fsspec
    from results import assert_equal

    from mmpos.rpc.positions import get_table
    from mmpos.rpc.sequences import get_sequence

    shard = data.SequenceShard(GOLDEN / "sequences.parquet")
    assert_equal(list(shard.examples()), examples())
    assert shard.errors() == {"broken": "no image"}
    fsspec.filesystem("memory").pipe(STORED, (GOLDEN / "sequences.parquet").read_bytes())
    packs = [[example.key for example in one.pack.examples] for (one,) in data.PlannedPacks(GOLDEN / "plan.parquet", 0)]
    assert packs == [KEYS]
    assert_equal(pickle.loads((GOLDEN / "objects.pickle").read_bytes()), objects())
    read = {name: type(m).FromString((GOLDEN / f"{name}.binpb").read_bytes()) for name, m in messages().items()}
    assert read == messages()
    assert_equal(get_table("table", read["table"]), positions())
    assert_equal(get_sequence("sequence", read["sequence"]), examples()[0].sequence)
    resumed = loader()
    resumed.load_state_dict(json.loads((GOLDEN / "state.json").read_text(encoding="utf-8")))
    assert_equal(list(resumed), list(loader())[1:])


def test_fingerprints_and_block_keys_are_unchanged() -> None:
    positions = mmpos.place(SegmentTable.from_documents([VIDEO, [Text(4)]]), "mrope")
    assert mmpos.fingerprint(positions) == [
        "mmpos2:8cd1d63f5fafdf9eba8de9b2280632a2",
        "mmpos2:0049910ea465d8696c60b7aba3c4181d",
    ]
    assert [key.hex() for key in examples()[0].sequence.block_keys(2, salt=b"a")] == [
        "8d919df0735bb1c0d1edaffb8e3c38beca25599d5fc64b27d16fddbe1c0ed5c1",
        "48f77e57d11d71b3e3e57deafbe02acbe54405d3f307dc64be08e79b356a9a28",
    ]


if __name__ == "__main__":
    import fsspec

    from mmpos.data.planner.index import read_headers

    with data.SequenceWriter(GOLDEN / "sequences.parquet") as writer:
        for example in examples():
            writer.write(example)
        writer.refuse("broken", "no image")
    fsspec.filesystem("memory").pipe(STORED, (GOLDEN / "sequences.parquet").read_bytes())
    shards = [data.SequenceShard(STORED)]
    plan = data.plan(read_headers(shards), max_tokens=32, ranks=1, window=4)
    data.write_index(GOLDEN / "plan.parquet", plan, shards)
    next(iter(rank := loader()))
    (GOLDEN / "state.json").write_text(json.dumps(rank.state_dict(), indent=1) + "\n", encoding="utf-8")
    (GOLDEN / "objects.pickle").write_bytes(pickle.dumps(objects(), protocol=5))
    for name, message in messages().items():
        (GOLDEN / f"{name}.binpb").write_bytes(message.SerializeToString(deterministic=True))
