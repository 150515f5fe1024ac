"""The runner and its command: files are complete or absent, engines write the same files, and the next run resumes."""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from fractions import Fraction
from functools import partial
from importlib import resources
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_corpus import OddError, end_process, fail_oddly, fail_readably, records, write_jsonl, write_parquet, write_tar
from refusals import assert_refused
from results import assert_equal
from waiting import alive, descendants, eventually, read_proc

from mmpos import ImageProcessor, InvalidInputError, SequenceBuilder
from mmpos.__main__ import main
from mmpos.cli.preprocess import described
from mmpos.data import job
from mmpos.data import preprocess as runner
from mmpos.data.examples import Location, OnImageError, Preprocess, RecordError
from mmpos.data.formats import FORMATS, MMC4, Obelics
from mmpos.data.formats.images import Images
from mmpos.data.job import Counts
from mmpos.data.preprocess import Progress, Summary, sequence_shards, write_sequences
from mmpos.data.quarantine import reason
from mmpos.data.readers import shards
from mmpos.data.settings import describe, differences
from mmpos.data.storage import SequenceShard

tokenizers: Any = pytest.importorskip("tokenizers")

PHOTOS = Path(str(resources.files("mmpos"))) / "photos"
BUILDER = SequenceBuilder(images=ImageProcessor("pillow"))
PAGES = Preprocess(Obelics(images=Images(PHOTOS)), BUILDER)
TRAINED = replace(PAGES, train_markers=True)
COUNTS = Counts(documents=3, tokens=309, images=3)
"""Counts of three pages, each with two letters and a photo of 11×9 patches with two markers."""


def corpus(folder: Path, shards: int, pages: int, broken: frozenset[tuple[int, int]] = frozenset()) -> list[str]:
    """Write shards of pages, each with a text and a photo."""
    folder.mkdir(exist_ok=True)
    paths = [folder / f"s{s}.jsonl" for s in range(shards)]
    for s, path in enumerate(paths):
        images = [[None, "none.jpg" if (s, p) in broken else "coffee.jpg"] for p in range(pages)]
        rows = [{"id": f"{s}-{p}", "images": image, "texts": ["ab", None]} for p, image in enumerate(images)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(map(str, paths))


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder except the one that a run writes first."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*")) if path.name != "_run.json"}


def keys(folder: Path) -> list[str]:
    return [example.key for shard in sequence_shards(folder) for example in shard.examples()]


