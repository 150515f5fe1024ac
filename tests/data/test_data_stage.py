"""The stage: records become ready examples, and invalid records become rows with an error."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from results import assert_equal

from mmpos import ImageProcessor, InvalidInputError, SequenceBuilder, UnsupportedError
from mmpos.data import STAGE_SCHEMA, Location, Pairs, Preprocess, Stage, read_examples


def photo(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (16, 24, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


IMAGES = ImageProcessor("pillow", patch_size=4, min_pixels=64, dtype="uint8")
PREPROCESS = Preprocess(Pairs(), SequenceBuilder(images=IMAGES))
STAGE = Stage(PREPROCESS, source="path")
RECORDS = [{"jpg": photo(i), "txt": f"photo {i}", "path": "a.tar"} for i in range(4)]
RECORDS[2] = {"jpg": b"no image", "txt": "broken", "path": "a.tar"}


def columns() -> dict[str, np.ndarray]:
    return {name: np.array([record[name] for record in RECORDS], object) for name in RECORDS[0]}


@pytest.mark.parametrize(
    "block",
    [pa.Table.from_pylist(RECORDS), pa.RecordBatch.from_pylist(RECORDS), columns()],
    ids=["table", "batch", "numpy"],
)
def test_records_become_examples_or_errors_in_order(block: Any) -> None:
    output = pickle.loads(pickle.dumps(STAGE))(block)
    assert output.schema == STAGE_SCHEMA
    assert [error is not None for error in output["error"].to_pylist()] == [False, False, True, False]
    assert output["key"][2].as_py() == "a.tar[2]"
    assert "a.tar[2]: " in output["error"][2].as_py()
    wanted = [PREPROCESS(RECORDS[i], Location("a.tar", i)) for i in (0, 1, 3)]
    for got, want in zip(read_examples(output), wanted, strict=True):
        assert_equal(got, want)


def test_an_empty_batch_stays_empty() -> None:
    assert STAGE(pa.Table.from_pylist([])).num_rows == 0
    assert STAGE({}).schema == STAGE_SCHEMA


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: STAGE([1]), "block: got list, want an Arrow table or numpy columns by name"),
        (lambda: STAGE({"a": np.zeros(2), "b": np.zeros(3)}), "block: got columns of 2, 3 rows, want equal numbers"),
        (lambda: STAGE({"txt": np.zeros(2)}), "source: got 'path', want a column of the batch: txt"),
        (lambda: STAGE({"txt": np.array("a")}), "block['txt']: got one value, want an array with one value per record"),
        (
            lambda: Stage(cast(Any, lambda record, here: None))({"txt": np.zeros(1)}),
            "preprocess: got NoneType for batch[0], want an Example",
        ),
        (lambda: Stage(PREPROCESS, source=cast(Any, 3)), "source: got 3, want the name of a column or None"),
        (lambda: list(read_examples(cast(Any, {}))), "block: got dict, want an Arrow table"),
        (lambda: Stage(cast(Any, 3)), "preprocess: got int, want a callable that takes a record and a location"),
        (
            lambda: list(read_examples(pa.table({"a": [1]}))),
            "block: got no column 'key', want the columns of STAGE_SCHEMA",
        ),
        (
            lambda: list(read_examples(pa.table({name: ["a"] for name in STAGE_SCHEMA.names}))),
            "block.num_tokens: got string, want int64",
        ),
    ],
)
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
    with pytest.raises(UnsupportedError):
        stage(pa.Table.from_pylist(RECORDS))


def test_an_error_raised_by_the_callable_names_the_record() -> None:
    def third_fails(record: Any, here: Location) -> Any:
        if here.index == 2:
            raise KeyError("width")
        return PREPROCESS(record, here)

    with pytest.raises(KeyError, match="width") as raised:
        Stage(third_fails, source="path")(pa.Table.from_pylist(RECORDS))
    assert raised.value.__notes__ == ["raised for the record a.tar[2]"]


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
def test_ray_data_runs_the_stage(local_ray: Any) -> None:
    dataset = local_ray.data.from_arrow(pa.Table.from_pylist(RECORDS * 3))
    output = dataset.map_batches(STAGE, batch_format="pyarrow", batch_size=4)
    tables = list(output.iter_batches(batch_format="pyarrow"))
    keys = sorted(example.key for table in tables for example in read_examples(table))
    assert len(keys) == 9
    refused = [error for table in tables for error in table["error"].to_pylist() if error]
    assert len(refused) == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_daft_runs_the_stage() -> None:
    daft = pytest.importorskip("daft")
    kind = daft.DataType.from_arrow_type(pa.struct(list(STAGE_SCHEMA)))

    @daft.udf(return_dtype=kind, batch_size=4)
    class Ready:
        def __init__(self) -> None:
            self.stage = STAGE

        def __call__(self, jpg: Any, txt: Any, path: Any) -> Any:
            block = pa.table({"jpg": jpg.to_arrow(), "txt": txt.to_arrow(), "path": path.to_arrow()})
            return self.stage(block).to_struct_array()

    frame = daft.from_arrow(pa.Table.from_pylist(RECORDS))
    ready = cast(Any, Ready)(daft.col("jpg"), daft.col("txt"), daft.col("path")).alias("example")
    output = frame.select(ready).to_arrow()["example"].combine_chunks()
    table = pa.Table.from_struct_array(output)
    wanted = [PREPROCESS(RECORDS[i], Location("a.tar", i)) for i in (0, 1, 3)]
    for got, want in zip(read_examples(table), wanted, strict=True):
        assert_equal(got, want)
