"""Other projects, where installed, each driven as its own users do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

__all__ = ["Peers"]

T = TypeVar("T")


class Peers:
    """The peers that take part in a run.

    Args:
        wanted: whether any do; if not, none is missing either.
    """

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self._missing: dict[str, str] = {}

    @property
    def missing(self) -> dict[str, str]:
        """The names of wanted peers that cannot be had, and why."""
        return dict(self._missing)

    def get(self, name: str, load: Callable[[], T]) -> T | None:
        """Load a peer.

        Args:
            name: of the peer, for people.
            load: imports the peer, and gives what drives it.

        Returns:
            What load gives; None where peers are not wanted, or this one is missing, which is noted.
        """
        if not self.wanted:
            return None
        try:
            return load()
        # Peers of other versions may lack names, and fail in their own ways while they are imported.
        except Exception as error:
            self._missing[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            return None