def reused(summary: Summary) -> list[bool]:
    return [output.reused for output in summary.outputs]


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Unset environment variables that force colours, and work in an empty folder."""
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def test_every_shard_becomes_a_file_of_preprocessed_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readers, ticks, run = shards(corpus(tmp_path, 2, 3)), count(1), job.run_local
    monkeypatch.setattr(time, "monotonic", lambda: float(next(ticks)))

    def late(*arguments: Any) -> Any:
        next(islice(ticks, 1000, None))  # a thousand seconds pass
        return run(*arguments)

    monkeypatch.setattr(runner, "run_local", late)
    summary = write_sequences(readers, tmp_path / "out", PAGES)
    assert 0 < summary.seconds < 1000, "workers that start slowly do not count"
    monkeypatch.setattr(runner, "run_ray", late)
    assert write_sequences(readers, tmp_path / "ray", PAGES, engine="ray").seconds > 1000, "the first file counts"
    assert [(Path(out.source).name, Path(out.path).name, out.counts, out.reused) for out in summary.outputs] == [
        ("s0.jsonl", "s0.parquet", COUNTS, False),
        ("s1.jsonl", "s1.parquet", COUNTS, False),
    ]
    assert sorted(contents(tmp_path / "out")) == ["s0.parquet", "s1.parquet"]
    assert summary.counts == COUNTS + COUNTS
    assert summary.tokens_per_second == 618 / summary.seconds
    for reader, shard in zip(readers, sequence_shards(tmp_path / "out", PAGES), strict=True):
        want = [PAGES(raw, location) for location, raw in reader.records() if isinstance(raw, dict)]
        for stored, expected in zip(shard.examples(), want, strict=True):
            assert_equal(stored, expected)


@pytest.mark.parametrize(
    ("policy", "prefix", "counts"),
    [
        ("drop", "image: ", Counts(documents=3, tokens=208, images=2, images_dropped=1)),
        ("skip-document", "", Counts(documents=2, tokens=206, images=2, skipped=1)),
    ],
)
def test_broken_images_are_counted_by_reason(tmp_path: Path, policy: OnImageError, prefix: str, counts: Counts) -> None:
    readers = shards(corpus(tmp_path, 1, 3, frozenset({(0, 1)})))
    for _ in range(2):  # the second run reads the finished file
        summary = write_sequences(readers, tmp_path / "out", replace(PAGES, on_image_error=policy))
        assert summary.counts == counts
        ((reason, count),) = summary.reasons.items()
        assert count == 1
        assert reason.startswith(f"{prefix}images[…]: got the path …, want a file that exists in")
    (shard,) = sequence_shards(tmp_path / "out")
    (error,) = [error for example in shard.examples() for error in example.dropped_images] or shard.errors().values()
    assert error.startswith(f"0-1 ({readers[0].source}[1]): images[1]: got the path 'none.jpg', want a file that exis")
    with pytest.raises(RecordError, match=r"none\.jpg"):
        write_sequences(readers, tmp_path / "new", replace(PAGES, on_image_error="raise"), on_error="skip")


@pytest.mark.parametrize(
    ("message", "want"),
    [
        ("s[3]: got (16, -2, 1.5), want 3.", "got (…, …, …), want …."),
        ('s[3]: got "it\'s", want a-1.jpg in s3://b-2/7', "got …, want a-1.jpg in s3://b-2/7"),
        ("s[3]: can't read <_io.BytesIO object at 0x7f01ab>", "can't read <_io.BytesIO object at …>"),
        ("no location 12", "no location …"),
    ],
)  # fmt: skip
def test_reasons_leave_out_records_quoted_texts_and_numbers_but_not_paths(message: str, want: str) -> None:
    assert reason(message, Location("s", 3)) == want


@pytest.mark.parametrize(
    ("pages", "own", "output", "message"),
    [
        (2, PAGES, None, r"s0\.parquet: got the output of .*s0\.jsonl with size 69, want 138, and modified 20\d\d-\d"),
        (1, TRAINED, None, r"_run\.json: got a run with preprocess\.train_markers False, want True; use the same se"),
        (1, PAGES, b"something else", r"s0\.parquet: got no Parquet file"),
    ],
    ids=["input", "settings", "file"],
)
def test_outputs_from_other_inputs_or_settings_are_refused_or_overwritten(
    tmp_path: Path, pages: int, own: Preprocess, output: bytes | None, message: str
) -> None:
    paths = corpus(tmp_path, 2, 1)
    write_sequences(shards(paths), tmp_path / "out", PAGES)
    corpus(tmp_path, pages - 1, pages)
    if output:
        (tmp_path / "out" / "s0.parquet").write_bytes(output)
    before = contents(tmp_path / "out")
    with pytest.raises(InvalidInputError, match=message):
        write_sequences(shards(paths), tmp_path / "out", own)
    assert contents(tmp_path / "out") == before
    assert reused(write_sequences(shards(paths), tmp_path / "out", own, overwrite=True)) == [False, False]
    assert reused(write_sequences(shards(paths), tmp_path / "out", own)) == [True, True]


def test_an_input_of_the_same_name_in_another_folder_is_refused(tmp_path: Path) -> None:
    (first,), (second,) = corpus(tmp_path / "in", 1, 1), corpus(tmp_path / "in2", 1, 2)
    write_sequences(shards(first), "ready", PAGES)
    want = f"ready/s0.parquet: got the output of {first}, want that of {second}; use another folder, or another name"
    assert_refused(want, lambda: write_sequences(shards(second), "ready", PAGES))
    os.rename(tmp_path / "in", tmp_path / "moved")
    assert reused(write_sequences(shards("moved/s0.jsonl"), "ready", PAGES)) == [True]


def correct(path: str) -> None:
    """Change a file's content, but not its size."""
    Path(path).write_text(Path(path).read_text().replace('"ab"', '"cd"'))
    os.utime(path, ns=(1, 1))


