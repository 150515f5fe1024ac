"""A pytest plugin: tests of the rooms run again with every placement and every sequence made by a real server.

The environment variable THROUGH names the client, "sync" or "async". Tables come from a server in a thread of the
process, over a socket, and builders are profiles of it.
"""

from __future__ import annotations

import asyncio
import atexit
import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

import mmpos
from mmpos.client import AsyncClient, Client
from mmpos.images import ImageProcessor
from mmpos.positions.place import place as place_here
from mmpos.schemes import SCHEMES, Scheme
from mmpos.sequence.builder import SequenceBuilder
from mmpos_server.config import Limits, Profile, Profiles
from mmpos_server.services import methods
from mmpos_server.testing import running

# What stays in process, and why.
LOCAL = {
    "test_tables_of_more_than_int32_tokens_can_be_cut": "every answer has cu_seqlens, which is int32",
    "test_an_image_without_a_processor_is_refused": "every profile of a server has an image processor",
    "test_files_and_arrays_are_decoded_in_threads_and_nothing_else_is": "a server has threads of its own",
    "test_no_threads_are_refused": "a server has threads of its own",
}


# Beyond what any test of a room asks for: they judge the rooms' own limits.
_LIMITS = Limits(tokens=2**62, segments=2**62, pixels=2**62, response_bytes=2**31 - 1)


class Registry(Profiles):
    """Profiles that grow with every builder that a test makes."""

    builders: dict[str, SequenceBuilder] = {}  # noqa: RUF012

    def get(self, name: str | None) -> Profile:
        """The profile of a builder."""
        return Profile(name, self.builders[name]) if name in self.builders else super().get(name)


@dataclass(frozen=True)
class RemoteBuilder(SequenceBuilder):
    """A builder whose sequences a server makes."""

    def build(self, parts: Any) -> Any:
        """The sequence of these parts."""
        return _through("build", self._profile(), parts, start=self.start)

    def build_batch(self, documents: Any, *, threads: int | None = None) -> Any:
        """The sequences of several documents; the server has threads of its own."""
        return _through("build_batch", self._profile(), documents, start=self.start)

    def _profile(self) -> str:
        name = str(id(self))
        local = {field: getattr(self, field) for field in ("tokenizer", "scheme", "markers")}
        Registry.builders[name] = SequenceBuilder(images=self.images or ImageProcessor("pillow"), **local)
        return name


def place(segments: Any, scheme: Any = "rope-tie", start: Any = 0, strict: Any = None) -> Any:
    """mmpos.place by a server; schemes of the caller's own do not travel."""
    if isinstance(scheme, Scheme) and SCHEMES.get(scheme.name) is not type(scheme):
        return place_here(segments, scheme, start, strict)
    return _through("place", None, segments, scheme, start, strict)


def _through(call: str, profile: str | None, *arguments: Any, **options: Any) -> Any:
    _calls.append(call)
    if _loop is None:
        return getattr(_client.with_options(profile=profile), call)(*arguments, **options)

    async def answer() -> Any:
        return await getattr(_client.with_options(profile=profile), call)(*arguments, **options)

    return _loop.run_until_complete(answer())


_calls: list[str] = []
_stack = ExitStack()
atexit.register(_stack.close)
_address = _stack.enter_context(
    running(methods=lambda profiles, limits, memory: methods(Registry(profiles), _LIMITS, memory))
)
_loop = asyncio.new_event_loop() if os.environ["THROUGH"] == "async" else None
_client: Any = (AsyncClient if _loop else Client)(_address)

# Rooms took the real ones when they were imported; tests take these.
vars(mmpos).update(place=place, SequenceBuilder=RemoteBuilder)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what cannot be asked of a server, each with its reason."""
    for item in items:
        reason = LOCAL.get(getattr(item, "originalname", item.name))
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how much was asked, so that a run which asked nothing is seen."""
    counts = {call: _calls.count(call) for call in sorted(set(_calls))}
    terminalreporter.write_line(f"asked of the server: {counts}")
