"""NeMo Curator rows: writing them, joining them into samples, and a stage in a Curator pipeline."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from results import assert_equal
from test_data_formats import CAT, PHOTOS

from mmpos import Grid, ImageProcessor, InvalidInputError, SequenceBuilder
from mmpos.data import (
    SAMPLE_SCHEMA,
    Curator,
    Document,
    Images,
    Location,
    Piece,
    Preprocess,
    RecordError,
    SampleReader,
    Stage,
    join_samples,
    read_examples,
    write_samples,
)
from mmpos.data.readers import JsonlReader, ParquetReader

DOCUMENTS = [
    Document("0", (Piece("A cat:", False), Piece(CAT), Piece("It looks."))),
    Document("1", (Piece("Words."),)),
    Document("2", (Piece(PHOTOS / "coffee.jpg"), Piece("A cup."))),
]
FORMAT = Curator(images=Images(PHOTOS))


def reader(path: Path) -> SampleReader:
    return SampleReader(ParquetReader(str(path)))


def documents(reader: SampleReader, *args: int) -> list[Any]:
    """Return each sample's index, and its key and pieces or its error."""
    samples: list[Any] = []
    for location, raw in reader.records(*args):
        if isinstance(raw, RecordError):
            samples.append((location.index, str(raw).removeprefix(f"{location}: ")))
        else:
            document = FORMAT(raw, location)
            pieces = [(piece.part, piece.train) for piece in document.pieces]
            samples.append((location.index, (document.key, pieces)))
    return samples


WANTED = [(i, (doc.key, [(piece.part, piece.train) for piece in doc.pieces])) for i, doc in enumerate(DOCUMENTS)]


def test_written_samples_are_read_back_across_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    assert write_samples(DOCUMENTS, path) == 6
    rows = pq.read_table(path)
    assert rows.schema.equals(SAMPLE_SCHEMA)
    assert rows["content_type"].to_pylist() == [
        "text/plain",
        "image/jpeg",
        "text/plain",
        "text/plain",
        None,
        "text/plain",
    ]
    pq.write_table(rows.take([2, 0, 1, 3, 5, 4]), path, row_group_size=2)
    samples = pickle.loads(pickle.dumps(reader(path)))
    assert samples.count() == 3
    for start, step in [(0, 1), (1, 1), (0, 2), (2, 1), (3, 1), (9, 4)]:
        assert documents(samples, start, step) == WANTED[start::step]


def test_samples_can_be_in_a_store() -> None:
    url = "memory://samples/a.parquet"
    assert write_samples(DOCUMENTS, url) == 6
    assert documents(SampleReader(ParquetReader(url))) == WANTED


def test_a_sample_with_scattered_rows_becomes_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_samples(DOCUMENTS, path)
    pq.write_table(pq.read_table(path).take([0, 3, 1, 2, 4, 5]), path)
    reason = "sample_id: got '0' in 2 places, want adjacent rows of a sample"
    assert documents(reader(path)) == [(0, reason), WANTED[1], (2, reason), (3, WANTED[2][1])]