def test_two_runs_cannot_write_to_the_same_folder(tmp_path: Path) -> None:
    readers, link = shards(corpus(tmp_path, 2, 3)), tmp_path / "link"

    def meanwhile(progress: Progress) -> None:
        if not link.is_symlink():
            link.symlink_to("out")
            want = f"folder: got '{link}', to which another run is writing, want one run at a time"
            assert_refused(want, lambda: write_sequences(readers, link, PAGES, overwrite=True))

    assert write_sequences(readers, tmp_path / "out", PAGES, report=meanwhile).counts == COUNTS + COUNTS
    assert sorted(contents(tmp_path / "out")) == ["s0.parquet", "s1.parquet"]
    assert write_sequences(readers, link, PAGES).counts == COUNTS + COUNTS


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_error_from_a_full_disk_names_the_output_and_finished_files_remain(
    tmp_path: Path, full_disk: Callable[[int], AbstractContextManager[None]], workers: int
) -> None:
    readers = shards(corpus(tmp_path, 3, 1))
    write_sequences(readers[:1], tmp_path / "out", PAGES)
    before = contents(tmp_path / "out")
    with pytest.raises(OSError, match="File too large") as raised, full_disk(10_000):
        write_sequences(readers, tmp_path / "out", PAGES, workers=workers)
    assert raised.value.filename in (str(tmp_path / "out" / "s1.parquet"), str(tmp_path / "out" / "s2.parquet"))
    assert contents(tmp_path / "out") == before
    assert write_sequences(readers, tmp_path / "out", PAGES).counts == COUNTS


def test_skipped_records_become_rows_with_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths, reports = corpus(tmp_path, 2, 3, frozenset({(1, 1)})), list[Progress]()
    with Path(paths[1]).open("a") as file:
        file.write("{broken\n")
    with caplog.at_level(logging.WARNING, "mmpos"):
        summary = write_sequences(shards(paths), tmp_path / "out", PAGES, on_error="skip")
    both = write_sequences(shards(paths), tmp_path / "both", PAGES, on_error="skip", workers=2, report=reports.append)
    assert contents(tmp_path / "both") == contents(tmp_path / "out")
    assert both.counts == summary.counts == reports[-1].counts
    assert [output.counts for output in summary.outputs] == [COUNTS, Counts(2, 206, 2, 2)]
    assert sorted(summary.reasons.values()) == [1, 1]
    shard = SequenceShard(summary.outputs[1].path)
    assert [example.key for example in shard.examples()] == ["1-0", "1-2"]
    errors = shard.errors()
    assert list(errors) == [f"{paths[1]}[1]", f"{paths[1]}[3]"]
    assert "images[1]: got the path 'none.jpg'" in errors[f"{paths[1]}[1]"]
    assert len(caplog.records) == 2
    want = f"{shard.path}: got 2 skipped records, want none, or replace it with overwrite=True"
    assert_refused(want, lambda: write_sequences(shards(paths), tmp_path / "out", PAGES))
    corpus(tmp_path, 2, 3)
    write_sequences(shards(paths), tmp_path / "out", PAGES, overwrite=True)
    assert SequenceShard(summary.outputs[1].path).errors() == {}


def test_too_many_skipped_records_stop_a_worker_at_the_end_of_a_file(tmp_path: Path) -> None:
    readers = shards(corpus(tmp_path, 3, 7, frozenset((s, p) for s in range(3) for p in range(6))))
    options: dict[str, Any] = {"engine": "local", "on_error": "skip"}
    want = "max_skipped: got 12 skipped of the first 14 records, want at most 10: 12 records such as 0-0 ("
    assert_refused(want, lambda: write_sequences(readers, tmp_path / "out", PAGES, **options))
    assert sorted(contents(tmp_path / "out")) == ["s0.parquet"]
    summary = write_sequences(readers, tmp_path / "out", PAGES, max_skipped=1, **options)
    assert summary.counts.skipped == 18


# Several files of an input, and whose folder it is


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """End a file at 62 bytes, after two pages: each page has 15 bytes of text, and its two nulls count as 16 more."""
    monkeypatch.setattr(job, "PART_BYTES", 62)


NAMES = ["s0.parquet", "s0.part00001.parquet", "s0.part00002.parquet"]


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("missing", [[0], [1], [2], [0, 2], [1, 2]])
def test_an_input_is_continued_from_its_first_missing_file(tmp_path: Path, missing: list[int]) -> None:
    readers, out, seen = shards(corpus(tmp_path, 2, 5)), tmp_path / "out", list[str]()
    whole, reports = write_sequences(readers, out, PAGES), list[Progress]()
    files = contents(out)
    assert sorted(files) == [*NAMES, *(name.replace("s0", "s1") for name in NAMES)]
    assert [shard.count() for shard in sequence_shards(out)] == [2, 2, 1] * 2
    for part in missing:
        (out / NAMES[part]).unlink()
    left = out / ".s0.parquet.00000000.tmp"
    left.write_bytes(b"of a killed run")
    few = f"{out}/_run.json: got {3 - len(missing)} of the files of s0.jsonl, want all; run mmpos "
    assert_refused(few, lambda: sequence_shards(out))
    settings = job.settings_of(PAGES)

    def counting(record: Any, location: Location) -> Any:
        assert not left.exists()
        seen.append(record["id"])
        return PAGES(record, location)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "settings_of", lambda _: settings)
        again = write_sequences(readers, out, counting, report=reports.append)
    assert seen == [f"0-{i}" for i in range(2 * missing[0], 5)]
    assert reused(again) == [part < missing[0] for part in range(3)] + [True] * 3
    assert contents(out) == files
    assert again.counts == whole.counts
    total, kept = whole.counts.documents * 69, sum(output.read for output in again.outputs if output.reused)
    last, added = reports[-1], Counts(5 - 2 * missing[0], 103 * (5 - 2 * missing[0]), 5 - 2 * missing[0])
    assert (last.read, last.total, last.unit, last.reused, last.counts) == (total, total, "bytes", kept, added)
    assert write_sequences(readers, out, PAGES).tokens_per_second == 0.0


