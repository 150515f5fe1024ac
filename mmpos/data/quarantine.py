"""Quarantine: records that cannot be used stop the run, or are counted, logged and written to a file."""

from __future__ import annotations

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mmpos.data.examples import ImageError, Location, RecordError
from mmpos.errors import InvalidInputError
from mmpos.support.checks import counted, finite
from mmpos.support.files import named

__all__ = [
    "MAX_SKIPPED",
    "OnError",
    "Quarantine",
    "QuarantineFile",
    "SkipLimit",
    "json_line",
    "read_quarantine",
    "skips_images",
]

OnError = Literal["raise", "skip"]

Line = Mapping[str, object]
"""Line of a skipped record: source, index, key, error, and facts; of dropped images also their number."""

MAX_SKIPPED = 0.1
"""The usual share of records that may be skipped."""

_FIRST = 1000  # records of a worker, by which the share is judged
_ALWAYS = 10  # records that may be skipped where there are few
_REASONS = 3  # of the most records, which an error names

_logger = logging.getLogger(__name__)


class SkipLimit:
    """Limit of the records that one worker may skip among the first 1,000 that it reads.

    When more are unusable, the set-up is likely wrong, such as the format, and not the records.

    Args:
        share: largest share of these records that may be skipped, 0 to 1; ten may always be skipped.
        records: those that were read before, where a run resumes.
        skipped: those among them that were skipped.

    Raises:
        InvalidInputError: the share is no number from 0 to 1.
    """

    def __init__(self, share: float = MAX_SKIPPED, records: int = 0, skipped: int = 0) -> None:
        self._share = finite("max_skipped", share, minimum=0)
        if share > 1:
            raise InvalidInputError(f"max_skipped: got {share:g}, want a share from 0 to 1")
        self._records, self._skipped = records, skipped
        self._reasons, self._examples = Counter[str](), dict[str, str]()

    def read(self) -> None:
        """Count a record, usable or not."""
        self._records += 1

    def skip(self, location: Location, message: str) -> None:
        """Count the latest record as skipped, for this reason.

        Raises:
            InvalidInputError: too many were skipped; the message counts the reasons.
        """
        if self._records > _FIRST:
            return
        self._skipped += 1
        # Reasons are the same but for the record, numbers, and what is quoted.
        reason = re.sub(r"'[^']*'|[0-9]+", "", message.partition(str(location))[2] or message)
        self._reasons[reason] += 1
        self._examples.setdefault(reason, message)
        self._judge(_FIRST, f" of {_FIRST:,}")

    def end(self) -> None:
        """Judge the records so far, if they are fewer than 1,000.

        Raises:
            InvalidInputError: as skip.
        """
        if self._records < _FIRST:
            self._judge(self._records)

    def _judge(self, records: int, of: str = "") -> None:
        allowed = max(_ALWAYS, int(self._share * records))
        if self._skipped <= allowed:
            return
        reasons = "; ".join(
            f"{counted(count, 'record', ',')} such as {self._examples[reason]}"
            for reason, count in self._reasons.most_common(_REASONS)
        )
        more = f"; {len(self._reasons) - _REASONS} more reasons" if len(self._reasons) > _REASONS else ""
        got = f"{self._skipped:,} skipped of the first {counted(self._records, 'record', ',')}"
        raise InvalidInputError(f"max_skipped: got {got}, want at most {allowed:,}{of}: {reasons}{more}")


class Quarantine:
    """Policy of one worker for records that cannot be used.

    Args:
        on_error: "raise" raises the error; "skip" counts the record, logs a warning and keeps a line of it.
        keep: takes each line, such as a QuarantineFile.
        facts: further fields of each line.
        limit: of what is skipped.

    Attributes:
        skipped: records so far.
        limit: counts the records that are read.
    """

    def __init__(
        self,
        on_error: OnError,
        keep: Callable[[Line], object] | None,
        limit: SkipLimit,
        facts: Line | None = None,
    ) -> None:
        self._on_error, self._keep = on_error, keep
        self._facts = dict(facts or {})
        self.limit = limit
        self.skipped = 0

    def refuse(self, location: Location, raw: object, error: RecordError) -> None:
        """Raise the error of a record, or count, log and write down the record.

        Args:
            location: its shard and number.
            raw: the record, if it could be read.
            error: the fault, which names the record.

        Raises:
            RecordError: the error, if on_error is "raise", or the policy for images.
            InvalidInputError: more records were skipped than the limit allows.
        """
        message = str(error) if str(location) in str(error) else f"{location}: {error}"
        on_error = error.on_error if isinstance(error, ImageError) else self._on_error
        if on_error == "raise" or self._keep is None:
            raise error if message == str(error) else RecordError(message) from error
        self.skipped += 1
        _logger.warning("skipped a record: %s", message)
        self._keep({**_identity(location, raw), "error": message, **self._facts})
        self.limit.skip(location, message)

    def drop(self, location: Location, raw: object, errors: Sequence[str]) -> None:
        """Log and write down the images that were left out of a document, with their number as dropped_images."""
        message = "; ".join(errors)
        _logger.warning("dropped images: %s", message)
        if self._keep is not None:
            line = {**_identity(location, raw), "error": message, "dropped_images": len(errors)}
            self._keep({**line, **self._facts})


def skips_images(preprocess: object) -> bool:
    """Tell whether a Preprocess leaves out images, or documents for their images, whatever the policy for records."""
    return getattr(preprocess, "on_image_error", None) in ("drop", "skip-document")


def _identity(location: Location, raw: object) -> dict[str, object]:
    return {"source": location.source, "index": location.index, "key": _key(raw)}


class QuarantineFile:
    """File of JSON lines, one for each skipped record, also where a run resumes before some of them.

    Args:
        path: the file; made with its folder by the first line, and added to if it is there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._records: set[tuple[object, ...]] | None = None

    def __call__(self, line: Line) -> None:
        """Add the line of a record that is not in the file.

        Raises:
            OSError: the file cannot be written, and is as it was.
        """
        if self._records is None:
            self._records = {_record(known) for known in _lines(self._path)} if self._path.exists() else set()
        if _record(line) in self._records:
            return
        data = json_line(line)
        with named(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                size = os.fstat(file).st_size
                try:
                    while data:
                        data = data[os.write(file, data) :]
                except OSError:
                    os.ftruncate(file, size)  # half a line would spoil the file
                    raise
            finally:
                os.close(file)
        self._records.add(_record(line))


def json_line(line: Line) -> bytes:
    """Encode a line as the file has it."""
    return (json.dumps(line) + "\n").encode()


def read_quarantine(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the lines of all files in a folder of quarantine files; none if the folder is missing."""
    return [line for path in sorted(Path(folder).glob("*.jsonl")) for line in _lines(path)]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def _record(line: Line) -> tuple[object, ...]:
    """Return the values of a line that identify the record and the epoch."""
    return tuple(value for name, value in line.items() if name not in ("key", "error"))


def _key(raw: object) -> str | None:
    """Return the key of a record, under the names that are common; None without one."""
    if isinstance(raw, Mapping):
        for name in ("__key__", "key", "id"):
            if isinstance(raw.get(name), str | int):
                return str(raw[name])
    return None
