"""Quarantine of unusable records: they stop the run, or are counted, logged and written to a file."""

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
from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.support.checks import counted, finite, one_of
from mmpos.support.files import named

__all__ = ["MAX_SKIPPED", "OnError", "Quarantine", "QuarantineFile", "read_quarantine", "reason", "skips_images"]

OnError = Literal["raise", "skip"]

Line = Mapping[str, object]  # source, index, key, error and facts; for dropped images, also their number

MAX_SKIPPED = 0.1
"""Default fraction of records that may be skipped."""

_FIRST, _ALWAYS, _REASONS = 1000, 10, 3  # records of the fraction; records always skipped; reasons in an error

# Quoted texts, addresses and numbers, but not those within names and paths.
_VARIABLE = re.compile(r"""(?<!\w)('[^']*'|"[^"]*")|0x[0-9a-f]+|(?<![\w/.:-])-?\d+(\.\d+)?(?![\w/-]|\.\w)""")

_logger = logging.getLogger(__name__)


def reason(message: str, location: Location) -> str:
    """Return what an error says without the record, quoted texts and numbers; digits within names and paths stay.

    >>> reason("a (s[3]): images[1]: got 'x.jpg', want at most 20 in /data/v2/2024", Location("s", 3))
    'images[…]: got …, want at most … in /data/v2/2024'
    """
    said = message.partition(str(location))[2].lstrip("): ") or message
    return _VARIABLE.sub("…", said)[:200]


class Quarantine:
    """Policy of one worker for unusable records: they stop the run, or are counted, logged and kept.

    If too many of the first 1,000 records are unusable, the run stops: the configuration, for example the format, is
    probably wrong rather than the records.

    Args:
        on_error: "raise" raises the error; "skip" counts the record, logs a warning and keeps a line.
        max_skipped: largest fraction of these records that may be skipped, 0 to 1; ten may always be skipped.
        keep: called with each line, for example a QuarantineFile; None keeps none.
        facts: additional fields of each line.
        records: number of records already read, if a run resumes.
        skipped: number of these records that were skipped.

    Raises:
        InvalidInputError: on_error is unknown, or max_skipped is not a number from 0 to 1.
    """

    def __init__(
        self,
        on_error: OnError = "raise",
        max_skipped: float = MAX_SKIPPED,
        keep: Callable[[Line], object] | None = None,
        facts: Line | None = None,
        records: int = 0,
        skipped: int = 0,
    ) -> None:
        self.on_error = one_of("on_error", on_error, ("raise", "skip"))
        self._share = finite("max_skipped", max_skipped, minimum=0)
        if max_skipped > 1:
            raise InvalidInputError(f"max_skipped: got {max_skipped:g}, want a share from 0 to 1")
        self._keep, self._facts, self._records, self._skipped = keep, dict(facts or {}), records, skipped
        self._reasons, self._examples = Counter[str](), dict[str, str]()

    def read(self) -> None:
        """Count a record, usable or not."""
        self._records += 1

    def end(self) -> None:
        """Check the limit on the records read, which may be fewer than 1,000; raise as in refuse."""
        self._check(self._records)

    def _check(self, records: int, of: str = "") -> None:
        allowed = max(_ALWAYS, int(self._share * records))
        if self._skipped <= allowed:
            return
        most = self._reasons.most_common()
        said = [
            f"{counted(count, 'record', ',')} such as {self._examples[reason]}" for reason, count in most[:_REASONS]
        ]
        said += [f"{len(most) - _REASONS} more reasons"] if len(most) > _REASONS else []
        got = f"{self._skipped:,} skipped of the first {counted(self._records, 'record', ',')}"
        raise InvalidInputError(f"max_skipped: got {got}, want at most {allowed:,}{of}: {'; '.join(said)}")

    def refuse(self, location: Location, raw: object, error: RecordError | LimitExceededError) -> str:
        """Raise the error of the latest record, or count it, log a warning, keep its line and return the error's text.

        Raises:
            RecordError: the error, if on_error is "raise"; an ImageError's own on_error is used instead.
            InvalidInputError: more records were skipped than the limit allows.
        """
        message = str(error) if str(location) in str(error) else f"{location}: {error}"
        if (error.on_error if isinstance(error, ImageError) else self.on_error) == "raise":
            raise error if isinstance(error, RecordError) and message == str(error) else RecordError(message) from error
        _logger.warning("skipped a record: %s", message)
        self._add(location, raw, message)
        if self._records <= _FIRST:
            self._skipped += 1
            said = reason(message, location)
            self._reasons[said] += 1
            self._examples.setdefault(said, message)
            self._check(_FIRST, f" of {_FIRST:,}")
        return message

    def drop(self, location: Location, raw: object, errors: Sequence[str]) -> None:
        """Log the images left out of a document, and keep a line that contains their number as dropped_images."""
        message = "; ".join(errors)
        _logger.warning("dropped images: %s", message)
        self._add(location, raw, message, dropped_images=len(errors))

    def _add(self, location: Location, raw: object, message: str, **more: object) -> None:
        if self._keep is None:
            return
        record = raw if isinstance(raw, Mapping) else {}
        keys = (str(record[name]) for name in ("__key__", "key", "id") if isinstance(record.get(name), str | int))
        line = {"source": location.source, "index": location.index, "key": next(keys, None), "error": message}
        self._keep(line | more | self._facts)


def skips_images(preprocess: object) -> bool:
    """Return whether a Preprocess drops images, or skips documents with broken images."""
    return getattr(preprocess, "on_image_error", None) in ("drop", "skip-document")


class QuarantineFile:
    """File of JSON lines, one per skipped record, even if a resumed run skips a record again.

    Args:
        path: path of the file; its folder is made at once, and the first line creates the file or is appended to it.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._records = set(map(_record, _lines(path))) if path.exists() else set()

    def __call__(self, line: Line) -> None:
        """Append a record's line unless the record is already in the file.

        Raises:
            OSError: the file cannot be written; its content is unchanged.
        """
        if _record(line) in self._records:
            return
        data = (json.dumps(line) + "\n").encode()
        with named(self._path), self._path.open("ab", buffering=0) as file:
            size = file.tell()
            try:
                while data:
                    data = data[file.write(data) :]
            except OSError:
                file.truncate(size)  # a partial line would corrupt the file
                raise
        self._records.add(_record(line))


def read_quarantine(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the lines of all quarantine files in a folder; a run that skips no record leaves an empty folder.

    Raises:
        InvalidInputError: the folder does not exist.
    """
    if not Path(folder).is_dir():
        raise InvalidInputError(f"folder: got {str(folder)!r}, want the existing folder of a run with quarantine=…")
    return [line for file in sorted(Path(folder).glob("*.jsonl")) for line in _lines(file)]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def _record(line: Line) -> tuple[object, ...]:
    """Return the values of a line that identify the record and the epoch."""
    return tuple(value for name, value in line.items() if name not in ("key", "error"))
