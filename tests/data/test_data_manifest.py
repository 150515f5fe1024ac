"""Folder manifests: finished files, and checks by loaders."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_data_preprocess import PAGES, contents, corpus

from mmpos import InvalidInputError
from mmpos.data import sequence_shards, shards, write_sequences
from mmpos.data.preprocess import manifest as manifest_module
from mmpos.data.preprocess import shard_job
from mmpos.data.preprocess.job import Fill, Progress
from mmpos.data.preprocess.storage import SequenceShard
from mmpos.data.stores import StorePath

NAMES = ["s0.parquet", "s0.part00001.parquet", "s0.part00002.parquet"]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """End a part at 62 bytes, after two pages: each page has 15 bytes of text, and its two nulls count as 16 more."""
    monkeypatch.setattr(shard_job, "PART_BYTES", 62)


def manifest(folder: Path) -> dict[str, Any]:
    stored: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return stored


def test_a_shard_becomes_part_files_listed_in_the_manifest(tmp_path: Path) -> None:
    readers = shards(corpus(tmp_path, 1, 5))
    summary = write_sequences(readers, tmp_path / "out", PAGES)
    assert [output.path.name for output in summary.outputs] == NAMES
    opened = sequence_shards(tmp_path / "out", PAGES)
    keys = [[example.key for example in shard.examples()] for shard in opened]
    assert keys == [["0-0", "0-1"], ["0-2", "0-3"], ["0-4"]]
    stored = manifest(tmp_path / "out")
    assert (stored["version"], stored["complete"]) == (1, True)
    assert stored["settings"]["part_bytes"] == 62
    assert {"python", "multimodal-positions", "numpy", "pyarrow"} <= stored["versions"].keys()
    (shard,) = stored["shards"]
    assert (shard["name"], shard["parts"], shard["source"]["source"]) == ("s0", 3, "s0.jsonl")
    assert [(file["name"], file["part"], file["documents"], file["tokens"]) for file in shard["files"]] == [
        ("s0.parquet", 0, 2, 206),
        ("s0.part00001.parquet", 1, 2, 206),
        ("s0.part00002.parquet", 2, 1, 103),
    ]
    assert [file["size"] for file in shard["files"]] == [(tmp_path / "out" / name).stat().st_size for name in NAMES]


@pytest.mark.parametrize("listed", [True, False], ids=["manifest saved", "killed before saving"])
def test_finished_parts_are_not_rewritten(tmp_path: Path, listed: bool) -> None:
    readers = shards(corpus(tmp_path, 2, 5))
    out = tmp_path / "out"
    write_sequences(readers, out, PAGES)
    files, stored = contents(out), (out / "manifest.json").read_bytes()
    (out / NAMES[1]).unlink()
    if not listed:
        (out / "manifest.json").unlink()
    preprocessed: list[str] = []

    def counting(record: Any, location: Any) -> Any:
        preprocessed.append(record["id"])
        return PAGES(record, location)

    progress: list[Progress] = []
    settings = shard_job.describe_job(PAGES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_job, "describe_job", lambda *_: settings)
        again = write_sequences(readers, out, counting, report=progress.append)
    assert preprocessed == ["0-2", "0-3"]
    assert [output.reused for output in again.outputs] == [True, False, True, True, True, True]
    assert (progress[-1].done, progress[-1].reused) == (2, 1 if listed else 0)
    assert contents(out) == files
    assert (out / "manifest.json").read_bytes() == stored


def test_overwriting_removes_the_surplus_files_of_a_longer_input(tmp_path: Path) -> None:
    write_sequences(shards(corpus(tmp_path, 2, 5)), tmp_path / "out", PAGES)
    write_sequences(shards(corpus(tmp_path, 1, 3)), tmp_path / "out", PAGES, overwrite=True)
    kept = [name.replace("s0", "s1") for name in NAMES]
    assert sorted(contents(tmp_path / "out")) == [*NAMES[:2], *kept]
    assert [shard.count() for shard in sequence_shards(tmp_path / "out")] == [2, 1, 2, 2, 1]


def test_the_summary_does_not_reread_the_outputs_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readers = shards(corpus(tmp_path, 2, 5))
    read: list[str] = []
    lengths: Any = SequenceShard.__dict__["lengths"]

    def reading(shard: SequenceShard) -> Any:
        read.append(Path(shard.path).name)
        return lengths.fget(shard)

    monkeypatch.setattr(SequenceShard, "lengths", property(reading))
    first = write_sequences(readers, tmp_path / "out", PAGES, max_tokens=250)
    assert read == []
    assert first.fill == Fill(250, 5, 1030, 0)
    (tmp_path / "out" / NAMES[1]).unlink()
    assert write_sequences(readers, tmp_path / "out", PAGES, max_tokens=250).fill == first.fill
    assert sorted(read) == sorted([NAMES[0], NAMES[2], *(name.replace("s0", "s1") for name in NAMES)])


def test_shards_are_added_to_a_folder_only_with_the_same_settings(tmp_path: Path) -> None:
    first, second = shards(corpus(tmp_path, 2, 1))
    write_sequences([first], tmp_path / "out", PAGES)
    with pytest.raises(
        InvalidInputError, match=r"s0\.parquet: got the output of preprocess\.train_markers False, want"
    ):
        write_sequences([second], tmp_path / "out", replace(PAGES, train_markers=True))
    assert sorted(contents(tmp_path / "out")) == ["s0.parquet"]
    write_sequences([second], tmp_path / "out", PAGES)
    assert [Path(shard.path).name for shard in sequence_shards(tmp_path / "out")] == ["s0.parquet", "s1.parquet"]


def test_errors_name_the_first_of_several_outputs_with_other_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = shards(corpus(tmp_path, 2, 1))
    write_sequences(readers, tmp_path / "out", PAGES)
    second_checked, other_input = threading.Event(), manifest_module._other_input

    def first_waits(task: Any, facts: Any) -> list[str]:
        if task.number == 0:
            assert second_checked.wait(60)
            time.sleep(0.1)  # gives the other thread time to raise its error
        second_checked.set()
        return other_input(task, facts)

    monkeypatch.setattr(manifest_module, "_other_input", first_waits)
    with pytest.raises(InvalidInputError, match=r"s0\.parquet: got the output of preprocess\.train_markers False"):
        write_sequences(readers, tmp_path / "out", replace(PAGES, train_markers=True))


def test_a_shard_named_like_a_part_of_another_shard_is_refused(tmp_path: Path) -> None:
    paths = corpus(tmp_path, 2, 1)
    other = tmp_path / "s0.part00001.jsonl"
    Path(paths[1]).rename(other)
    with pytest.raises(
        InvalidInputError, match=r"both of which would become '.*s0\.part00001\.parquet', want different"
    ):
        write_sequences(shards([paths[0], other]), tmp_path / "out", PAGES)


def remove(out: Path) -> None:
    (out / NAMES[1]).unlink()


def shorten(out: Path) -> None:
    (out / NAMES[2]).replace(out / NAMES[1])
    (out / NAMES[2]).hardlink_to(out / NAMES[0])


def change_settings(out: Path) -> None:
    stored = manifest(out)
    stored["settings"]["preprocess.train_markers"] = True
    (out / "manifest.json").write_text(json.dumps(stored))


def change(name: str, value: object) -> Callable[[Path], None]:
    def changing(out: Path) -> None:
        stored = manifest(out)
        stored[name] = value
        (out / "manifest.json").write_text(json.dumps(stored))

    return changing


def forget(out: Path) -> None:
    stored = manifest(out)
    stored["shards"][0]["parts"] = None
    (out / "manifest.json").write_text(json.dumps(stored))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove, "OUT/s0.part00001.parquet: got no file, want the one listed in OUT/manifest.json"),
        (shorten, "OUT/s0.part00001.parquet: rows: got 1, want 2 as OUT/manifest.json says"),
        (
            change_settings,
            "OUT/s0.parquet: settings: got preprocess.train_markers False, want True as OUT/manifest.json says",
        ),
        (
            forget,
            "OUT/manifest.json: s0: got 3 of an unknown number of parts, want all; run mmpos preprocess again to "
            "finish them",
        ),
        (change("version", 2), "OUT/manifest.json: version: got 2, want 1; write the folder again"),
        (
            change("shards", 3),
            "OUT/manifest.json: got an invalid manifest (TypeError(\"'int' object is not iterable\")), want ",
        ),
        (
            lambda out: (out / "manifest.json").unlink(),
            "folder: got 'OUT' without manifest.json, want a folder written by mmpos preprocess",
        ),
    ],
)
def test_a_folder_that_contradicts_its_manifest_is_refused(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    out = tmp_path / "out"
    write_sequences(shards(corpus(tmp_path, 1, 5)), out, PAGES)
    damage(out)
    with pytest.raises(InvalidInputError) as refused:
        _ = [list(shard.examples()) for shard in sequence_shards(out)]
    assert str(refused.value).replace(str(out), "OUT").startswith(message)


def test_sequences_from_a_different_preprocess_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_sequences(shards(corpus(tmp_path, 1, 1)), out, PAGES)
    with pytest.raises(InvalidInputError) as refused:
        sequence_shards(out, replace(PAGES, train_markers=True))
    assert str(refused.value) == f"{out}/manifest.json: settings: got preprocess.train_markers False, want True"


def test_the_manifest_of_a_failed_run_is_incomplete(tmp_path: Path) -> None:
    readers = shards(corpus(tmp_path, 1, 5, frozenset({(0, 3)})))
    with pytest.raises(InvalidInputError, match=r"none\.jpg"):
        write_sequences(readers, tmp_path / "out", PAGES)
    assert sorted(contents(tmp_path / "out")) == [NAMES[0]]
    with pytest.raises(InvalidInputError, match=r"manifest\.json: s0: got 1 of an unknown number of parts, want all"):
        sequence_shards(tmp_path / "out")


def test_two_runs_at_once_in_a_store_lose_and_double_nothing(tmp_path: Path) -> None:
    first, second = shards(corpus(tmp_path, 2, 5))
    url, started = f"memory://shared/{tmp_path.name}", list[Progress]()

    def meanwhile(progress: Progress) -> None:
        if not started:
            started.append(progress)
            write_sequences([second, first], url, PAGES)

    write_sequences([first], url, PAGES, report=meanwhile)
    assert sorted(path.name for path in StorePath(url).glob("*.parquet")) == [
        *NAMES, *(name.replace("s0", "s1") for name in NAMES)
    ]  # fmt: skip
    again = write_sequences([first, second], url, PAGES)
    assert all(output.reused for output in again.outputs)
    keys = [example.key for shard in sequence_shards(url) for example in shard.examples()]
    assert keys == [f"{s}-{p}" for s in range(2) for p in range(5)]


def test_outputs_can_be_written_to_a_store(tmp_path: Path) -> None:
    paths = corpus(tmp_path, 1, 5, frozenset({(0, 1)}))
    url = f"memory://ready/{tmp_path.name}"
    options: dict[str, Any] = {"on_error": "skip"}
    write_sequences(shards(paths), tmp_path / "out", PAGES, **options)
    summary = write_sequences(shards(paths), url, PAGES, **options)
    assert [str(output.path) for output in summary.outputs] == [f"{url}/{name}" for name in NAMES[:2]]
    names = [path.name for path in StorePath(url).glob("*")]
    assert names == ["manifest.json", *sorted(contents(tmp_path / "out"))]
    assert all((StorePath(url) / name).read_bytes() == (tmp_path / "out" / name).read_bytes() for name in names)
    assert [shard.count() for shard in sequence_shards(url)] == [2, 2]
    assert all(output.reused for output in write_sequences(shards(paths), url, PAGES, **options).outputs)