def test_an_unreadable_row_causes_an_error_only_for_its_sample(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_samples(DOCUMENTS, path)
    rows = pq.read_table(path)
    plain: Any = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pq.write_table(rows, path, row_group_size=1, write_page_checksum=True, **plain)
    data = bytearray(path.read_bytes())
    data[data.index(b"It looks.")] ^= 1
    path.write_bytes(data)
    first, *rest = documents(reader(path))
    assert rest == WANTED[1:]
    assert first[1].startswith(f"{path}[2]: got ")  # the row
    path.write_bytes(data[: len(data) // 2])
    ((index, lost),) = documents(reader(path))
    assert (index, lost.partition("; ")[2], reader(path).count()) == (0, "all later records are lost", None)


def test_a_sample_id_column_is_required(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": ["a"]}), path)
    with pytest.raises(InvalidInputError, match="got the columns id, want sample_id among them"):
        list(reader(path).records())
    with pytest.raises(InvalidInputError, match="table: got the columns id, want sample_id among them"):
        join_samples(pa.table({"id": ["a"]}))
    with pytest.raises(InvalidInputError, match=r"sample_id: got a column of list<item: int64>, want text"):
        join_samples(pa.table({"sample_id": [[1]]}))
    with pytest.raises(
        InvalidInputError, match="reader: got JsonlReader, want a reader of a Parquet file or a Lance fragment"
    ):
        SampleReader(JsonlReader("a.jsonl"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("invalid", "message"),
    [
        ([DOCUMENTS[1], DOCUMENTS[1]], "documents: got the key '1' again, want each key once"),
        (
            [DOCUMENTS[0], Document("9", (Piece(Grid(2, 2)),))],
            "9: pieces[0]: got Grid, want text, the bytes of an image file or its path",
        ),
    ],
)
def test_an_invalid_document_leaves_no_file(
    invalid: list[Document], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmpos.data.samples._GROUP_BYTES", 4)
    with pytest.raises(InvalidInputError) as error:
        write_samples(invalid, tmp_path / "a.parquet")
    assert str(error.value) == message
    assert not list(tmp_path.iterdir())


def test_table_rows_are_joined_in_any_order(tmp_path: Path) -> None:
    write_samples(DOCUMENTS, tmp_path / "a.parquet")
    rows = pq.read_table(tmp_path / "a.parquet")
    joined = join_samples(rows.take([3, 2, 5, 0, 4, 1])).to_pylist()
    assert [record["id"] for record in joined] == ["1", "0", "2"]
    for record, want in zip(joined, [WANTED[1], WANTED[0], WANTED[2]], strict=True):
        document = FORMAT(record, Location("batch", 0))
        assert [(piece.part, piece.train) for piece in document.pieces] == want[1][1]
    assert join_samples(rows.slice(0, 0)).num_rows == 0


@dataclass
class Batch:
    """Stand-in with the same fields as the batches of NeMo Curator 1.4."""

    dataset_name: str
    data: pa.Table
    _stage_perf: list[Any] = field(default_factory=list)
    _metadata: dict[str, Any] = field(default_factory=dict)

    def to_pyarrow(self) -> pa.Table:
        return self.data


class Processing:
    """Stand-in for NeMo Curator's ProcessingStage."""

    def process_batch(self, tasks: list[Any]) -> list[Any]:
        return [self.process(task) for task in tasks]  # type: ignore[attr-defined]


@pytest.mark.parametrize("package", ["stand-in", "nemo_curator"])
def test_a_nemo_curator_stage_makes_ready_examples(package: str, tmp_path: Path) -> None:
    base, rows, ready = cast(tuple[Any, Any, Any], (Processing, Batch, Batch))
    if package != "stand-in":
        base = pytest.importorskip("nemo_curator.stages.base", reason="only its interface is tested").ProcessingStage
        tasks = pytest.importorskip("nemo_curator.tasks")
        rows, ready = tasks.InterleavedBatch, tasks.DocumentBatch

    @dataclass
    class Ready(base):  # type: ignore[misc,valid-type]
        stage: Stage
        name: str = "ready"

        def process(self, task: Any) -> Any:
            table = self.stage(join_samples(task.to_pyarrow()))
            return ready(task.dataset_name, table, _metadata=task._metadata, _stage_perf=task._stage_perf)

    broken = Document("9", (Piece(b"no image"),))
    write_samples([*DOCUMENTS, broken], tmp_path / "a.parquet")
    builder = SequenceBuilder(images=ImageProcessor("pillow", max_tokens=4))
    preprocess = Preprocess(FORMAT, builder)
    (batch,) = Ready(Stage(preprocess)).process_batch([rows("cats", pq.read_table(tmp_path / "a.parquet"))])
    assert [error is None for error in batch.data["error"].to_pylist()] == [True, True, True, False]
    wanted = [preprocess(cast(Any, raw), here) for here, raw in list(reader(tmp_path / "a.parquet").records())[:3]]
    for got, want in zip(read_examples(batch.data), wanted, strict=True):
        assert_equal(got, want)
