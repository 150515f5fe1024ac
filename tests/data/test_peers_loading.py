"""Random archives yield the records of a plain loop."""

from __future__ import annotations

import io
import random
import tarfile
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from mmpos.data import RecordError
from mmpos.data.readers import TarReader

pytestmark = pytest.mark.slow


def plain_records(path: Path) -> Iterator[dict[str, Any] | None]:
    """Read the records of an archive with a plain loop; None for a record in which two members have one name."""
    with tarfile.open(path) as tar:
        members = [(member.name, tar.extractfile(member)) for member in tar if member.isreg()]
        named = []
        for name, file in members:
            folder, slash, last = name.rpartition("/")
            stem, dot, extension = last.partition(".")
            first = name.partition("/")[0]
            is_meta = len(first) >= 4 and first.startswith("__") and first.endswith("__")
            if file and dot and not is_meta and (stem or (folder and "." not in folder)):
                named.append((folder + slash + stem, extension.lower(), file.read()))
    for key, group in groupby(named, key=itemgetter(0)):
        parts = [(extension, data) for _, extension, data in group]
        record = {"__key__": key, "__url__": str(path), **dict(parts)}
        yield record if len(record) == len(parts) + 2 else None


def random_members(draw: random.Random) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    """Yield random archive members: files of records, folders, links, and files that belong to no record."""
    for i in range(draw.randint(1, 12)):
        folder = draw.choice(["", "", "d/", "d.e/f/", "./", "é/"])
        key = draw.choice([f"{i:04}", f"x_{i}", "n" * 120 + str(i), f"Größe{i}", f"{i // 2}"])
        extensions = ["jpg", "txt", "json", "seg.png", "JPG", "tar.gz", "cls", "0", "a b"]
        for extension in draw.sample(extensions, draw.randint(1, 4)):
            yield (
                tarfile.TarInfo(f"{folder}{key}.{extension}"),
                draw.randbytes(draw.choice([0, 1, 511, 512, 513, 3000])),
            )
        odd = draw.choice(
            ["", "", "noextension", ".hidden", "__skip__/a.txt", "__meta__.json", "d/.b.txt", "d/__x__.txt"]
        )
        if odd:
            yield tarfile.TarInfo(odd), b"odd"
        if draw.random() < 0.3:
            other = tarfile.TarInfo(f"{folder}{key}.{draw.choice(['link', 'dir', 'fifo'])}")
            other.type = draw.choice([tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.LNKTYPE])
            other.linkname = "0000.jpg" if other.type in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
            yield other, b""


@pytest.mark.parametrize("compression", ["", "gz", "bz2", "xz"])
@pytest.mark.parametrize("format_", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_records_of_random_archives_match_those_of_a_plain_loop(format_: int, compression: str, tmp_path: Path) -> None:
    draw = random.Random(f"{format_} {compression}")
    for round_ in range(20):
        path = tmp_path / f"{round_}.tar"
        with tarfile.open(path, f"w:{compression}", format=format_) as tar:  # type: ignore[call-overload]
            for member, data in random_members(draw):
                member.size = len(data)
                if format_ != tarfile.USTAR_FORMAT or len(member.name) <= 100:
                    tar.addfile(member, io.BytesIO(data))
        want = list(plain_records(path))
        records = [raw for _, raw in TarReader(str(path)).records()]
        assert [None if isinstance(record, RecordError) else record for record in records] == want
        for start in range(3):
            part = [raw for _, raw in TarReader(str(path)).records(start, 3)]
            assert list(map(str, part)) == list(map(str, records[start::3]))
