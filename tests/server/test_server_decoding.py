"""Images that may take long: decoded by processes with the same results, and ended with whoever waits for them."""

from __future__ import annotations

import io
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hostile_images as hostile
import numpy as np
import numpy.typing as npt
import pytest
from mutations import broken, files
from PIL import Image
from waiting import eventually, without_torch

from mmpos.client import Client
from mmpos.errors import (
    InvalidInputError,
    LimitExceededError,
    MmposError,
    ServiceError,
    ServiceOverloadedError,
    ServiceTimeoutError,
)
from mmpos.images import ImageProcessor, ImageSize, headers
from mmpos.images.headers import read_header
from mmpos.sequence.builder import SequenceBuilder
from mmpos_server.config import ServerConfig
from mmpos_server.decoding import Decoders, IsolatedImageProcessor
from mmpos_server.testing import running

Pixels = npt.NDArray[Any]
Children = list["subprocess.Popen[bytes]"]


def nothing() -> None:
    """A checkpoint before which somebody always waits."""


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Children:
    """The processes that decode, as they are started."""
    found: Children = []
    start = subprocess.Popen

    def started(command: Any, **options: Any) -> Any:
        process = start(command, **options)
        if "mmpos_server.decoding" in command:
            found.append(process)
        return process

    monkeypatch.setattr(subprocess, "Popen", started)
    return found


@pytest.fixture
def all_heavy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headers, "_HEAVY", 0)


