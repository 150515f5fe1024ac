"""Preprocessed sequences: read back unchanged from Parquet files, and made from records by a stage of any engine."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import datasets
import numpy as np
import pyarrow as pa
import pytest
from data_corpus import photo
from pyarrow import parquet
from refusals import assert_refused
from results import assert_equal
from test_data_examples import SPOKEN, TILED, spoken

from mmpos import Grid, ImageProcessor, InvalidInputError, SegmentTable, SequenceBuilder, Text, UnsupportedError, place
from mmpos.data import SCHEMA, Location, Pairs, Preprocess, Stage, read_examples, sequence_shards, storage
from mmpos.data.examples import Example, RecordError
from mmpos.data.readers import Reader
from mmpos.data.storage import SequenceRows, SequenceShard, SequenceWriter, get_example
from mmpos.schemes import SCHEMES, RopeTie, Scheme
from mmpos.segments import Audio

PHOTO = np.random.default_rng(0).integers(0, 256, (16, 24, 3), np.uint8)


def example(key: str, parts: list[object], scheme: str = "rope-tie", dtype: str = "uint8") -> Example:
    images = ImageProcessor("pillow", patch_size=4, min_pixels=64, dtype=dtype)
    sequence = SequenceBuilder(images=images, scheme=scheme).build(parts)
    return Example(key, sequence, np.where(sequence.token_type_ids == 0, sequence.input_ids, -100))


def written(path: Path, examples: Iterable[Example]) -> SequenceShard:
    with SequenceWriter(path) as writer:
        for item in examples:
            writer.write(item)
    return SequenceShard(path)


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if SCHEMES[name].text])
def test_examples_of_every_scheme_are_read_back_unchanged(tmp_path: Path, scheme: str) -> None:
    examples = [
        example("pixels", ["a b", PHOTO, "c", *[PHOTO[:8], "d"] * SCHEMES[scheme]().references], scheme),
        example("sizes", ["a", Grid(2, 3)], scheme),
        example("text", ["é"], scheme),
    ]
    shard = written(tmp_path / "x.parquet", examples)
    for got, want in zip(shard.examples(), examples, strict=True):
        assert_equal(got, want)
    assert shard.lengths.tolist() == [item.num_tokens for item in examples]
    assert shard.count() == len(examples)


def test_every_kind_of_part_and_slice_is_read_back(tmp_path: Path) -> None:
    pixels: Any = example("f", ["ab", PHOTO, "cd"], dtype="float32")
    assert pixels.sequence.patches.dtype == np.float32

    def bare(name: str, document: list[Any], scheme: str | Scheme, types: list[int]) -> Example:
        segments = SegmentTable.from_documents([document])
        sequence = replace(
            example("sizes", ["a", Grid(2, 2), "b"]).sequence,
            input_ids=np.arange(segments.num_tokens),
            token_type_ids=np.array(types, np.uint8),
            segments=segments,
            positions=place(segments, scheme),
        )
        return Example(name, sequence, np.arange(segments.num_tokens))

    timed = [Text(2), Grid(2, 3, frames=2, seconds_per_frame=Fraction(1, 3))]
    separated = [Text(2), Grid(3, 3, row_separator=True)]
    for examples in (
        [pixels.slice(1, pixels.num_tokens), bare("separated", separated, "rope-tie", [0, 0, *[1, 1, 1, 0] * 3])],
        [bare("timed", timed, RopeTie(axes=3), [0, 0, *[1] * 12])],
        [bare("grid", [Grid(2, 4)], "grid-2d", [1] * 8)],
        [spoken(("a", True)), spoken((Audio(1), True)), SPOKEN],
        [TILED],
    ):
        for got, want in zip(written(tmp_path / "x.parquet", examples).examples(), examples, strict=True):
            assert_equal(got, want)


@pytest.mark.parametrize(("bound", "value"), [("GROUP_ROWS", 3), ("GROUP_BYTES", 5_000)])
def test_row_groups_are_bounded_and_reading_can_start_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, value: int
) -> None:
    monkeypatch.setattr(storage, bound, value)
    examples = [example(str(i), ["ab", PHOTO]) for i in range(10)]
    shard = written(tmp_path / "x.parquet", examples)
    groups = parquet.ParquetFile(shard.path).metadata
    assert [groups.row_group(i).num_rows for i in range(groups.num_row_groups)] == [3, 3, 3, 1]
    for start in (0, 2, 3, 9, 10, 11):
        assert [item.key for item in shard.examples(start)] == [str(i) for i in range(start, 10)]
    rows = SequenceRows(shard, shard.open(), held=2)
    assert [rows[i].key for i in (0, 3, 6, 9, 0)] == ["0", "3", "6", "9", "0"]
    assert len(rows._groups) == 2
    rows.close()
    assert_refused("start: got -1, want >= 0", lambda: next(shard.examples(-1)))
    assert isinstance(shard, Reader)  # for a loader
    records = [(str(here), get_example(raw, here)) for here, raw in shard.records(1, 4) if isinstance(raw, dict)]
    assert_equal(records, [(f"{shard.path}[{i}]", examples[i]) for i in (1, 5, 9)])
    patches: Any = records[0][1].sequence.patches
    for array in (records[0][1].sequence.input_ids, records[0][1].labels, patches, records[0][1].sequence.grid_thw):
        assert array.flags.writeable
    shard = written(tmp_path / "x.parquet", [])
    assert (list(shard.examples()), shard.count(), shard.lengths.tolist(), shard.facts) == ([], 0, [], {})


def test_invalid_examples_are_refused(tmp_path: Path) -> None:
    two = place(SegmentTable.from_documents([[Text(1)], [Text(1)]]))
    one, doubles, first = example("one", ["ab"]), np.zeros((1, 2, 2, 3)), Grid(2, 3, first_frame=0)
    with SequenceWriter(tmp_path / "x.parquet") as writer:
        writer.write(one)
        for invalid, message in (
            (example("flat", ["a"], "flatten"), "flat: positions: got 1 axis, want 2 as in earlier examples"),
            (replace(one, sequence=replace(one.sequence, positions=two)), "one: positions: got 2 documents, want one"),
            (replace(one, key="\ud800"), "key: got text with a lone surrogate"),
            (replace(one, sequence=replace(one.sequence, patches=doubles)), "one: patches: got float64, want uint8"),
            (example("timed", [first], "cosmos3"), "timed: segments.first_frame: got one, want None"),
        ):
            with pytest.raises((InvalidInputError, UnsupportedError), match=message):
                writer.write(invalid)
    assert [item.key for item in SequenceShard(tmp_path / "x.parquet").examples()] == ["one"]


def test_rows_with_an_error_are_left_out_wherever_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "GROUP_ROWS", 3)
    random = np.random.default_rng(0)
    for trial in range(20):
        refused = random.random(12) < random.random()
        with SequenceWriter(tmp_path / "ours.parquet") as writer:
            for i, is_refused in enumerate(refused):
                if is_refused:
                    writer.refuse(str(i), f"error {i} \ud800")
                else:
                    writer.write(example(str(i), ["ab" * (i + 1)]))
        table = parquet.read_table(tmp_path / "ours.parquet").replace_schema_metadata()
        large = [pa.field(name, pa.large_string() if kind == pa.string() else kind) for name, kind in zip(
            table.schema.names, table.schema.types, strict=True)]  # fmt: skip
        parquet.write_table(table.cast(pa.schema(large)), tmp_path / "theirs.parquet", write_statistics=trial % 2 == 0)
        good = [str(i) for i in np.flatnonzero(~refused)]
        for name in ("ours", "theirs"):
            shard = SequenceShard(tmp_path / f"{name}.parquet")
            assert [item.key for item in shard.examples()] == good
            assert [item.key for item in shard.examples(2)] == good[2:]
            assert [location.index for location, _ in shard.records(1, 3)] == list(range(1, len(good), 3))
            assert (shard.count(), shard.lengths.tolist()) == (len(good), [2 * int(key) + 2 for key in good])
            assert shard.errors() == {str(i): f"error {i} \\ud800" for i in np.flatnonzero(refused)}
            rows = shard.rows()
            order = random.permutation(len(rows)).tolist()
            assert [rows[i].key for i in order] == [good[i] for i in order]
            rows.close()


def test_other_files_are_refused_and_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = SequenceShard(tmp_path / "x.parquet")
    with pytest.raises(FileNotFoundError):
        shard.count()
    Path(shard.path).write_bytes(b"no parquet at all")
    with pytest.raises(InvalidInputError, match=r"x\.parquet: got no Parquet file \(.+\), want preprocessed sequences"):
        shard.count()
    footer = json.dumps({"version": 1, "axes": 2, "facts": {}})
    wrong: list[tuple[dict[str, str], str]] = [
        ({}, "a Parquet file without the column 'error', want"),
        ({"mmpos": footer}, "sequences of version 1, want 4; write them again"),
    ]
    for metadata, message in wrong:
        parquet.write_table(pa.table({"key": ["a"]}).replace_schema_metadata(metadata), shard.path)
        file = parquet.ParquetFile(shard.path)
        monkeypatch.setattr(storage, "open_parquet", lambda *_, file=file, **__: file)
        with pytest.raises(InvalidInputError, match=rf"x\.parquet: got {message}"):
            next(shard.examples())
        assert file.closed
    with pytest.raises(RecordError, match=r"a.parquet\[3\]: got a raw record, want a record of a SequenceShard"):
        get_example({"text": "a"}, Location("a.parquet", 3))


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("labels", [1], r"a: labels: got shape \(1,\), want \(2,\)"),
        ("num_tokens", 3, "num_tokens: got 3, want 2, the size of input_ids"),
        ("image_spans", np.array([[1, 2]]).tobytes(),
         r"image_spans: got \[\[1, 2\]\] with margins of 1 and 1 tokens, want spans in order within 2 tokens"),
    ],
)  # fmt: skip
def test_errors_name_an_inconsistent_row(tmp_path: Path, column: str, value: object, message: str) -> None:
    shard = written(tmp_path / "x.parquet", [example("a", ["ab"])])
    rows = parquet.read_table(shard.path)
    field = rows.schema.field(column)
    changed = rows.set_column(rows.schema.names.index(column), field, pa.array([value], field.type))
    footer = json.dumps({"version": 4, "facts": {}})
    parquet.write_table(changed.replace_schema_metadata({"mmpos": footer}), shard.path)
    with pytest.raises(RecordError, match=rf"x\.parquet\[0\]: {message}"):
        list(shard.examples())


def test_a_flipped_bit_causes_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    shard = written(path, [example("a", [PHOTO])])
    content = bytearray(path.read_bytes())
    group = parquet.ParquetFile(path).metadata.row_group(0)
    (column,) = (one for one in map(group.column, range(group.num_columns)) if one.path_in_schema == "patches")
    content[column.data_page_offset + column.total_compressed_size - 9] ^= 1
    path.write_bytes(content)
    with pytest.raises(InvalidInputError, match=r"x\.parquet\[0\]: got .*CRC.*, want a readable record"):
        list(shard.examples())
    ((location, error),) = shard.records()
    assert (str(location), type(error)) == (f"{shard.path}[0]", RecordError)


IMAGES = ImageProcessor("pillow", patch_size=4, min_pixels=64, dtype="uint8")
PREPROCESS = Preprocess(Pairs(), SequenceBuilder(images=IMAGES))
STAGE = Stage(PREPROCESS, source="path", index="row")
RECORDS: list[dict[str, Any]] = [{"jpg": photo(i), "txt": f"photo {i}", "path": "a.tar", "row": i} for i in range(4)]
RECORDS[2] |= {"jpg": b"no image", "txt": "broken"}
DATASET = datasets.Dataset.from_list(RECORDS)
BATCHED = "want an array or a list of values; Dataset.map passes batches if batched=True"


COLUMNS = {name: np.array([record[name] for record in RECORDS], object) for name in RECORDS[0]}
LISTS = {name: list(column) for name, column in COLUMNS.items()}


@pytest.mark.parametrize(
    "block", [pa.Table.from_pylist(RECORDS), pa.RecordBatch.from_pylist(RECORDS), COLUMNS, LISTS], ids=type
)
def test_records_become_examples_or_errors_in_order(block: Any) -> None:
    output = pickle.loads(pickle.dumps(STAGE))(block)
    assert output.schema == SCHEMA
    assert [error is not None for error in output["error"].to_pylist()] == [False, False, True, False]
    assert output["key"][2].as_py() == "a.tar[2]"
    assert "a.tar[2]: " in output["error"][2].as_py()
    wanted = [PREPROCESS(RECORDS[i], Location("a.tar", i)) for i in (0, 1, 3)]
    for got, want in zip(read_examples(output), wanted, strict=True):
        assert_equal(got, want)
    empties: list[Any] = [{}, pa.Table.from_pylist([])]
    for empty in empties:
        assert (STAGE(empty).num_rows, STAGE(empty).schema) == (0, SCHEMA)
    with pytest.raises(RecordError, match=r"^a\.tar\[2\]: parts\[0\]: image: got "):
        replace(STAGE, preprocess=replace(PREPROCESS, on_image_error="raise"))(block)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: STAGE([1]), "block: got list, want an Arrow table, or numpy columns or lists by name"),
        (lambda: STAGE({"a": np.zeros(2), "b": np.zeros(3)}), "block: got columns of 2, 3 rows, want equal numbers"),
        (lambda: STAGE({"txt": np.zeros(2)}), "path: got no column 'path', want one of txt"),
        (lambda: STAGE({"txt": np.array("a")}), f"block: got ndarray in the column 'txt', {BATCHED}"),
        (lambda: DATASET.map(STAGE), f"block: got bytes in the column 'jpg', {BATCHED}"),
        (lambda: DATASET.with_format("arrow").map(STAGE, with_indices=True),
         "indices: got 0, want a number for each record; Dataset.map passes batches if batched=True"),
        (lambda: Stage(cast(Any, lambda record, here: None))({"txt": np.zeros(1)}, [5]),
         "preprocess: got NoneType for records[5], want an Example"),
        (lambda: Stage(PREPROCESS, source=cast(Any, 3)), "source: got 3, want the name of a column or None"),
        (lambda: STAGE(COLUMNS, [1]), "indices: got 1 for 4 records, want one for each record"),
        (lambda: Stage(PREPROCESS, index="txt")(LISTS), "index: got 'photo 0' in the column 'txt', want an integer"),
        (lambda: list(read_examples(cast(Any, {}))), "block: got dict, want an Arrow table"),
        (lambda: Stage(cast(Any, 3)), "preprocess: got int, want a callable that takes a record and a location"),
        (lambda: list(read_examples(pa.table({"a": [1]}))), "block: got no column 'key', want the columns of a Stage"),
        (lambda: list(read_examples(pa.table({name: ["a"] for name in SCHEMA.names}))),
         "block.dropped_images: got string, want list<item: string>"),
    ],
)  # fmt: skip
def test_invalid_blocks_are_refused(call: Any, message: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        call()
    assert str(error.value) == message


def test_invalid_utf8_causes_an_error_only_for_its_record() -> None:
    table = pa.Table.from_pylist(RECORDS[:2])
    texts = pa.array([b"\xff\xfe", b"photo"]).view(pa.string())
    output = STAGE(table.set_column(1, "txt", texts))
    assert [error is None for error in output["error"].to_pylist()] == [False, True]
    paths = {**COLUMNS, "path": np.array(["\ud800"] * 4, object)}
    assert STAGE(paths)["key"].to_pylist() == [f"\\ud800[{i}]" for i in range(4)]


@pytest.mark.parametrize(("name", "value"), [("table", None), ("axes", None), ("axes", 7), ("patches_dtype", "x")])
def test_errors_name_the_index_of_an_invalid_row(name: str, value: object) -> None:
    output = STAGE(pa.Table.from_pylist(RECORDS[:2]))
    i = output.schema.get_field_index(name)
    column = [output[name][0].as_py(), value]
    with pytest.raises(InvalidInputError, match=r"block\[1\]: got an invalid row"):
        list(read_examples(output.set_column(i, output.schema.field(i), pa.array(column, output.schema.field(i).type))))


def test_a_configuration_error_is_not_a_record_error() -> None:
    stage = Stage(Preprocess(Pairs(), SequenceBuilder()))
    with pytest.raises(UnsupportedError, match=r"^records\[\d+\]: parts\[0\]: ") as raised:
        stage(pa.Table.from_pylist(RECORDS))
    assert not hasattr(raised.value, "__notes__")


def test_keys_are_unique_in_a_data_set_and_the_same_in_every_run() -> None:
    rows = [{"jpg": photo(i % 5), "txt": f"photo {i}"} for i in range(40)]
    tables = [pa.Table.from_pylist(rows[a : a + 8]) for a in range(0, 40, 8)]
    keys = [key for table in tables for key in Stage(PREPROCESS)(table)["key"].to_pylist()]
    assert len(set(keys)) == 40
    same = Stage(PREPROCESS)({"jpg": [b"x"], "txt": ["a"]})["key"].to_pylist()
    assert same == ["records[39603154542049848]"]  # in every process and run
    one, equal, nested, other = (
        Stage(PREPROCESS)({"n": column})["key"].to_pylist() for column in ([0], np.arange(1), [[[1], []]], [[[], [1]]])
    )
    assert one == equal != nested != other
    twice = Stage(PREPROCESS)(pa.Table.from_pylist([rows[0]] * 3))["key"].to_pylist()
    assert len(set(twice)) == 3
    numbered = Stage(PREPROCESS)({"jpg": [photo(0)] * 2, "txt": ["a", "b"]}, [7, 9])
    assert numbered["key"].to_pylist() == ["records[7]", "records[9]"]


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("title", "package"), [("Ray Data", "ray"), ("Daft", "daft"), ("Hugging Face datasets", "datasets")]
)
def test_pipelines_write_every_record(title: str, package: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    engine, want = pytest.importorskip(package), dict[str, Example]()
    for name in "ab":
        rows = [{"id": f"{name}-{i}", "jpg": RECORDS[i % 4]["jpg"], "txt": f"{name} {i}"} for i in range(12)]
        parquet.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet", row_group_size=4)
        want |= {row["id"]: PREPROCESS(row, Location("any", 0)) for i, row in enumerate(rows) if i % 4 != 2}
    page = (Path(__file__).parents[2] / "docs/data-engines.md").read_text()
    code = page.split(f"## {title}\n")[1].split("```")[1].partition("\n")[2]
    assert len([line for line in code.splitlines() if line]) <= 10
    if package == "ray":
        request.addfinalizer(engine.shutdown)
        engine.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    exec(code.replace('"pairs', f'"{tmp_path}').replace('"ready', f'"{tmp_path}/ready'), {"preprocess": PREPROCESS})
    one = tmp_path / "ready.parquet"
    shards = [SequenceShard(one)] if one.exists() else sequence_shards(tmp_path / "ready")
    got = sorted((item for shard in shards for item in shard.examples()), key=lambda item: item.key)
    assert_equal(got, [want[key] for key in sorted(want)])
    errors = [error for shard in shards for error in shard.errors().items()]
    assert len(errors) == len(dict(errors)) == 6
    assert all("image" in error for _, error in errors)
