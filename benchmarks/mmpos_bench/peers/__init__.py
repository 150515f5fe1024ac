"""Other projects, where installed: one file per peer, which drives it as its own users do."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["Peers"]


class Peers:
    """Which peers a run has.

    Args:
        wanted: whether any are; if not, none is missing either.
    """

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._missing: dict[str, str] = {}

    @property
    def missing(self) -> dict[str, str]:
        """The names of wanted peers that cannot be had, and why."""
        return dict(self._missing)

    def get(self, name: str, adapter: str) -> Any:
        """The adapter of a peer.

        Args:
            name: of the peer, for people.
            adapter: the module in mmpos_bench.peers that drives it; it imports the peer at its top.

        Returns:
            The module; None where peers are not wanted, or this one is missing, which is noted.
        """
        if not self._wanted:
            return None
        try:
            return import_module(f"mmpos_bench.peers.{adapter}")
        # Peers of other versions may lack names, and fail in their own ways while they are imported.
        except Exception as error:
            self._missing[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            return None
