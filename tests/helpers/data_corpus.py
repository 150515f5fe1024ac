"""Small corpora of captioned photos, the same records in every format, and callables that fail in workers."""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import signal
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
from hostile_images import encoded
from PIL import Image
from torch.utils.data import DataLoader

from mmpos.data.examples import Location, RecordError

PHOTOS = Path(__file__).parents[2] / "mmpos" / "photos"

Record = dict[str, Any]


@cache
def photo(i: int) -> bytes:
    """Encode a JPEG with sides of 16 to 40 pixels, in one of six sizes."""
    name = ("chelsea.jpg", "coffee.jpg")[i % 2]
    with Image.open(PHOTOS / name) as image:
        small = image.resize((16 + 8 * (i % 3), 40 - 8 * (i % 2)))
    return encoded(small, "jpeg", quality=80)


def caption(i: int) -> str:
    return f"record {i}: " + "la " * (i * 7 % 23)


def records(start: int, stop: int) -> list[Record]:
    """Return records in the form used by Parquet and datasets."""
    return [
        {"id": str(i), "image": {"bytes": photo(i % 6), "path": None}, "text": caption(i)} for i in range(start, stop)
    ]


def write_parquet(path: Path, rows: Sequence[Record], group: int = 8) -> Path:
    struct = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    schema = pa.schema({"id": pa.string(), "image": struct, "text": pa.string()})
    table = pa.Table.from_pylist(list(rows), schema)
    pq.write_table(table, path, group, compression="none", use_dictionary=False, write_page_checksum=True)
    return path


def write_jsonl(path: Path, rows: Sequence[Record], open_file: Callable[..., Any] | None = None) -> Path:
    open_file = open_file or (gzip.open if path.suffix == ".gz" else open)
    with open_file(path, "wb") as file:
        for row in rows:
            url = "data:image/jpeg;base64," + base64.b64encode(row["image"]["bytes"]).decode()
            file.write((json.dumps({**row, "image": url}) + "\n").encode())
    return path


def write_tar(path: Path, rows: Sequence[Record]) -> Path:
    mode: Any = "w:" + path.suffix[1:].replace("tar", "")
    with tarfile.open(path, mode) as tar:
        for row in rows:
            for extension, data in (("jpg", row["image"]["bytes"]), ("txt", row["text"].encode())):
                member = tarfile.TarInfo(f"{row['id']}.{extension}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return path


def load(dataset: Any, workers: int, kind: Any = DataLoader, method: str = "fork", **options: Any) -> Any:
    """Create a loader of a dataset's batches, which this number of workers reads."""
    context = method if workers else None
    return kind(dataset, batch_size=None, num_workers=workers, multiprocessing_context=context, **options)


def keys(group: Any) -> list[str]:
    """Return the keys of a list of examples or a pack, instead of collating it."""
    return [example.key for example in getattr(group, "examples", group)]


@dataclass(frozen=True)
class NumberedShard:
    """A shard that derives each record from its index."""

    source: str
    size: int

    def make(self, i: int) -> Any:
        """Make the record with index ``i``."""
        return i

    def records(self, start: int = 0, step: int = 1) -> Iterator[tuple[Location, Any]]:
        for i in range(start, self.size, step):
            yield Location(self.source, i), self.make(i)

    def count(self) -> int | None:
        return self.size


class OddError(Exception):
    """An error that cannot be unpickled, like some packages' errors."""

    def __init__(self, *, status: int) -> None:
        super().__init__(f"status {status}")


def end_process(record: object, location: object) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def fail_oddly(record: object, location: object) -> NoReturn:
    raise OddError(status=404)


def fail_readably(record: object, location: object) -> NoReturn:
    raise RecordError(f"{location}: unusable")
