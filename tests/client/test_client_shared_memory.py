"""Test clients that share memory with a server on this machine: their results, and the lifetime of their regions."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from clients import open_client
from results import assert_equal
from shared_objects import PREFIX, names

from mmpos import Grid, SegmentTable, Text, place
from mmpos.client import AsyncClient, Client, shared_memory
from mmpos.client.shared_memory import LEAST, Lease, SharedObjects
from mmpos.errors import (
    InvalidInputError,
    LimitExceededError,
    ServiceTimeoutError,
    ServiceUnavailableError,
    UnsupportedError,
)
from mmpos.rotary import Rotary, apply_rotary
from mmpos.rpc.errors import OutputError
from mmpos.rpc.v1 import sequences_pb2, tensor_pb2
from mmpos_server.call import Call
from mmpos_server.config import ServerConfig
from mmpos_server.methods import Method, Run
from mmpos_server.services import methods
from mmpos_server.shared_memory import SharedMemory
from mmpos_server.testing import running

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the test looks for objects where Linux keeps them")

CONFIG = ServerConfig.model_validate({"profiles": {"default": {"images": {"backend": "pillow"}}}})
SERVER_MEMORY = SharedMemory(PREFIX)
MIB = 2**20
PHOTOS = [str(path) for path in (Path(str(resources.files("mmpos"))) / "photos").glob("*.jpg")]
SEGMENTS = SegmentTable.from_documents([[Text(500), Grid(20, 20), Text(124)]])
TABLE, ROTARY = place(SEGMENTS), Rotary(64)


def tensors(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a q of about one megabyte, and a k a quarter of that size."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(TABLE.num_tokens, heads, 64, generator=generator).bfloat16() for heads in (8, 2))
    return q, k


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with running(CONFIG, shared_memory=SERVER_MEMORY) as address:
        yield address


@pytest.fixture
def client(server: str) -> Iterator[Client]:
    with Client(server, shared_memory=64 * MIB, timeout=60) as client:
        yield client
    assert names() == set()


def idle_sizes(client: Client) -> list[int]:
    """Return the sizes of a client's idle regions."""
    pool = client._pools.get()
    return [] if pool is None else sorted(region.size for region in pool.regions._idle)


def test_messages_do_not_contain_large_tensors(server: str) -> None:
    config = CONFIG.model_copy(update={"limits": CONFIG.limits.model_copy(update={"request_bytes": MIB})})
    q, k = tensors()
    with running(config, shared_memory=SERVER_MEMORY) as address:
        with Client(address, timeout=60) as plain, pytest.raises(LimitExceededError, match="message larger than max"):
            plain.apply_rotary(q, k, TABLE, ROTARY)
        with Client(address, shared_memory=64 * MIB, timeout=60) as client:
            assert_equal(client.apply_rotary(q, k, TABLE, ROTARY), apply_rotary(q, k, TABLE, ROTARY))


def test_results_are_writable_and_survive_later_calls(client: Client) -> None:
    first, second = tensors(1), tensors(2)
    rotated = client.apply_rotary(*first, TABLE, ROTARY)
    client.apply_rotary(*second, TABLE, ROTARY)
    assert_equal(rotated, apply_rotary(*first, TABLE, ROTARY))
    rotated[0].zero_()
    patches = client.build([Path(PHOTOS[0])]).patches
    assert patches is not None
    patches[:] = 0


def test_regions_are_reused(client: Client) -> None:
    client.apply_rotary(*tensors(), TABLE, ROTARY)
    first = names()
    client.apply_rotary(*tensors(1), TABLE, ROTARY)
    assert (names(), len(first), len(idle_sizes(client))) == (first, 3, 3)


