"""Test how a server opens, reads, writes, maps and refuses its clients' shared memory."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from shared_objects import FOLDER, PREFIX, SHRINK, content, names, sealed, shared

from mmpos.errors import InvalidInputError, LimitExceededError, UnsupportedError
from mmpos_server.listening import Listen, local
from mmpos_server.shared_memory import MAX_NAME, MAX_REGIONS, Region, Regions, SharedMemory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the test looks for objects where Linux keeps them")

SERVER_MEMORY = SharedMemory(PREFIX)
BYTES = bytes(range(256))


@pytest.fixture
def key() -> Iterator[str]:
    with shared(BYTES) as key:
        yield key


def open_region(key: str, offset: int = 0, byte_size: int = 256) -> Region:
    return SERVER_MEMORY.open("q.shared", key, offset, byte_size)


def descriptors() -> int:
    """Count the open descriptors of these tests' objects only, since other descriptors come and go."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            count += os.readlink(link).startswith(str(FOLDER / PREFIX))
    return count


def descriptors_of_memfds() -> int:
    """Count the descriptors and mappings of these tests' memfds."""
    fds = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    maps = Path("/proc/self/maps").read_text().split("\n")
    return sum(f"/memfd:{PREFIX}" in entry for entry in [*fds, *maps])


def shrink(key: str, size: int = 100) -> None:
    os.truncate(FOLDER / key[1:], size)


@pytest.mark.parametrize("prefix", ["", "/", "a/b", "é", "a b", "x" * 65, "..\n"])
def test_a_prefix_with_invalid_characters_or_length_is_refused(prefix: str) -> None:
    with pytest.raises(InvalidInputError, match=r"shared-memory: got .*, want 1 to 64 letters"):
        SharedMemory(prefix)


def test_shared_memory_is_refused_without_a_prefix(key: str) -> None:
    with pytest.raises(UnsupportedError, match=r"^q: shared memory requires a server started with --shared-memory$"):
        SharedMemory().open("q", key, 0, 1)


NAMES = [
    "",
    "/",
    PREFIX,
    "/other",
    f"//{PREFIX}x",
    f"/{PREFIX}/x",
    f"/{PREFIX}é",
    f"/{PREFIX}\0",
    f"/{PREFIX}" + "x" * 300,
]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))  # the prefix differs in each process
def test_a_name_without_the_prefix_or_with_invalid_characters_is_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"^q\.shared\.key: got .*, want '/{PREFIX}…' of letters"):
        open_region(name)


@pytest.mark.parametrize("prefix", [".", ".."])
def test_a_folder_name_is_refused(prefix: str) -> None:
    with pytest.raises(InvalidInputError, match=r"want '/"):
        SharedMemory(prefix).open("q", f"/{prefix}", 0, 1)


def test_a_missing_object_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"No such file or directory.*want an object that this server may open"):
        open_region(f"/{PREFIX}nobody")


