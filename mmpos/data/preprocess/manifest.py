"""Manifest of a folder of sequences: its files, rows and settings; runs write it and loaders check it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.pool import ThreadPool
from typing import Any

from mmpos.data.examples import MakeExample
from mmpos.data.preprocess.settings import differences
from mmpos.data.preprocess.shard_job import Counts, PartFile, ShardJob, Step, Task, changed, describe_job, quarantine_of
from mmpos.data.preprocess.storage import Facts, ListedFile, SequenceShard
from mmpos.data.quarantine import skips_images
from mmpos.data.stores import StorePath, store_path
from mmpos.errors import InvalidInputError

__all__ = ["Manifest", "ShardFiles", "sequence_shards"]

_NAME = "manifest.json"
_VERSION = 1
_PACKAGES = ("multimodal-positions", "numpy", "pyarrow", "pillow", "torchvision", "tokenizers", "transformers")
_PART = re.compile(r"(.+)\.part(\d{5,})", re.DOTALL)
_ENDINGS = (".parquet", ".quarantine.jsonl")
_THREADS = 16  # number of threads that inspect files


@dataclass
class ShardFiles:
    """Files of one shard.

    Args:
        source: facts about the shard.
        files: finished files by part number.
        parts: number of parts; None until it is known.
    """

    source: Facts
    files: dict[int, PartFile] = field(default_factory=dict)
    parts: int | None = None

    @property
    def complete(self) -> bool:
        """Whether all parts are finished."""
        return len(self.files) == self.parts


class Manifest:
    """Manifest of a folder; changes stay in memory until it is saved.

    Args:
        folder: the folder.
        settings: settings used to make its files.

    Attributes:
        shards: files of each shard, keyed by the stem of their names.
    """

    def __init__(self, folder: StorePath, settings: Mapping[str, object]) -> None:
        self.folder, self.settings = folder, settings
        self.shards: dict[str, ShardFiles] = {}

    @classmethod
    def load(cls, folder: StorePath) -> Manifest | None:
        """Read the manifest of a folder; return None if the folder has none.

        Raises:
            InvalidInputError: the file is not a manifest, or has another version.
        """
        path = folder / _NAME
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            stored = json.loads(data)
            got, manifest = stored["version"], cls(folder, stored["settings"])
            for shard in stored["shards"]:
                files = {file.pop("part"): _file(file) for file in shard["files"]}
                manifest.shards[shard["name"]] = ShardFiles(shard["source"], files, shard["parts"])
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise InvalidInputError(
                f"{path}: got an invalid manifest ({error!r}), want the manifest of a run"
            ) from error
        if got != _VERSION:
            raise InvalidInputError(f"{path}: version: got {got}, want {_VERSION}; write the folder again")
        return manifest

    def save(self) -> None:
        """Write the manifest atomically, with the shards sorted by name."""
        shards = [
            {
                "name": name,
                "source": shard.source,
                "parts": shard.parts,
                "files": [{"part": part, **_stored(shard.files[part])} for part in sorted(shard.files)],
            }
            for name, shard in sorted(self.shards.items())
        ]
        content = {
            "version": _VERSION,
            "complete": all(shard.complete for shard in self.shards.values()),
            "fingerprint": hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest(),
            "settings": dict(self.settings),
            "versions": _versions(),
            "shards": shards,
        }
        (self.folder / _NAME).write_bytes((json.dumps(content, indent=1) + "\n").encode())

    def add(self, task: Task, step: Step) -> None:
        """Record the finished part, or the number of parts, that a step reports; ignore all other steps."""
        if step.source is None:
            return
        shard = self.shards.setdefault(task.stem, ShardFiles(step.source))
        shard.source = step.source
        if step.file is None:
            shard.parts = step.part
        else:
            shard.files[step.part] = step.file

    def owns(self, name: str) -> bool:
        """Return whether this is the name of an output, of a quarantine, or of the manifest."""
        ending = next((ending for ending in _ENDINGS if name.endswith(ending)), None)
        return name == _NAME or (ending is not None and self._part_of(name.removesuffix(ending))[0] in self.shards)

    def remove_strays(self) -> None:
        """Remove outputs of these shards that the manifest does not list: earlier runs made them from other inputs."""
        listed = {file.name for shard in self.shards.values() for file in shard.files.values()}
        for path in self.folder.glob("*.parquet"):
            if path.name not in listed and self.owns(path.name):
                path.remove()
                quarantine_of(path).remove()

    def resume(self, job: ShardJob, tasks: Sequence[Task]) -> None:
        """Find the parts that earlier runs finished, in the manifest and in the footers of unlisted files.

        Raises:
            InvalidInputError: an output was made from another input or with other settings, or a file is not an output.
        """
        for task in tasks:
            self.shards.setdefault(task.stem, ShardFiles({}))
        parts: dict[str, set[int]] = {}
        for path in self.folder.glob("*.parquet"):
            stem, part = self._part_of(path.stem)
            parts.setdefault(stem, set()).add(part)
        with ThreadPool(min(_THREADS, len(tasks))) as threads:
            # Results arrive in order, so that the error always names the first refused output.
            resumed = threads.imap(lambda task: self._resumed(job, task, parts.get(task.stem, set())), tasks)
            self.shards |= {task.stem: shard for task, shard in zip(tasks, list(resumed), strict=True)}

    def _part_of(self, stem: str) -> tuple[str, int]:
        """Split the stem of a file name into the stem of the shard and the part number."""
        match = _PART.fullmatch(stem)
        if match and stem not in self.shards and match[1] in self.shards:
            return match[1], int(match[2])
        return stem, 0

    def _resumed(self, job: ShardJob, task: Task, parts: Collection[int]) -> ShardFiles:
        known, shard = self.shards[task.stem], ShardFiles({})
        for part in sorted(parts):
            path = task.output(part)
            file = known.files.get(part)
            if file is not None and path.identity()["size"] == file.size:
                source, settings = known.source, self.settings
            else:
                facts = SequenceShard(path).facts
                source, settings = {**facts}, facts["settings"]
                counts = Counts(*(facts.get(count.name, 0) for count in fields(Counts)))
                file = None
            if other := _other_input(task, source) or differences(settings, job.settings):
                remedy = "; remove it to write it again, or overwrite all"
                raise InvalidInputError(f"{path}: got the output of {', and '.join(other)}{remedy}")
            if file is None:
                with path.open() as content:
                    digest = hashlib.file_digest(content, "sha256").hexdigest()
                    file = PartFile(path.name, content.tell(), digest, counts)
            if file.counts.skipped and job.on_error == "raise" and not skips_images(job.preprocess):
                raise InvalidInputError(f"{path}: got {file.counts.skipped} skipped records, want none, or overwrite")
            shard.source = {name: source.get(name) for name in (*task.identity, "sha256")}
            shard.files[part] = file
        if len(shard.files) == known.parts:
            shard.parts = known.parts
        return shard


def _other_input(task: Task, facts: Facts) -> list[str]:
    """Name the differences between an input and the recorded input of an output.

    The content is compared only if the file was touched or copied.
    """
    want = task.identity
    other = [
        f"{name} {facts.get(name)}, want {want[name]}" for name in ("source", "size") if facts.get(name) != want[name]
    ]
    return other or ([f"{want['source']} with other content"] if changed(task, facts) else [])


def _stored(file: PartFile) -> dict[str, object]:
    return {"name": file.name, "size": file.size, "sha256": file.sha256, **asdict(file.counts)}


def _file(stored: dict[str, Any]) -> PartFile:
    counts = Counts(*(stored[count.name] for count in fields(Counts)))
    return PartFile(stored["name"], stored["size"], stored["sha256"], counts)


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def sequence_shards(folder: str | os.PathLike[str], preprocess: MakeExample | None = None) -> list[SequenceShard]:
    """Open a folder of sequences written by ``write_sequences`` or ``mmpos preprocess``, using its manifest.

    The folder is listed once; rows and settings of a file are checked when the file is read.

    Args:
        folder: path or URL.
        preprocess: callable that the sequences must have been made with; None accepts any.

    Returns:
        the shards, sorted by the name of their input and, within an input, by the order of its records.

    Raises:
        InvalidInputError: the folder has no manifest, the run did not finish, a file is missing, or settings differ.
    """
    where = store_path("folder", folder)
    manifest, path = Manifest.load(where), where / _NAME
    if manifest is None:
        raise InvalidInputError(
            f"folder: got {str(where)!r} without {_NAME}, want a folder written by mmpos preprocess"
        )
    if preprocess is not None and (other := differences(manifest.settings, describe_job(preprocess))):
        raise InvalidInputError(f"{path}: settings: got {', and '.join(other)}")
    names = {file.name for file in where.glob("*.parquet")}
    opened = []
    for name, shard in sorted(manifest.shards.items()):
        if not shard.complete:
            got = f"{len(shard.files)} of {'an unknown number of' if shard.parts is None else shard.parts} parts"
            raise InvalidInputError(f"{path}: {name}: got {got}, want all; run mmpos preprocess again to finish them")
        for part in range(len(shard.files)):
            file = shard.files[part]
            if file.name not in names:
                raise InvalidInputError(f"{where / file.name}: got no file, want the one listed in {path}")
            listed = ListedFile(str(path), file.counts.documents, manifest.settings)
            opened.append(SequenceShard(where / file.name, listed=listed))
    return opened