def test_regions_are_sealed_objects_if_the_server_sees_this_process_and_files_otherwise(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k = tensors()
    want = apply_rotary(q, k, TABLE, ROTARY)
    assert_equal(client.apply_rotary(q, k, TABLE, ROTARY), want)
    links = [os.readlink(f"/dev/shm/{name}") for name in names()]
    assert len(links) == 3
    for link in links:
        assert re.fullmatch(rf"/proc/{os.getpid()}/fd/\d+", link)
        descriptor = int(link.rpartition("/")[2])
        want_seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        assert fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) == want_seals
    monkeypatch.setattr(shared_memory, "process_space", lambda: "pid:[1]")
    before = names()
    with client.with_options(timeout=50), pickle.loads(pickle.dumps(client)) as other:
        assert_equal(other.apply_rotary(q, k, TABLE, ROTARY), want)
        files = [Path("/dev/shm", name) for name in names() - before]
        assert [path.is_symlink() for path in files] == [False] * 3


def test_a_server_without_shared_memory_is_refused_at_the_first_call(kind: str) -> None:
    want = "^shared_memory requires a server on this machine, started with --shared-memory$"
    with running(CONFIG) as address, open_client(kind, address, shared_memory=MIB) as client:
        assert client.info().shared_memory_prefix == ""
        with pytest.raises(UnsupportedError, match=want):
            client.place(SEGMENTS)


def test_memory_beyond_the_client_limit_is_refused(server: str) -> None:
    with Client(server, shared_memory=2 * MIB, timeout=60) as client:
        with pytest.raises(
            LimitExceededError, match=r"^shared_memory: got \d+ bytes besides \d+ in use, want at most 2097"
        ):
            client.apply_rotary(*tensors(), TABLE, ROTARY)
        assert names() == set()
        # The size of the answer is unknown, so its region takes all bytes that the documents leave free.
        array = np.full((500, 500, 3), 7, np.uint8)
        assert client.build(["A ", array]).patches is not None
        with pytest.raises(
            LimitExceededError, match=r"^shared_memory: got \d+ bytes besides 786432 in use, want at most"
        ):
            client.build(["A ", array, *[Path(PHOTOS[0])] * 6])


@pytest.mark.parametrize("value", [-1, 1.5, "1"])
def test_the_limit_must_be_a_number_of_bytes(value: object) -> None:
    with pytest.raises(InvalidInputError, match="shared_memory: got"):
        Client(shared_memory=value)  # type: ignore[arg-type]