MAKERS: dict[str, Callable[[Path], object]] = {
    "directory": Path.mkdir,
    "FIFO": os.mkfifo,
    "link": lambda path: path.symlink_to("/etc/hostname"),
    "socket": lambda path: os.mknod(path, 0o600 | 0o140000),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_irregular_objects_are_refused_at_once(make: Callable[[Path], object]) -> None:
    path = FOLDER / f"{PREFIX}strange"
    make(path)
    try:
        before = descriptors()
        with pytest.raises(InvalidInputError, match=rf"^q\.shared\.key: got '/{PREFIX}strange'[ ,]"):
            open_region(f"/{path.name}", 0, 1)
        assert descriptors() == before
    finally:
        with suppress(IsADirectoryError):
            path.unlink()
        if path.is_dir():
            path.rmdir()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes the owner of a file")
def test_an_object_owned_by_another_user_is_refused(key: str) -> None:
    region = open_region(key)
    os.chown(FOLDER / key[1:], 12345, -1)
    for use in (lambda: open_region(key), lambda: region.read("q", 0, 1), lambda: region.write("q", 0, b"a")):
        with pytest.raises(InvalidInputError, match=r"got .*, want a regular object owned by this server's user"):
            use()
    assert content(key) == BYTES


@pytest.mark.parametrize(
    ("offset", "byte_size", "message"),
    [
        (-1, 2, r"got offset -1 and byte_size 2, want offset >= 0 and byte_size >= 1"),
        (0, 0, r"got offset 0 and byte_size 0, want offset >= 0 and byte_size >= 1"),
        (0, -(2**63), r"got offset 0 and byte_size -9223372036854775808"),
        (0, 257, r"got bytes 0 to 257 of .*, want at most 256, its size"),
        (256, 1, r"got bytes 256 to 257 of"),
        (2**63 - 1, 2**63 - 1, r"got bytes 9223372036854775807 to 18446744073709551614 of .*, want at most 256"),
    ],
)
def test_parts_outside_the_object_are_refused(key: str, offset: int, byte_size: int, message: str) -> None:
    before = descriptors()
    with pytest.raises(InvalidInputError, match=rf"^q\.shared: {message}"):
        open_region(key, offset, byte_size)
    assert descriptors() == before


def test_only_bytes_of_the_part_are_read_and_written(key: str) -> None:
    part = open_region(key, 10, 20)
    copy = part.read("q", 3, 5)
    copy[:] += 1
    part.write("q", 17, b"end")
    assert (part.read("q", 0, 4).tobytes(), copy.tobytes()) == (BYTES[10:14], BYTES[14:19])
    assert content(key) == BYTES[:27] + b"end" + BYTES[30:]


@pytest.mark.parametrize("offset", [-1, 18, 2**63])
def test_bytes_outside_the_part_are_refused(key: str, offset: int) -> None:
    part = open_region(key, 10, 20)
    assert part.read("q", 17, 3).tobytes() == BYTES[27:30]
    for use in (lambda: part.read("q", offset, 3), lambda: part.write("q", offset, b"abc")):
        with pytest.raises(InvalidInputError, match=rf"^q: got bytes {offset} to {offset + 3}, want 0 to 20 of its"):
            use()
    assert content(key) == BYTES


def test_a_shrunken_object_is_refused_without_a_crash(key: str) -> None:
    part = open_region(key)
    shrink(key)
    for use in (lambda: part.read("q", 0, 1), lambda: part.write("q", 0, b"a")):
        with pytest.raises(InvalidInputError, match=r"^q: got bytes 0 to 256 of .*, want at most 100, its size"):
            use()
    assert content(key) == BYTES[:100]


def test_an_object_that_shrinks_between_check_and_use_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    part = open_region(key)
    shrink(key)
    monkeypatch.setattr(part, "_check", lambda name: None)
    with pytest.raises(InvalidInputError, match=r"^q: the object .* shrank while it was read"):
        part.read("q", 0, 256)


def test_a_short_read_by_the_system_is_continued(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    part, original = open_region(key), os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: original(fd, [buffers[0][:100]], at))
    assert part.read("q", 6, 250).tobytes() == BYTES[6:]


def test_too_many_open_files_are_reported_as_a_limit(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(LimitExceededError, match=r"^q\.shared: got Too many open files when opening '/.*', want fewer"):
        open_region(key)


def test_insufficient_memory_on_the_machine_is_reported_as_a_limit(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(LimitExceededError, match=r"^q: got No space left on device when writing '/.*', want more"):
        open_region(key).write("q", 0, b"a")


def test_a_freed_region_closes_its_descriptor_and_keeps_the_object(key: str) -> None:
    before = descriptors()
    part = open_region(key)
    assert descriptors() == before + 1
    del part
    assert descriptors() == before
    assert content(key) == BYTES


def test_an_unregistered_region_stays_readable_while_it_is_in_use(key: str) -> None:
    regions, before = Regions(SERVER_MEMORY), descriptors()
    regions.register("a", key, 0, 256)
    region = regions.get("q", "a")
    regions.unregister("a")
    assert region.read("q", 0, 256).tobytes() == BYTES
    with pytest.raises(InvalidInputError, match=r"^q: got region 'a', want a registered region"):
        regions.get("q", "a")
    del region
    assert descriptors() == before


def test_regions_have_unique_names_and_a_limit(key: str) -> None:
    regions = Regions(SERVER_MEMORY)
    for number in range(MAX_REGIONS):
        regions.register(str(number), key, number, 1)
    assert [(name, region.offset) for name, region in regions] == [(str(n), n) for n in range(MAX_REGIONS)]
    with pytest.raises(InvalidInputError, match=r"^region.name: '7' is already registered$"):
        regions.register("7", key, 0, 1)
    with pytest.raises(InvalidInputError, match=r"^region.name: got '', want a name$"):
        regions.register("", key, 0, 1)
    with pytest.raises(LimitExceededError, match=r"^regions: got 257, want at most 256 registered regions"):
        regions.register("x", key, 0, 1)
    regions.unregister("")
    assert list(regions) == []
    regions.register("x" * MAX_NAME, key, 0, 1)
    with pytest.raises(LimitExceededError, match=r"^region.name: got 257 characters, want at most 256$"):
        regions.register("x" * (MAX_NAME + 1), key, 0, 1)
    assert names() == {key[1:]}


def test_a_sealed_memfd_is_read_written_and_mapped() -> None:
    with sealed(bytes(5000) + BYTES * 20) as (key, descriptor):
        before = descriptors_of_memfds()
        part = open_region(key, 5000, 256 * 20)
        assert part.read("q", 0, 256).tobytes() == BYTES
        part.write("q", 0, b"new")
        mapped = part.map("q", 300)
        assert mapped is not None
        assert mapped.tobytes() == b"new" + BYTES[3:] + BYTES[:44]
        mapped[-1] = 99
        assert (
            os.pread(descriptor, 5302, 0) == bytes(5000) + b"new" + BYTES[3:] + BYTES[:43] + bytes([99]) + BYTES[44:46]
        )
        with pytest.raises(InvalidInputError, match=r"^q: got bytes 0 to 5121, want 0 to 5120 of its region$"):
            part.map("q", 5121)
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 0)
        part.close()
        assert mapped[:3].tobytes() == b"new"  # the mapping stays valid as long as it is referenced
        del part, mapped
        assert descriptors_of_memfds() == before


def make_hole(descriptor: int) -> None:
    """Set an object's size without allocating memory."""
    os.ftruncate(descriptor, 0)
    os.ftruncate(descriptor, 2**16)


UNMAPPABLE: dict[str, tuple[int, Callable[[int], object] | None]] = {
    "not sealed": (0, None),
    "sealed only against growing": (fcntl.F_SEAL_GROW, None),
    "a hole": (0, make_hole),
    "sealed against writing": (SHRINK | fcntl.F_SEAL_WRITE, None),
}


@pytest.mark.parametrize(("seals", "change"), UNMAPPABLE.values(), ids=UNMAPPABLE)
def test_an_object_without_seals_or_allocated_memory_is_not_mapped(
    seals: int, change: Callable[[int], object] | None
) -> None:
    with sealed(BYTES * 256, seals=seals) as (key, descriptor):
        if change is not None:
            change(descriptor)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SHRINK)
        part = open_region(key)
        assert part.map("q", 256) is None
        assert part.read("q", 0, 256).tobytes() == (bytes(256) if change else BYTES)


def test_a_file_is_not_mapped(key: str) -> None:
    assert open_region(key).map("q", 256) is None


@pytest.mark.parametrize(("setting", "mapped"), [("0\n", True), ("1\n", True), ("2\n", False), (None, False)])
def test_nothing_is_mapped_if_the_system_may_refuse_memory(
    setting: str | None, mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path, **_: object) -> str:
        assert str(path) == "/proc/sys/vm/overcommit_memory"
        if setting is None:
            raise FileNotFoundError
        return setting

    monkeypatch.setattr(Path, "read_text", read)
    with sealed(BYTES) as (key, _):
        assert (open_region(key).map("q", 256) is not None) is mapped


def test_an_object_that_shrinks_before_it_is_sealed_is_refused() -> None:
    with sealed(BYTES, seals=0) as (key, descriptor):
        part = open_region(key)
        os.ftruncate(descriptor, 100)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SHRINK)
        uses: list[Callable[[], object]] = [lambda: part.map("q", 256), lambda: part.read("q", 0, 1)]
        for use in uses:
            with pytest.raises(InvalidInputError, match=r"^q: got bytes 0 to 256 of .*, want at most 100, its size"):
                use()


