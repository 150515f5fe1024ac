"""How many calls of each method are taken from the transport: many for a burst, few while there are too many."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from time import monotonic
from typing import NamedTuple

__all__ = ["LOOK_SECONDS", "Lane", "Overload", "Place", "Width", "current_place"]

LOOK_SECONDS = 0.1
"""How often the transport is asked whether it has dropped calls."""

_BURST = 0.5
"""Seconds of drops that are no overload yet: of a burst, and of its callers who try again."""

_CALM = 1.0
"""Seconds without a drop after which there is no overload any more."""


class Overload:
    """Whether the transport drops calls for longer than a burst takes.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._first = self._last = -math.inf
        self.here = False

    def look(self, *, dropped: bool) -> None:
        """Take note of whether calls were dropped since the last look."""
        now = self._clock()
        if now - self._last >= _CALM:
            self._first, self.here = now, False
        if dropped:
            self._last = now
            self.here = now - self._first >= _BURST


class Place:
    """The place of one call in its lane, from when it comes until its work is done.

    Args:
        lane: that it is in.
    """

    __slots__ = ("_lane", "here", "seen")

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self.here = False
        """Whether its request has come."""
        self.seen = False
        """Whether the lane was looked at since the call came."""

    def begin(self) -> None:
        """Hold the place from now on as long as the work takes: the request is here."""
        self.here = True
        self._lane.hold(self)

    def leave(self) -> None:
        """Give the place to another call; once more is no harm."""
        self._lane.leave(self)


current_place: ContextVar[Place | None] = ContextVar("current_place", default=None)
"""The place of the running call; None where it came another way than through a lane."""


class Width(NamedTuple):
    """Places of a lane, and how many there are of them under overload."""

    most: int
    few: int


class Lane:
    """The calls of one method: those that are asked for, and those that came. Used from the event loop only.

    The transport hands over as many calls as were asked for and drops the others for next to nothing, while a refusal
    in Python costs half of what an answer does. So calls are refused by not asking for them. There are many places, for
    bursts and for callers who wait for their answers. Under overload some must go away in any case: then there are few,
    so those who stay are served quickly.

    A call whose request does not come loses its place at the second look after it.

    Args:
        ask: asks the transport for one more call.
        ahead: most calls that are asked for and have not come.
        width: places.
        overload: of the server.
    """

    def __init__(self, ask: Callable[[], object], ahead: int, width: Width, overload: Overload) -> None:
        self._ask, self._ahead, self._width, self._overload = ask, ahead, width, overload
        self._asked = 0
        self._held: dict[Place, None] = {}  # an ordered set

    def fill(self) -> None:
        """Ask for as many calls as there is room for."""
        places = self._width.few if self._overload.here else self._width.most
        while self._asked < self._ahead and len(self._held) + self._asked < places:
            self._asked += 1
            self._ask()

    def come(self) -> Place:
        """A call came that was asked for; gives its place."""
        self._asked -= 1
        place = Place(self)
        self._held[place] = None
        self.fill()
        return place

    def hold(self, place: Place) -> None:
        """Keep a place, or take it again."""
        self._held[place] = None

    def leave(self, place: Place) -> None:
        """Give a place back, if it was not lost."""
        if place in self._held:
            del self._held[place]
            self.fill()

    def look(self) -> None:
        """Take the places of those whose requests did not come between two looks; ask for the calls that fit now."""
        for place in [place for place in self._held if place.seen and not place.here]:
            del self._held[place]
        for place in self._held:
            place.seen = True
        self.fill()
