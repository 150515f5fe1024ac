"""cached_property: one value per instance, even of a frozen dataclass, and no lock that can block a forked child."""

from __future__ import annotations

import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError, dataclass, field
from typing import assert_type

import pytest

from mmpos.support.cached import cached_property

WAIT = 300  # seconds before a blocked child is killed


@dataclass(frozen=True)
class Frozen:
    waits: bool = False
    started: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)

    @cached_property
    def value(self) -> list[int]:
        """Return a new list."""
        self.started.set()
        if self.waits:
            self.release.wait(WAIT)
        return []


def test_a_value_is_computed_once_for_each_instance() -> None:
    one, other = Frozen(), Frozen()
    assert assert_type(one.value, list[int]) is one.value
    assert one.value is not other.value
    assert vars(one)["value"] is one.value
    assert Frozen.value.__doc__ == "Return a new list."
    with pytest.raises(FrozenInstanceError):
        one.value = [1]


def test_threads_that_compute_a_value_concurrently_receive_the_same_object() -> None:
    shared = Frozen(waits=True)
    values = []
    with ThreadPoolExecutor(2) as threads:
        for _ in range(2):
            values.append(threads.submit(lambda: shared.value))
            assert shared.started.wait(WAIT)
            shared.started.clear()
        shared.release.set()
    assert values[0].result() is values[1].result() is shared.value


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")  # the situation under test
def test_a_child_forked_during_a_computation_computes_its_own_value() -> None:
    busy = Frozen(waits=True)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(lambda: busy.value)
        assert busy.started.wait(WAIT)
        child = multiprocessing.get_context("fork").Process(target=lambda: Frozen().value)
        child.start()
        child.join(WAIT)
        code = child.exitcode
        child.kill()
        child.join()
        busy.release.set()
    assert code == 0
