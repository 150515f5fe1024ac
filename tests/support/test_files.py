"""Files are written completely or not at all, and system errors name the path."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
from test_data_storage import PHOTO, example

from mmpos import InvalidInputError, SegmentTable, Text, place
from mmpos.analysis.plot import plot_positions
from mmpos.cli.report import npy, save
from mmpos.data.formats.images import Images
from mmpos.data.loader import BatchDataset
from mmpos.data.packing import Batcher
from mmpos.data.storage import SequenceWriter, get_example
from mmpos.support.files import leftovers, local_path, whole_file, write_text

FullDisk = Callable[[int], AbstractContextManager[None]]
IDS = place(SegmentTable.from_documents([[Text(5000)]]))


@pytest.mark.parametrize(
    "use",
    [
        lambda url: plot_positions(IDS, url),
        lambda url: save("--output", Path(url), ".npy", b""),
        lambda url: Images(base=url),
        lambda url: BatchDataset([], get_example, Batcher(1), quarantine=url),
    ],
)
def test_a_url_instead_of_a_path_is_refused_before_any_work(use: Callable[[str], object]) -> None:
    with pytest.raises(InvalidInputError, match=r": got 's3://bucket/x\.png', want a path on this machine, not a URL$"):
        use("s3://bucket/x.png")


def test_a_folder_can_be_named_like_a_url_scheme() -> None:
    paths = {"./s3:/x": "s3:/x", "a:/x": "a:/x", "/x/s3://y": "/x/s3:/y"}
    assert [str(local_path("", path)) for path in paths] == [*paths.values()]


def test_a_file_is_written_completely_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with whole_file(path) as file:
        file.write(b"first")
        assert not path.exists()
    with pytest.raises(TypeError), whole_file(path) as file:
        file.writelines([b"second", "no bytes"])  # type: ignore[list-item]
    assert {written.name: written.read_text() for written in tmp_path.iterdir()} == {"x": "first"}
    write_text(path, "zweite Ähre")
    assert path.read_bytes() == "zweite Ähre".encode()


def write_ready(path: Path) -> None:
    with SequenceWriter(path) as writer:
        writer.write(example("a", ["b" * 20_000, PHOTO]))


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.json", lambda path: write_text(path, "a" * 50_000)),
        ("a.npy", lambda path: save("--output", path, ".npy", npy(IDS))),
        ("a.png", lambda path: plot_positions(IDS, path)),
        ("a.svg", lambda path: plot_positions(IDS, path)),
        ("a.parquet", write_ready),
    ],
)
@pytest.mark.parametrize("room", [0, 4096])
def test_a_full_disk_keeps_the_old_file_and_raises_an_error_with_the_path(
    tmp_path: Path, full_disk: FullDisk, name: str, write: Callable[[Path], None], room: int
) -> None:
    path = tmp_path / name
    path.write_text("as it was")
    with pytest.raises(OSError, match="File too large") as raised, full_disk(room):
        write(path)
    assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, str(path))
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {name: "as it was"}
    write(path)
    assert path.stat().st_size > 4096


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("none/a", FileNotFoundError),
        ("file/a", NotADirectoryError),
        ("folder", IsADirectoryError),
        ("link", IsADirectoryError),
        ("a" * 300, OSError),
    ],
)
def test_errors_name_a_path_that_cannot_be_a_file(tmp_path: Path, path: str, error: type[OSError]) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(error) as raised:
        write_text(tmp_path / path, "a")
    assert raised.value.filename == str(tmp_path / path)
    assert sorted(tmp_path.iterdir()) == before


def test_links_and_permissions_are_preserved(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    old, new, fresh = tmp_path / "folder" / "old", tmp_path / "folder" / "new", tmp_path / "fresh"
    old.touch(mode=0o600)
    fresh.touch()
    for target, mode in ((old, 0o600), (new, stat.S_IMODE(fresh.stat().st_mode))):
        link = tmp_path / target.name
        link.symlink_to(target)
        write_text(link, "through a link")
        assert link.readlink() == target
        assert (target.read_text(), stat.S_IMODE(target.stat().st_mode)) == ("through a link", mode)


def test_pipes_and_devices_are_written_directly(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "through a pipe")
    assert os.read(reader, 100) == b"through a pipe"
    os.close(reader)
    assert list(tmp_path.iterdir()) == [pipe]
    if Path("/dev/full").is_char_device():
        with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
            write_text("/dev/full", "a")


def test_libraries_cannot_bypass_the_file_object_through_a_file_descriptor(tmp_path: Path) -> None:
    with whole_file(tmp_path / "a.npy") as file:
        np.save(file, np.arange(5))
        with pytest.raises(OSError, match="fileno"):
            file.fileno()
    assert np.load(tmp_path / "a.npy").tolist() == [0, 1, 2, 3, 4]


def test_only_leftovers_of_killed_writers_are_listed(tmp_path: Path) -> None:
    name = "x[1].parquet"
    for other in (name, f".{name}.tmp", ".y.parquet.00000000.tmp", f".{name}.0000000g.tmp", f".{name}.000000000.tmp"):
        (tmp_path / other).touch()
    left = tmp_path / f".{name}.0f0f0f0f.tmp"
    left.touch()
    assert leftovers(tmp_path, {name, "z.parquet"}.__contains__) == [left]