def test_an_answer_larger_than_the_guess_is_requested_again(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "GUESS", LEAST)
    parts = ["A ", Path(PHOTOS[0])]
    first = client.build(parts)
    assert first.patches is not None
    pool = client._pools.get()
    assert pool is not None
    needed = first.patches.nbytes
    assert pool.expected == {sequences_pb2.SequencesQuery: needed + needed // 8 + LEAST}
    assert [size >= needed for size in idle_sizes(client)] == [True]


def test_an_answer_that_never_fits_is_an_error() -> None:
    pool = shared_memory.Pool(MIB, server_info())
    seen = []

    def call() -> None:
        for lease in pool.leases():
            with lease:
                request = sequences_pb2.SequencesQuery()
                lease.answer(request)
                seen.append(request.output.byte_size)
                raise OutputError("output.byte_size: got 1, want >= 2", 100_000)

    with pytest.raises(OutputError, match=r"^output.byte_size: got 1, want >= 2$"):
        call()
    assert seen == [MIB, 178_036, 178_036]
    pool.regions.close()
    assert names() == set()


def server_info() -> Any:
    """Return a stand-in for a server's info with the fields that pools read."""
    return SimpleNamespace(shared_memory_prefix=PREFIX, shared_memory_processes="")


def wrapped_rotations(wrapper: Callable[[Run], Run]) -> Callable[..., list[Method]]:
    """Return a function that builds a server's methods with its rotations wrapped."""

    def build(*arguments: Any) -> list[Method]:
        return [
            replace(method, run=wrapper(method.run)) if method.name == "Rotate" else method
            for method in methods(*arguments)
        ]

    return build


def test_regions_of_a_failed_call_are_removed() -> None:
    late = threading.Event()

    def delayed(run: Run) -> Run:
        def rotate(request: Any, answer: Any, call: Call) -> None:
            while late.is_set():
                time.sleep(0.01)
            run(request, answer, call)

        return rotate

    with (
        running(CONFIG, shared_memory=SERVER_MEMORY, methods=wrapped_rotations(delayed)) as address,
        Client(address, shared_memory=64 * MIB, timeout=60) as client,
    ):
        client.apply_rotary(*tensors(), TABLE, ROTARY)
        before = names()
        late.set()
        with pytest.raises(ServiceTimeoutError):
            client.with_options(timeout=0.3).apply_rotary(*tensors(), TABLE, ROTARY)
        late.clear()
        assert names() == set()
        q, k = tensors(3)
        with pytest.raises(InvalidInputError, match=r"^k: got shape"):
            client.apply_rotary(q[1:], k, TABLE, ROTARY)
        assert names() == set()
        assert_equal(client.apply_rotary(q, k, TABLE, ROTARY), apply_rotary(q, k, TABLE, ROTARY))
        assert len(names()) == 3
        assert not names() & before


def test_regions_of_a_retried_call_are_removed(kind: str) -> None:
    refused: list[str] = []

    def once(run: Run) -> Run:
        """Wrap the rotation so that its first call fails as if the server were about to stop."""

        def rotate(request: Any, answer: Any, call: Call) -> None:
            if not refused:
                refused.append(call.request_id)
                raise ServiceUnavailableError("the server is about to stop")
            run(request, answer, call)

        return rotate

    q, k = tensors()
    want = apply_rotary(q, k, TABLE, ROTARY)
    counts = []
    with (
        running(CONFIG, shared_memory=SERVER_MEMORY, methods=wrapped_rotations(once)) as address,
        open_client(kind, address, shared_memory=64 * MIB, timeout=60) as client,
    ):
        for _ in range(2):
            assert_equal(client.apply_rotary(q, k, TABLE, ROTARY), want)
            counts.append(len(names()))
    assert (len(refused), counts) == (1, [0, 3])


def test_an_answer_outside_the_region_of_its_request_is_refused() -> None:
    pool = shared_memory.Pool(MIB, server_info())
    with Lease(pool, last=True) as lease:
        part = tensor_pb2.SharedMemory(key=f"/{PREFIX}x", byte_size=1)
        with pytest.raises(InvalidInputError, match=r"^q: got bytes 0 to 1 of '/.*x', want the region of the request$"):
            lease.get("q", part)
        request = sequences_pb2.SequencesQuery()
        lease.answer(request, 100_000)
        for offset, size in ((-1, 2), (2**62, 2**62), (2 * LEAST, 1), (0, -1)):
            part.CopyFrom(tensor_pb2.SharedMemory(key=request.output.key, offset=offset, byte_size=size))
            with pytest.raises(InvalidInputError, match="want the region of the request"):
                lease.get("q", part)
    pool.regions.close()


def test_many_threads_can_rotate_concurrently(client: Client) -> None:
    def rotates(seed: int) -> bool:
        q, k = tensors(seed)
        rotated = client.apply_rotary(q, k, TABLE, ROTARY)
        want = apply_rotary(q, k, TABLE, ROTARY)
        return torch.equal(rotated[0], want[0]) and torch.equal(rotated[1], want[1])  # type: ignore[arg-type]

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(rotates, range(24))) == [True] * 24
    assert len(idle_sizes(client)) <= 24


def test_many_tasks_can_rotate_concurrently(server: str) -> None:
    async def scenario() -> None:
        async with AsyncClient(server, shared_memory=64 * MIB, timeout=60) as client:
            pairs = [tensors(seed) for seed in range(6)]
            rotated = await asyncio.gather(*(client.apply_rotary(*pair, TABLE, ROTARY) for pair in pairs))
            assert_equal(list(rotated), [apply_rotary(*pair, TABLE, ROTARY) for pair in pairs])

    asyncio.run(scenario())
    assert names() == set()


def test_a_pickled_client_has_its_own_regions_and_with_options_shares_them(client: Client) -> None:
    client.apply_rotary(*tensors(), TABLE, ROTARY)
    mine = names()
    client.with_options(timeout=50).apply_rotary(*tensors(), TABLE, ROTARY)
    assert names() == mine
    with pickle.loads(pickle.dumps(client)) as other:
        other.apply_rotary(*tensors(), TABLE, ROTARY)
        assert (len(names()), names() >= mine) == (6, True)
    assert names() == mine


