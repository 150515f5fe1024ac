"""Test large images: few are decoded concurrently, other calls do not wait, and hostile images are refused."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import hostile_images as hostile
import numpy as np
import pytest
from PIL import Image

from mmpos.client import Client
from mmpos.errors import LimitExceededError
from mmpos.images import ImageProcessor, decode
from mmpos.sequence.builder import SequenceBuilder
from mmpos.support.info import cores
from mmpos_server.config import Profiles, ServerConfig, load
from mmpos_server.testing import running

PHOTO = hostile.encoded(Image.effect_noise((300, 400), 9).convert("RGB"), "JPEG")
LARGE = hostile.encoded(Image.new("RGB", (1100, 1000), "red"), "PNG")


CONFIG = ServerConfig({"default": {"images": {"backend": "pillow"}}})


def test_two_threads_decode_images_and_no_other_call_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, done, samples = threading.Semaphore(0), threading.Event(), decode.samples

    def slow(image: Image.Image) -> decode.Samples:
        if image.width > 1000:
            begun.release()
            assert done.wait(60)
        return samples(image)

    monkeypatch.setattr(decode, "samples", slow)
    with (
        running(CONFIG) as address,
        ThreadPoolExecutor(3) as threads,
        Client(address, timeout=120) as client,
    ):
        large = [threads.submit(client.build, ["a", LARGE]) for _ in range(3)]
        assert begun.acquire(timeout=60)
        assert begun.acquire(timeout=60) or cores() == 1
        assert not begun.acquire(timeout=0.2), "more than two threads decode images"
        assert client.build(["a"]).input_ids.tolist() == [97]
        done.set()
        local = SequenceBuilder(images=ImageProcessor("pillow")).build(["a", LARGE])
        for sequence in (call.result(60) for call in large):
            np.testing.assert_array_equal(sequence.patches, local.patches)
            assert sequence.image_hashes == local.image_hashes


def test_a_profile_without_settings_takes_images_of_16_megapixels() -> None:
    image = Profiles.from_config(load()).default.builder.images
    assert image is not None
    assert image.max_source_pixels == 16_000_000


def test_hostile_images_are_refused() -> None:
    hostiles = [hostile.jpeg_of_scans(5000), hostile.png_of_chunks(60_000), hostile.gif_of_blocks(60_000), PHOTO]
    with running(CONFIG) as address, Client(address, timeout=120) as client:
        results = client.build_batch([["a", image] for image in hostiles], errors="return")
    assert [type(result) for result in results[:3]] == [LimitExceededError] * 3
    assert not isinstance(results[3], Exception)