@pytest.mark.usefixtures("small_parts")
def test_overwriting_removes_the_surplus_files_of_a_longer_input(tmp_path: Path) -> None:
    write_sequences(shards(corpus(tmp_path, 2, 5)), tmp_path / "out", PAGES)
    (tmp_path / "out/foreign.parquet").write_bytes(b"of another program")
    write_sequences(shards(corpus(tmp_path, 1, 3)), tmp_path / "out", PAGES, overwrite=True)
    assert [shard.count() for shard in sequence_shards(tmp_path / "out")] == [2, 1, 2, 2, 1]
    write_sequences(shards(tmp_path / "s0.jsonl"), tmp_path / "out", TRAINED, overwrite=True)
    assert keys(tmp_path / "out") == ["0-0", "0-1", "0-2"]
    assert sorted(contents(tmp_path / "out")) == ["foreign.parquet", *NAMES[:2]]


@pytest.mark.usefixtures("small_parts")
def test_an_input_that_changes_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    (path,) = corpus(tmp_path, 1, 5)

    def editing(record: Mapping[str, object], location: Location) -> Any:
        if location.index == 1:
            correct(path)
        return PAGES(record, location)

    with pytest.raises(InvalidInputError, match=r"s0\.jsonl: got a file that changed while it was read"):
        write_sequences(shards(path), tmp_path / "out", editing)
    run = tmp_path / "out/_run.json"
    with pytest.raises(InvalidInputError, match=r"got 2 of the files of s0\.jsonl, want all; .*, or remove it from"):
        sequence_shards(tmp_path / "out")
    run.write_text(json.dumps({**json.loads(run.read_text()), "inputs": {}}))
    assert sequence_shards(tmp_path / "out") == []