def test_regions_are_removed_with_their_client(server: str) -> None:
    client = Client(server, shared_memory=64 * MIB, timeout=60)
    client.apply_rotary(*tensors(), TABLE, ROTARY)
    assert len(names()) == 3
    client.close()
    assert names() == set()
    client.apply_rotary(*tensors(), TABLE, ROTARY)
    assert len(names()) == 3
    channel = client._channels.pop()
    assert channel is not None
    channel.close()
    del client
    gc.collect()
    assert names() == set()


def test_regions_in_use_at_close_are_removed_once_returned() -> None:
    regions = SharedObjects(PREFIX, 64 * MIB)
    one = regions.take(MIB)
    regions.close()
    assert len(names()) == 1
    regions.give(one, keep=True)
    assert names() == set()


def test_idle_regions_are_reused_if_they_fit_and_removed_to_make_room() -> None:
    regions = SharedObjects(PREFIX, 10 * LEAST)
    one, two = regions.take(3 * LEAST), regions.take(1)
    assert (one.size, two.size, regions.free) == (3 * LEAST, LEAST, 6 * LEAST)
    with pytest.raises(
        LimitExceededError, match=r"^shared_memory: got 458752 bytes besides 262144 in use, want at most"
    ):
        regions.take(7 * LEAST)
    for region in (one, two):
        regions.give(region, keep=True)
    assert regions.take(3 * LEAST - 1) is one  # and not the first idle region
    regions.give(one, keep=True)
    full = regions.take(10 * LEAST)
    assert names() == {full.key[1:]}  # the idle regions were removed
    regions.close()


def test_insufficient_memory_on_the_machine_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    regions = SharedObjects(PREFIX, 2**60)
    with pytest.raises(
        LimitExceededError, match=r"^shared_memory: cannot create an object of \d+ bytes \(No space left on device\)"
    ):
        regions.take(2**50)
    assert names() == set()


SCRIPT = """
import os, sys
from mmpos.client.shared_memory import SharedObjects
regions = SharedObjects(sys.argv[1], 2**24)
region = regions.take(2**20)
region.data[:] = 7
"""


def script(*lines: str) -> subprocess.CompletedProcess[str]:
    program = "\n".join([SCRIPT, *lines])
    return subprocess.run([sys.executable, "-c", program, PREFIX], capture_output=True, text=True, check=False)


def test_regions_are_removed_at_exit() -> None:
    assert script("print(os.path.exists('/dev/shm' + region.key))").stdout == "True\n"
    assert names() == set()


def test_a_forked_child_does_not_remove_the_regions_of_its_parent() -> None:
    completed = script(
        "child = os.fork()",
        "if not child:",
        "    regions.give(region, keep=False)",
        "    regions.close()",
        "    sys.exit()",
        "os.waitpid(child, 0)",
        "print(os.path.exists('/dev/shm' + region.key), region.data.sum() == 7 * 2**20)",
    )
    assert (completed.stdout, completed.stderr) == ("True True\n", "")
    assert names() == set()


KILLED = """
import sys, threading, torch
from mmpos import SegmentTable, Text, place
from mmpos.client import Client
from mmpos.rotary import Rotary
client = Client(sys.argv[1], shared_memory=2**28, timeout=60)
q = torch.ones(4096, 32, 128)
table = place(SegmentTable.from_documents([[Text(4096)]]))
client.apply_rotary(q[:1024], None, table.slice(0, 1024), Rotary(128))
print("ready", flush=True)
while True:
    client.apply_rotary(q, None, table, Rotary(128))
"""


@pytest.mark.slow
def test_a_killed_client_does_no_harm(client: Client, server: str) -> None:
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", KILLED, server], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGKILL)
        q, k = tensors()
        assert_equal(client.apply_rotary(q, k, TABLE, ROTARY), apply_rotary(q, k, TABLE, ROTARY))
        # The objects of the killed process remain; their names contain its id.
        for name in names(f"{PREFIX}{process.pid}-"):
            Path("/dev/shm", name).unlink()