LINKS: dict[str, Callable[[int], str]] = {
    "file": lambda own: "/etc/hostname",
    "object of another name": lambda own: f"/dev/shm/{PREFIX}object",
    "descriptor of the reader": lambda own: f"/proc/self/fd/{own}",
    "indirect path": lambda own: f"/proc/1/../{os.getpid()}/fd/{own}",
    "process that does not exist": lambda own: f"/proc/4194305/fd/{own}",
    "memory of the server": lambda own: f"/proc/{os.getpid()}/mem",
    "missing file": lambda own: "",
}


@pytest.mark.parametrize("target", LINKS.values(), ids=LINKS)
def test_a_link_to_anything_but_a_descriptor_is_refused(key: str, target: Callable[[int], str]) -> None:
    with sealed(BYTES) as (link, descriptor):
        path = FOLDER / link[1:]
        path.unlink()
        path.symlink_to(target(descriptor) or "nowhere")
        before = descriptors_of_memfds(), descriptors()
        with pytest.raises(InvalidInputError, match=rf"^q\.shared\.key: got '{link}' \(.*want an object that this"):
            open_region(link)
        assert (descriptors_of_memfds(), descriptors()) == before


FOREIGN: dict[str, Callable[[], int]] = {
    "memfd of another name": lambda: os.memfd_create(f"{PREFIX}other"),
    "memfd of a longer name": lambda: os.memfd_create(f"{PREFIX}memfd (deleted)"),
    "object of the prefix": lambda: os.open(FOLDER / f"{PREFIX}object", os.O_RDWR),
    "zero device": lambda: os.open("/dev/zero", os.O_RDWR),
    "file": lambda: os.open("/etc/hostname", os.O_RDONLY),
    "pipe": lambda: os.pipe()[0],
    "null device": lambda: os.open("/dev/null", os.O_WRONLY),
}


