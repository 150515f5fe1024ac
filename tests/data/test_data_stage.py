"""The stage: records become ready examples, and invalid records become rows with an error."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import datasets
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet
from results import assert_equal

from mmpos import ImageProcessor, InvalidInputError, SequenceBuilder, UnsupportedError
from mmpos.data import SCHEMA, Location, Pairs, Preprocess, Stage, read_examples, sequence_shards


def photo(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (16, 24, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


IMAGES = ImageProcessor("pillow", patch_size=4, min_pixels=64, dtype="uint8")
PREPROCESS = Preprocess(Pairs(), SequenceBuilder(images=IMAGES))
STAGE = Stage(PREPROCESS, source="path", index="row")
RECORDS: list[dict[str, Any]] = [{"jpg": photo(i), "txt": f"photo {i}", "path": "a.tar", "row": i} for i in range(4)]
RECORDS[2] |= {"jpg": b"no image", "txt": "broken"}
DATASET = datasets.Dataset.from_list(RECORDS)
BATCHED = "want an array or a list of values; Dataset.map passes batches if batched=True"


def columns() -> dict[str, Any]:
    return {name: np.array([record[name] for record in RECORDS], object) for name in RECORDS[0]}


LISTS = {name: list(column) for name, column in columns().items()}


@pytest.mark.parametrize(
    "block", [pa.Table.from_pylist(RECORDS), pa.RecordBatch.from_pylist(RECORDS), columns(), LISTS], ids=type
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
    for empty in ({}, pa.Table.from_pylist([])):
        assert (STAGE(empty).num_rows, STAGE(empty).schema) == (0, SCHEMA)


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
        (lambda: STAGE(columns(), [1]), "indices: got 1 for 4 records, want one for each record"),
        (lambda: Stage(PREPROCESS, index="txt")(LISTS), "index: got 'photo 0' in the column 'txt', want an integer"),
        (lambda: list(read_examples(cast(Any, {}))), "block: got dict, want an Arrow table"),
        (lambda: Stage(cast(Any, 3)), "preprocess: got int, want a callable that takes a record and a location"),
        (lambda: list(read_examples(pa.table({"a": [1]}))), "block: got no column 'key', want the columns of a Stage"),
        (lambda: list(read_examples(pa.table({name: ["a"] for name in SCHEMA.names}))),
         "block.dropped_images: got string, want list<item: string>"),
    ],
)  # fmt: skip
def test_invalid_input_is_refused(call: Any, message: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        call()
    assert str(error.value) == message


def test_invalid_utf8_causes_an_error_only_for_its_record() -> None:
    table = pa.Table.from_pylist(RECORDS[:2])
    texts = pa.array([b"\xff\xfe", b"photo"]).view(pa.string())
    output = STAGE(table.set_column(1, "txt", texts))
    assert [error is None for error in output["error"].to_pylist()] == [False, True]
    paths = {**columns(), "path": np.array(["\ud800"] * 4, object)}
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


# The pipelines of docs/data-engines.md, from files to files


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Write the records to two Parquet files, three times each."""
    for name in "ab":
        rows = [{"id": f"{name}-{i}", "jpg": RECORDS[i % 4]["jpg"], "txt": f"{name} {i}"} for i in range(12)]
        parquet.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet", row_group_size=4)
    return tmp_path


def check(folder: Path) -> None:
    """Check that a folder holds every record of ``written`` once, as an example or as an error."""
    shards = sequence_shards(folder)
    for shard in shards:
        for example in shard.examples():
            i = int(example.key[2:])
            record = {"id": example.key, "jpg": RECORDS[i % 4]["jpg"], "txt": f"{example.key[0]} {i}"}
            assert_equal(example, PREPROCESS(record, Location("any", 0)))
    keys = sorted(example.key for shard in shards for example in shard.examples())
    assert keys == sorted(f"{name}-{i}" for name in "ab" for i in range(12) if i % 4 != 2)
    errors = [error for shard in shards for error in shard.errors().values()]
    assert len(errors) == len({key for shard in shards for key in shard.errors()}) == 6
    assert all("image" in error for error in errors)


@pytest.fixture
def local_ray() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield ray
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.usefixtures("local_ray")
def test_ray_data_runs_the_stage(written: Path) -> None:
    run_block("Ray Data", written)
    check(written / "ready")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_daft_runs_the_stage(written: Path) -> None:
    pytest.importorskip("daft")
    run_block("Daft", written)
    check(written / "ready")


@pytest.mark.slow
def test_datasets_runs_the_stage(written: Path) -> None:
    run_block("Hugging Face datasets", written)
    (written / "ready").mkdir()
    (written / "ready.parquet").rename(written / "ready/0.parquet")
    check(written / "ready")


def run_block(title: str, folder: Path) -> None:
    """Run the pipeline below this heading of the page, with its paths in a folder."""
    page = (Path(__file__).parents[2] / "docs/data-engines.md").read_text()
    code = page.split(f"## {title}\n")[1].split("```")[1].partition("\n")[2]
    assert len([line for line in code.splitlines() if line]) <= 10
    exec(code.replace('"pairs', f'"{folder}').replace('"ready', f'"{folder}/ready'), {"preprocess": PREPROCESS})
