"""What happens to records that cannot be used: they stop everything, or they are counted, logged and written down."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from mmpos.checks import one_of
from mmpos.data.documents import Location, RecordError
from mmpos.errors import InvalidInputError

__all__ = ["OnError", "Quarantine", "read_quarantine"]

OnError = Literal["raise", "skip"]

_logger = logging.getLogger(__name__)


class Quarantine:
    """Where the records of one worker go that cannot be used.

    Args:
        on_error: "raise" raises the error; "skip" counts the record, logs a warning and adds a line to the file.
        path: the file of JSON lines with source, index, key, error and facts; made with the first line, and added
            to if it is there. A run that is resumed may write a record again that it had already skipped.
        facts: what else each line says.

    Attributes:
        skipped: records so far.

    Raises:
        InvalidInputError: "skip" without a file.
    """

    def __init__(self, on_error: OnError, path: Path | None, facts: Mapping[str, Any] | None = None) -> None:
        one_of("on_error", on_error, ("raise", "skip"))
        if on_error == "skip" and path is None:
            raise InvalidInputError("quarantine: got None, want a path, as skipped records are never dropped silently")
        self._path = path if on_error == "skip" else None
        self._facts = dict(facts or {})
        self.skipped = 0

    def refuse(self, location: Location, raw: object, error: RecordError) -> None:
        """Deal with a record that cannot be used.

        Args:
            location: where it lies.
            raw: the record, if it could be read.
            error: what is wrong.

        Raises:
            RecordError: the error, if that is the policy.
        """
        message = str(error) if str(location) in str(error) else f"{location}: {error}"
        if self._path is None:
            raise error if message == str(error) else RecordError(message) from error
        self.skipped += 1
        _logger.warning("skipped a record: %s", message)
        line = {"source": location.source, "index": location.index, "key": _key(raw), "error": message, **self._facts}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # One write to a file open for appending: lines stay whole even if somebody else writes, too.
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, (json.dumps(line) + "\n").encode())
        finally:
            os.close(file)


def read_quarantine(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of all files in a folder of quarantine files; none if there is no folder."""
    files = sorted(Path(folder).glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def _key(raw: object) -> str | None:
    """What the record calls itself, under the names that are common."""
    if isinstance(raw, Mapping):
        for name in ("__key__", "key", "id"):
            if isinstance(raw.get(name), str | int):
                return str(raw[name])
    return None