@pytest.mark.parametrize("make", FOREIGN.values(), ids=FOREIGN)
def test_a_descriptor_reused_for_another_file_is_refused(key: str, make: Callable[[], int]) -> None:
    with sealed(BYTES) as (link, descriptor):
        other = make()
        os.close(descriptor)
        os.dup2(other, descriptor)
        os.close(other)
        with pytest.raises(InvalidInputError, match=rf"^q\.shared\.key: got '{link}' \(.*want an object that this"):
            open_region(link)
        os.dup2(0, descriptor)  # closed after the test


def test_a_descriptor_replaced_after_the_check_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    with sealed(BYTES) as (link, descriptor):
        original = os.readlink

        def replaced(path: str) -> str:
            result = original(path)
            if path.startswith("/proc/self/fd/"):
                os.dup2(os.open("/etc/hostname", os.O_RDONLY), descriptor)
            return result

        monkeypatch.setattr(os, "readlink", replaced)
        assert open_region(link).read("q", 0, 256).tobytes() == BYTES


@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes the owner of a file")
def test_a_memfd_owned_by_another_user_is_refused() -> None:
    with sealed(BYTES) as (link, descriptor):
        os.fchown(descriptor, 12345, -1)
        with pytest.raises(InvalidInputError, match=r"got .*, want a regular object owned by this server's user"):
            open_region(link)


@pytest.mark.parametrize(
    ("host", "is_local"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)]
)
def test_only_loopback_hosts_are_local(host: str, is_local: bool) -> None:
    assert local(Listen(host)) is is_local
    if is_local:
        SERVER_MEMORY.check(Listen(host))
    else:
        SharedMemory().check(Listen(host))
        with pytest.raises(InvalidInputError, match=f"^shared-memory: got host '{host}', want a loopback host"):
            SERVER_MEMORY.check(Listen(host))


def test_a_unix_socket_is_local_regardless_of_the_host(tmp_path: Path) -> None:
    uds = tmp_path / "socket"
    assert (local(Listen("0.0.0.0", tcp=False, uds=uds)), local(Listen("0.0.0.0", uds=uds))) == (True, False)