def test_further_inputs_are_added_and_changed_ones_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third = shards(corpus(tmp_path, 3, 1))
    out = tmp_path / "out"
    assert write_sequences([first, second], out, PAGES).others == ()
    added = write_sequences([second, third], out, PAGES)
    assert (reused(added), added.others) == ([True, False], ("s0.jsonl",))
    assert keys(out) == ["0-0", "1-0", "2-0"]
    assert main(command(second.source)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "files       1 in out: kept 1, added 0"
    assert "not given   2 inputs of earlier runs: s0.jsonl, s2.jsonl" in lines
    correct(second.source)
    before = {path: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(InvalidInputError, match=r"s1\.jsonl with modified 20.*, want 1970-01-01 00:00:00\.000000001 U"):
        write_sequences([third, second], out, PAGES)
    assert {path: path.read_bytes() for path in out.iterdir()} == before


def test_a_run_killed_before_its_first_file_owns_its_folder_and_a_failed_one_does_not(tmp_path: Path) -> None:
    readers, out = shards(corpus(tmp_path, 1, 2, frozenset({(0, 0)}))), tmp_path / "out"
    out.mkdir()
    foreign = out / "foreign.parquet"
    for others in ([foreign], []):
        if others:
            foreign.touch()
        else:
            foreign.unlink()
        for folder in (out, tmp_path / "new"):
            with pytest.raises(RecordError):
                write_sequences(readers, folder, PAGES)
        assert list(out.iterdir()) == others
        assert not (tmp_path / "new").exists()  # unlike the other folder, made by the run
    child = multiprocessing.get_context("fork").Process(target=write_sequences, args=(readers, out, end_process))
    child.start()
    child.join()
    assert sorted(path.suffix for path in out.iterdir()) == [".json", ".tmp"]
    with pytest.raises(InvalidInputError, match=r"_run\.json: got a run with preprocess "):
        write_sequences(readers, out, TRAINED, on_error="skip")
    assert_refused(f"{out}/_run.json: got 0 of the files of s0.jsonl, want all", lambda: sequence_shards(out))
    write_sequences(readers, out, TRAINED, on_error="skip", overwrite=True)
    assert sorted(path.name for path in out.iterdir()) == ["_run.json", "s0.parquet"]


def test_a_folder_that_no_run_finished_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    bare = f"folder: got {str(out)!r} without _run.json, want a folder written by mmpos preprocess"
    assert_refused(bare, lambda: sequence_shards(out))
    Path("a.parquet").touch()
    assert_refused("folder: got 'none', want an existing folder", lambda: sequence_shards("none"))
    file = "folder: got 'a.parquet', want a folder; SequenceShard opens a file"
    assert_refused(file, lambda: sequence_shards("a.parquet"))
    write_sequences(shards(corpus(tmp_path, 1, 1)), out, PAGES)
    run = out / "_run.json"
    assert_refused(f"{run}: settings: got preprocess.train_markers False", lambda: sequence_shards(out, TRAINED))
    run.write_text("{}")
    for call in (lambda: sequence_shards(out), lambda: write_sequences(shards("s0.jsonl"), out, PAGES)):
        assert_refused(f"{run}: got an invalid file", call)
    run.unlink()
    assert keys(out) == ["0-0"]  # like a folder of another engine, whose files have no settings
    assert_refused(bare, lambda: sequence_shards(out, PAGES))


@pytest.mark.parametrize(
    ("own", "workers", "error", "message"),
    [
        (lambda record, here: None, 2, (pickle.PicklingError, AttributeError), "lambda"),  # before workers start
        (fail_oddly, 1, OddError, "^status 404"),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in (
            (PAGES, 2, RecordError, r"([01])-1 \(.+s\1\.jsonl\[1\]\): images\[1\]: got the path 'none.jpg'"),
            (end_process, 2, ChildProcessError, "a worker process was killed, possibly out of memory; use fewer wor"),
            (fail_oddly, 2, RuntimeError, "OddError: status 404"),
        )),
    ],
)  # fmt: skip
def test_an_error_stops_all_processes(tmp_path: Path, own: Any, workers: int, error: Any, message: str) -> None:
    readers = shards(corpus(tmp_path, 2, 200, frozenset({(0, 1), (1, 1)})))
    with pytest.raises(error, match=message) as raised:
        write_sequences(readers, tmp_path / "out", own, workers=workers)
    assert contents(tmp_path / "out") == {}
    if message == "OddError: status 404":  # from a worker, with its traceback
        assert "in fail_oddly" in raised.value.__notes__[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engine": "spark"}, "engine: got 'spark', want one of 'local', 'ray'"),
        ({"workers": 0}, "workers: got 0, want >= 1"),
        ({"on_error": "log"}, "on_error: got 'log', want one of 'raise', 'skip'"),
        ({"max_skipped": 2}, "max_skipped: got 2, want a share from 0 to 1"),
        ({"preprocess": 3}, "preprocess: got int, want a callable that takes a record and a location"),
        ({"overwrite": 1}, "overwrite: got 1, want True or False"),
        ({"readers": ()}, "readers: got none, want at least one shard"),
        ({"readers": "a/s0.jsonl"}, "readers[0]: got str, want a Reader, as returned by mmpos.data.shards(paths)"),
        ({"folder": 3}, "folder: got 3, want a path or a URL"),
        ({"folder": Path("a/s0.jsonl")}, "folder: got 'a/s0.jsonl', which is a file, want a folder"),
        ({"readers": ("a/s0.jsonl", "b/s0.jsonl")},
         "readers: got 'a/s0.jsonl' and 'b/s0.jsonl', both of which would become 'out/s0.parquet', want different "
         "names"),
        ({"readers": ("a/s0.jsonl", "b/s0.part00001.jsonl")},
         "readers: got 'b/s0.part00001.jsonl', which would become 'out/s0.part00001.parquet', want a name that is not "
         "that of a further file of another input"),
        ({"readers": ("b/s0.jsonl", "a/s0.parquet"), "folder": Path("a"), "overwrite": True},
         "folder: got 'a', where 'a/s0.parquet' would overwrite an input"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    for name in ("a/s0.jsonl", "a/s0.parquet", "b/s0.jsonl", "b/s0.part00001.jsonl"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    arguments: dict[str, Any] = {"readers": ("a/s0.jsonl",), "folder": Path("out"), "preprocess": PAGES} | change
    if isinstance(arguments["readers"], tuple):
        arguments["readers"] = [one for path in arguments["readers"] for one in shards(path)]
    with pytest.raises(InvalidInputError) as refused:
        write_sequences(**arguments)
    assert str(refused.value) == message
    assert not Path("out").exists()


def test_different_settings_have_different_short_descriptions() -> None:
    settings = [
        PAGES,
        partial(end_process, location=Location("a", 0)),
        partial(end_process, location=Location("a", 1)),
        end_process,
        {"a": Fraction(1, 2), "b": b"bytes", "c": [Path("x"), None, 1.5, len]},
        list(range(1000)),
        list(range(1001)),
        np.dtype(np.int64),
    ]
    described = [json.dumps(describe({"preprocess": setting})) for setting in settings]
    assert len(set(described)) == len(settings)
    assert max(map(len, described)) < 5000
    assert describe({"a": "text"}) == {"a": "sha256:" + hashlib.sha256(b"'text'").hexdigest()[:16]}


def words(**ids: int) -> Any:
    return tokenizers.Tokenizer(tokenizers.models.WordLevel(ids))


LARGE = replace(BUILDER, images=ImageProcessor("pillow", patch_size=16, mean=(0.48145466, 0.4578275, 0.25)))


@pytest.mark.parametrize(
    ("got", "want", "different"),
    [
        (PAGES, PAGES, []),
        (replace(PAGES, builder=replace(BUILDER, scheme="rope-tie-v2")), PAGES,
         ["a.builder.scheme 'rope-tie-v2', want 'rope-tie'"]),
        (replace(PAGES, format=MMC4()), PAGES,
         ["a.format 'mmc4', want 'obelics'"]),
        (replace(PAGES, format=Obelics(images=Images("/secret")), builder=LARGE), PAGES,
         ["another a.format.images.base", "a.builder.images.patch_size 16, want 14",
          "a.builder.images.mean[2] 0.25, want 0.40821073"]),
        (words(a=0, b=1), words(a=0, b=1), []),
        (words(a=0, b=1), words(b=0, a=1), ["another a.content"]),
        (64, 32, ["a 64, want 32"]),
    ],
)  # fmt: skip
def test_differing_settings_are_named_without_revealing_text_values(got: Any, want: Any, different: list[str]) -> None:
    stored = describe({"a": got})
    assert differences(stored, describe({"a": want})) == different
    assert "secret" not in json.dumps(stored)


def command(*arguments: str, out: str = "out") -> list[str]:
    """Return the command line that preprocesses these tests' corpus."""
    own = ["-o", out, "-f", "obelics", "--images-from", str(PHOTOS), "--image-option", "backend=pillow"]
    return ["preprocess", *own, *arguments]


def test_the_command_prints_a_summary_and_resumes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmpos.cli.preprocess._PAUSE", 1e9)  # a slow machine prints no further lines of progress
    paths = corpus(tmp_path, 2, 3, frozenset({(1, 1)}))
    for path, last in zip(paths, ("broken", ""), strict=True):
        with Path(path).open("a") as file:
            file.write("\n" * 3_000_000 + last)
    options = ["--on-error", "skip", "--on-image-error", "drop"]
    assert main(command("s*.jsonl", *options)) == 0
    captured = capsys.readouterr()
    announced, progress = captured.err.splitlines()
    assert announced == "reading 2 inputs (s*.jsonl) into out; starting 1 worker (local)"
    assert progress.startswith("6.0 of 6.0 MB, 6 documents, 1 skipped, 1 image dropped")
    lines = captured.out.splitlines()
    assert lines[:5] == [
        "files       2 in out: kept 0, added 2",
        "documents   6",
        "tokens      517",
        "images      5",
        "skipped     1, and 1 image dropped",
    ]
    assert re.fullmatch(r"speed       ([\d,]+ tokens/s|not measured in under a second)", lines[5])
    assert lines[6].startswith("1 × got no valid JSON in line … (Expecting value, ")
    assert lines[7].startswith("1 × image: images[…]: got the path …, want a file that exists inside ")
    files = contents(tmp_path / "out")
    assert main(command("s*.jsonl", *options)) == 0
    captured = capsys.readouterr()
    assert captured.err == f"{announced}\n6.0 of 6.0 MB, 6 documents kept\n"
    assert captured.out.splitlines()[0] == "files       2 in out: kept 2, added 0"
    assert "speed       nothing was left to do" in captured.out
    assert contents(tmp_path / "out") == files


def test_progress_is_described_with_rates_and_the_remaining_time() -> None:
    counts = Counts(documents=30, tokens=3000, images=30, skipped=10, images_dropped=1)
    progress = Progress(60_000_000, 100_000_000, "bytes", 20_000_000, 20.0, counts, Counts())
    want = "60 of 100 MB, 30 documents, 10 skipped, 1 image dropped, 2 records/s, 150 tokens/s, 2.0 MB/s, 0:00:20 left"
    assert described(progress) == want
    begun = replace(progress, read=20_000_000, seconds=1.0)
    assert described(begun).endswith("1 image dropped, 40 records/s, 3,000 tokens/s, 0.0 MB/s"), "no time left is known"
    unknown = replace(progress, read=40, total=None, unit="records", reused=0)
    assert described(unknown) == "40 records, 30 documents, 10 skipped, 1 image dropped, 2 records/s, 150 tokens/s"
    assert described(replace(progress, seconds=0.0)) == "60 of 100 MB, 30 documents, 10 skipped, 1 image dropped"
    resumed = replace(progress, seconds=0.0, kept=Counts(documents=1000))
    assert described(resumed) == "60 of 100 MB, 1,000 documents kept, 30 added, 10 skipped, 1 image dropped"


@pytest.mark.parametrize(
    ("kind", "size", "tolerance"),
    [("jsonl", 10, 0.02), ("jsonl", 10_000, 0.02), ("parquet", 10, 0.02), ("tar", 10, 0.02), ("tar.gz", 10_000, 0.1)],
)
def test_progress_grows_evenly_within_one_file(
    tmp_path: Path, kind: str, size: int, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "PART_BYTES", 2**16)
    monkeypatch.setattr(runner, "_PAUSE", 0.0)
    rows = records(0, 200)
    for row in rows:
        row["image"]["bytes"] += bytes(random.Random(row["id"]).randbytes(size))
    write: Any = {"jsonl": write_jsonl, "parquet": write_parquet}.get(kind, write_tar)
    path, reports = write(tmp_path / f"a.{kind}", rows), list[Progress]()
    options: dict[str, Any] = {"on_error": "skip", "max_skipped": 1, "report": reports.append}
    write_sequences(shards(path), tmp_path / "out", fail_readably, **options)
    shares = [progress.read / path.stat().st_size for progress in reports]
    assert shares == sorted(shares)
    assert shares[-1] == 1
    done = [(one.counts.documents + one.counts.skipped) / 200 for one in reports]
    assert max(abs(a - b) for a, b in zip(shares, done, strict=True)) < tolerance


@pytest.mark.parametrize(
    ("options", "ids", "scheme"),
    [
        ("", [3, 0, *[2] * 99, 1], "rope-tie"),
        ("--scheme flatten --marker begin=[/IMG] --marker end= --marker patch=7 --marker row=8 --marker last_row=9",
         [3, 1, *([7] * 9 + [8]) * 10, *[7] * 9, 9], "flatten"),
    ],
)  # fmt: skip
def test_command_options_are_passed_to_the_library(tmp_path: Path, options: str, ids: list[int], scheme: str) -> None:
    tokenizer = words(**{"[IMG]": 0, "[/IMG]": 1, "[PATCH]": 2, "ab": 3})
    tokenizer.add_special_tokens(["[IMG]", "[/IMG]", "[PATCH]"])
    tokenizer.save("t.json")
    corpus(tmp_path, 1, 1)
    assert main(command("s0.jsonl", "--tokenizer", "t.json", *options.split())) == 0
    (got,) = SequenceShard("out/s0.parquet").examples()
    assert (got.sequence.input_ids.tolist(), got.sequence.positions.scheme) == (ids, scheme)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("none.jsonl", "INPUT: got 'none.jsonl', want a file, or a pattern that matches files"),
        ("", "Missing argument 'INPUT...'; see mmpos preprocess --help"),
        ("broken.jsonl", "broken.jsonl[0]: got "),
        *((f"s0.jsonl {options}", line) for options, line in (
            ("-o s0.jsonl", "--output: got 's0.jsonl', which is a file, want a folder"),
            ("-f laion", f"--format: got 'laion', want one of {', '.join(FORMATS)}\n"),
            ("--marker images=1", "--marker images=1: got 'images', want one of begin, end, patch, row, last_row, "),
            ("--image-option max_token=9",
             "--image-option max_token=9: got 'max_token' (did you mean 'max_tokens'?), want one of "),
            ("--marker row", "--marker: got 'row', want NAME=VALUE"),
            ("--image-option patch_size=big", "--image-option patch_size=big: patch_size: got 'big', want an integer"),
            ("--marker row=8 --marker row=9", "--marker row=9: got 'row' again, want each name once"),
            ("--images-from none", "--images-from: got 'none', want a folder"),
            ("-f texts --images-from .", "--images-from cannot be combined with --format texts"),
            ("--tokenizer none", "--tokenizer: got 'none', want bytes or the path of a tokenizer.json"),
            ("--tokenizer s0.jsonl", "--tokenizer: got 's0.jsonl', want a tokenizer.json ("),
            ("--config none", "--config: got 'none', want the folder of a model"),
            ("--config . --scheme tie", "--config cannot be combined with --scheme"),
            ("--config . --tokenizer bytes", "--config cannot be combined with --tokenizer"),
            ("--max-skipped 1.5", "--max-skipped: got 1.5, want a share from 0 to 1"),
            ("--engine ray", 'the ray engine: ray is not installed; install it with: pip install "multimodal-pos'),
        )),
    ],
)  # fmt: skip
def test_command_errors_are_a_single_line(
    capsys: pytest.CaptureFixture[str], arguments: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    corpus(tmp_path, 1, 1)
    Path("broken.jsonl").write_text("{broken\n")
    assert main(command(*arguments.split())) == (1 if "ray" in arguments else 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    *announced, error = captured.err.splitlines()
    assert all(first.startswith("reading 1 input (") for first in announced)
    assert f"{error}\n".startswith(f"mmpos: error: {line}")
    assert not Path("out").exists() or contents(Path("out")) == {}


@pytest.mark.parametrize(
    ("number", "group", "code"),
    [(signal.SIGINT, True, 130), (signal.SIGTERM, True, 143), (signal.SIGTERM, False, 143)],
    ids=["ctrl-c", "sigterm to all", "sigterm"],
)
@pytest.mark.parametrize("moment", ["workers start", pytest.param("workers write", marks=pytest.mark.slow), "alone"])
def test_a_stopped_command_stops_its_workers_leaves_nothing_and_prints_one_message(
    tmp_path: Path, moment: str, number: signal.Signals, group: bool, code: int
) -> None:
    corpus(tmp_path, 8, 5000)  # more than the command can write before the signal
    out, workers = tmp_path / "out", 1 if moment == "alone" else 2

    def ready(pid: int) -> bool:
        if moment == "workers start":  # not counting the resource tracker
            return sum(b"spawn_main" in read_proc(child, "cmdline") for child in descendants(pid)) == 2
        return len(list(out.glob(".*.parquet.*.tmp"))) == workers

    arguments = [sys.executable, "-m", "mmpos", *command("s*.jsonl", "--workers", str(workers))]
    pipe: Any = subprocess.PIPE
    with subprocess.Popen(arguments, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        while not ready(process.pid):
            assert process.poll() is None, process.communicate()
            time.sleep(0.005)
        family = [process.pid, *descendants(process.pid)]
        (os.killpg if group else os.kill)(process.pid, number)
        printed, errors = process.communicate(timeout=300)
    assert eventually(lambda: not any(map(alive, family))), "workers outlive their parent"
    *progress, last = errors.splitlines()
    assert (process.returncode, printed, last) == (code, "", "mmpos: stopped; run the same command to resume")
    assert all(re.fullmatch(r"reading 8 inputs .+|[\d.]+ of [\d.]+ MB, .+", line) for line in progress), errors
    assert [name for name in contents(out) if not re.fullmatch(r"s\d\.parquet", name)] == []


@pytest.mark.slow
def test_a_terminal_shows_a_progress_bar(tmp_path: Path) -> None:
    corpus(tmp_path, 2, 1)
    terminal, side = os.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    arguments = [sys.executable, "-m", "mmpos", *command("s0.jsonl", "s1.jsonl")]
    with subprocess.Popen(arguments, stderr=side, stdout=subprocess.PIPE, env=environment, text=True) as process:
        os.close(side)
        output = b""
        with suppress(OSError):  # Linux raises it after the last writer has exited
            while data := os.read(terminal, 2**16):
                output += data
        assert process.stdout is not None
        assert process.stdout.read().startswith("files       2 in out: kept 0, added 2\n")
    os.close(terminal)
    assert process.returncode == 0
    assert b"2 documents" in output