@pytest.fixture
def many_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let scans through, so that there is something to be ended."""
    monkeypatch.setattr(headers, "MOST_SCANS", 10**6)


@pytest.fixture
def decoders() -> Iterator[Decoders]:
    found = Decoders(20)
    yield found
    found.close()


def apart(decoders: Decoders, checkpoint: Callable[[], None] = nothing, **options: Any) -> IsolatedImageProcessor:
    images = ImageProcessor("pillow", patch_size=4, spatial_merge_size=1, min_pixels=0, **options)
    return IsolatedImageProcessor.of(images, decoders, checkpoint)


@pytest.mark.usefixtures("all_heavy")
def test_images_of_every_kind_are_those_of_the_library(decoders: Decoders, children: Children) -> None:
    processor = apart(decoders, background=(9, 99, 199))
    plain = ImageProcessor("pillow", patch_size=4, spatial_merge_size=1, min_pixels=0, background=(9, 99, 199))
    for data in [*files(), hostile.deep_png(12)]:
        ours, theirs = processor.process(data, temporal_patch_size=None), plain.process(data)
        assert (ours.grid, ours.size, ours.source_size) == (theirs.grid, theirs.size, theirs.source_size)
        assert ours.content_hash == theirs.content_hash
        np.testing.assert_array_equal(ours.patches, theirs.patches)
    assert len(children) == 1


@pytest.mark.usefixtures("all_heavy")
def test_a_broken_file_has_the_error_of_the_library_and_the_process_goes_on(
    decoders: Decoders, children: Children
) -> None:
    processor, plain = apart(decoders), ImageProcessor("pillow")
    for data in files()[:-1]:  # of the last one the first half is a whole frame
        cut = data[: len(data) // 2]
        with pytest.raises(MmposError) as ours:
            processor.process(cut)
        with pytest.raises(MmposError) as theirs:
            plain.process(cut)
        assert (type(ours.value), str(ours.value)) == (type(theirs.value), str(theirs.value))
    assert processor.process(files()[0]).patches is not None
    assert len(children) <= 1
    with pytest.raises(LimitExceededError, match="max_decode_bytes"):
        apart(decoders, max_decode_bytes=10).process(files()[0])


def test_an_image_that_is_not_heavy_has_no_process(decoders: Decoders, children: Children) -> None:
    assert apart(decoders).process(files()[0]).patches is not None
    assert apart(decoders).process(np.zeros((8, 8), np.uint8)).patches is not None
    assert children == []


@pytest.mark.usefixtures("many_scans")
def test_the_process_ends_as_soon_as_nobody_waits(decoders: Decoders, children: Children) -> None:
    beats = 0

    class GoneError(BaseException):
        pass

    def checkpoint() -> None:
        nonlocal beats
        beats += 1
        if beats == 3:
            raise GoneError

    with pytest.raises(GoneError):
        apart(decoders, checkpoint).process(hostile.endless_jpeg())
    assert [child.returncode for child in children] == [-signal.SIGKILL]


@pytest.mark.usefixtures("many_scans")
def test_the_process_ends_when_its_time_is_over(children: Children) -> None:
    with pytest.raises(LimitExceededError, match="image: got a JPEG that takes more than 1 s to decode, want less"):
        apart(Decoders(1)).process(hostile.endless_jpeg())
    assert [child.returncode for child in children] == [-signal.SIGXCPU]


def test_memory_beyond_what_the_header_says_is_refused_and_the_process_goes_on(
    decoders: Decoders, monkeypatch: pytest.MonkeyPatch, children: Children
) -> None:
    data = hostile.deep_png(5000)  # which needs 200 MB
    monkeypatch.setattr(headers.Header, "decode_bytes", 0)
    message = "a PNG of 5000 x 5000 pixels that takes more memory to decode than its limit, want less"
    for _ in range(2):
        with pytest.raises(LimitExceededError, match=message):
            apart(decoders, max_decode_bytes=1).process(data)
    assert len(children) == 1


@pytest.mark.usefixtures("many_scans")
def test_a_file_over_which_the_decoder_dies_is_refused(decoders: Decoders, children: Children) -> None:
    with pytest.raises(InvalidInputError, match=r"a JPEG that crashed its decoder \(SIGSEGV\), want a valid file"):
        apart(decoders, lambda: children[0].send_signal(signal.SIGSEGV)).process(hostile.endless_jpeg())
    assert apart(decoders).process(files()[0]).patches is not None


@pytest.mark.usefixtures("all_heavy")
def test_a_process_that_cannot_work_is_no_fault_of_the_image(
    decoders: Decoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(RuntimeError, match="a process that decodes ended with exit code 1"):
        apart(decoders).process(files()[0])


@pytest.mark.usefixtures("all_heavy")
def test_processes_end_with_their_server(children: Children) -> None:
    data = photo()
    with running(server()) as address, Client(address, timeout=120) as client:
        sequence = client.build(["a", data])
        assert [child.poll() for child in children] == [None]
    assert [child.returncode for child in children] == [-signal.SIGKILL]
    local = SequenceBuilder(images=ImageProcessor("pillow")).build(["a", data])
    np.testing.assert_array_equal(sequence.patches, local.patches)
    assert sequence.image_hashes == local.image_hashes


def server(**settings: object) -> ServerConfig:
    profile = {"images": {"backend": "pillow"}}
    return ServerConfig.model_validate({"profiles": {"default": profile}, **settings})


def photo() -> bytes:
    file = io.BytesIO()
    Image.effect_noise((300, 400), 9).convert("RGB").save(file, "JPEG")
    return file.getvalue()


@pytest.mark.usefixtures("many_scans")
def test_photographs_of_others_are_answered_beside_images_that_do_not_end(children: Children) -> None:
    with (
        running(server()) as address,
        ThreadPoolExecutor(3) as threads,
        Client(address, timeout=120) as client,
        Client(address, timeout=120) as gone,
        Client(address, timeout=3) as late,
    ):
        attacks = [threads.submit(attacker.build, ["a", hostile.endless_jpeg()]) for attacker in (gone, gone, late)]
        assert eventually(lambda: len(children) == 2)
        images = [client.build(["a", photo()]).grid_thw.tolist() for _ in range(12)]
        assert images == [[[1, 14, 11]]] * 12
        gone.close()
        assert [isinstance(attack.exception(), ServiceError) for attack in attacks] == [True] * 3
        assert isinstance(attacks[2].exception(), ServiceTimeoutError)
        assert eventually(lambda: all(child.poll() is not None for child in children))


@pytest.mark.usefixtures("many_scans")
def test_images_that_do_not_end_have_places_of_their_own(children: Children) -> None:
    settings = {"max_in_flight_heavy": 1, "max_in_flight_images": 1}
    with (
        running(server(concurrency=settings)) as address,
        ThreadPoolExecutor(1) as threads,
        Client(address, timeout=120) as slow,
        Client(address, timeout=120, attempts=1) as client,
    ):
        attack = threads.submit(slow.build, ["a", hostile.endless_jpeg()])
        assert eventually(lambda: len(children) == 1)
        with pytest.raises(ServiceOverloadedError, match="max_in_flight_heavy: got 1 taken of 1"):
            client.build(["a", hostile.endless_jpeg()])
        assert client.build(["a", photo()]).grid_thw.tolist() == [[1, 14, 11]]
        slow.close()
        assert isinstance(attack.exception(), ServiceError)


def test_a_signal_ends_the_server_and_what_it_decodes(tmp_path: Path) -> None:
    lines = [
        "import sys",
        "from mmpos.images import headers",
        "headers.MOST_SCANS = 10**6",
        "from mmpos_server.__main__ import main",
        "sys.exit(main(sys.argv[1:]))",
    ]
    command = [sys.executable, "-c", "\n".join(lines), "--port", "0", "--drain-seconds", "0.1", "--log-level", "error"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=without_torch(tmp_path)) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        with ThreadPoolExecutor(1) as threads, Client(address, timeout=60, attempts=1) as client:
            attack = threads.submit(client.build, ["a", hostile.endless_jpeg()])
            assert eventually(lambda: len(decoding_for(process.pid)) == 1)
            child = decoding_for(process.pid)[0]
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
            assert isinstance(attack.exception(), MmposError)
        assert eventually(lambda: not Path(f"/proc/{child}").exists())


def decoding_for(parent: int) -> list[int]:
    """The processes that decode for this one."""
    children = Path(f"/proc/{parent}/task").glob("*/children")
    numbers = [int(number) for file in children for number in file.read_text().split()]
    return [number for number in numbers if b"mmpos_server.decoding" in Path(f"/proc/{number}/cmdline").read_bytes()]


@pytest.mark.usefixtures("all_heavy")
@pytest.mark.parametrize("count", [100, pytest.param(5000, marks=pytest.mark.slow)])
def test_damaged_images_are_the_fault_of_the_caller(count: int) -> None:
    chance, whole = random.Random(2), [*files(), hostile.jpeg_of_scans(20), hostile.deep_png(8)]
    with running(server()) as address, Client(address, timeout=120) as client:
        for _ in range(count // 10):
            documents = [["a", broken(chance.choice(whole), chance, whole)] for _ in range(10)]
            for result in client.build_batch(documents, errors="return"):
                if isinstance(result, Exception):
                    assert isinstance(result, InvalidInputError | LimitExceededError)


def test_only_what_may_take_long_is_heavy() -> None:
    def header(data: bytes, height: int, width: int) -> headers.Header:
        found = read_header(data)
        return headers.Header(found.kind, ImageSize(height, width), 1, found.channels, found.depth, found.scans)

    jpeg, png, deep, webp = files()[0], files()[4], hostile.deep_png(8), files()[9]
    assert not header(jpeg, 6000, 8000 - 1).heavy(0)
    assert header(jpeg, 6000, 8000).heavy(1)
    assert header(hostile.jpeg_of_scans(10), 6000, 8000).heavy(0)
    assert not header(hostile.jpeg_of_scans(10), 4000, 6000).heavy(0)
    assert not header(png, 2160, 3840).heavy(0)
    assert header(png, 4000, 6000).heavy(0)
    assert header(deep, 2160, 3840).heavy(0)
    assert not header(webp, 2160, 3840).heavy(0)
    assert header(jpeg, 8, 8).heavy(50_000_000)
