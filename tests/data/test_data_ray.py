"""The Ray engine on a local Ray cluster: the same files and errors as the local engine, and jobs that resume."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from test_data_preprocess import PAGES, command, contents, corpus
from waiting import alive, descendants, eventually, read_proc

from mmpos.__main__ import main
from mmpos.data import sequence_shards
from mmpos.data.examples import Location, RecordError
from mmpos.data.job import Counts
from mmpos.data.preprocess import Progress, write_sequences
from mmpos.data.readers import shards

ray = pytest.importorskip("ray")

from ray.cluster_utils import Cluster  # noqa: E402

# Ray warns about its own defaults, and leaves sockets open.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),
    pytest.mark.filterwarnings(
        r"ignore::DeprecationWarning:ray\.", "ignore:.*socket:pytest.PytestUnraisableExceptionWarning"
    ),
]


@pytest.fixture(scope="module", autouse=True)
def stopped() -> Iterator[None]:
    """Shut down Ray after the last test."""
    yield
    ray.shutdown()


@pytest.fixture
def cluster() -> None:
    """Connect to a Ray cluster with two CPUs."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, ignore_reinit_error=True)


@pytest.mark.usefixtures("cluster")
def test_files_and_errors_match_those_of_the_local_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    corpus(tmp_path, 3, 4, frozenset({(1, 1)}))
    readers, reports, errors = shards("s*.jsonl"), list[Progress](), set[str]()
    here = write_sequences(readers, Path("here"), PAGES, on_error="skip")
    options: dict[str, Any] = {"engine": "ray", "workers": 2, "report": reports.append}
    there = write_sequences(readers, Path("there"), PAGES, on_error="skip", **options)
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    assert [output.counts for output in there.outputs] == [output.counts for output in here.outputs]
    assert reports[-1].counts == here.counts
    assert reports[-1].read == reports[-1].total == sum(Path(reader.source).stat().st_size for reader in readers)
    assert ray.is_initialized()
    for own in ({"engine": "local"}, options):
        with pytest.raises(RecordError) as raised:
            write_sequences(readers, Path("new"), PAGES, **own)
        errors.add(str(raised.value))
    assert (len(errors), Path("new/s1.parquet").exists()) == (1, False)


@pytest.mark.usefixtures("cluster")
def test_a_large_input_becomes_the_same_files_as_with_the_local_engine(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class LargePages:  # three pages fill a file; the class is local because cloudpickle pickles such classes by value
        source: str
        size: int

        def records(self, start: int = 0, step: int = 1) -> Iterator[tuple[Location, Any]]:
            for i in range(start, self.size, step):
                page = {"id": f"{self.source}-{i}", "images": [None, "coffee.jpg"], "texts": ["ab", None]}
                yield Location(self.source, i), {**page, "pad": bytes(24 * 2**20)}

        def count(self) -> int | None:
            return self.size

    readers = [LargePages("a", 8), LargePages("b", 1)]
    write_sequences(readers, tmp_path / "here", PAGES)
    write_sequences(readers, tmp_path / "there", PAGES, engine="ray", workers=2)
    here = {path.name: path.read_bytes() for path in (tmp_path / "here").iterdir()}
    names = ["_run.json", "a.parquet", "a.part00001.parquet", "a.part00002.parquet", "b.parquet"]
    assert sorted(here) == names
    assert {path.name: path.read_bytes() for path in (tmp_path / "there").iterdir()} == here


def test_losing_a_machine_neither_loses_nor_duplicates_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmpos.data.preprocess._PAUSE", 0.0)  # a report after each file
    ray.shutdown()
    cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 500 * 2**20})
    try:
        nodes = [cluster.add_node(num_cpus=1, object_store_memory=500 * 2**20) for _ in range(2)]
        ray.init(address=cluster.address, log_to_driver=False)
        readers = shards(corpus(tmp_path, 12, 30))
        killed_at: list[float] = []

        def kill(progress: Progress) -> None:
            assert progress.total
            if progress.read >= progress.total / 6 and not killed_at:
                killed_at.append(progress.read / progress.total)
                cluster.remove_node(nodes[0], allow_graceful=False)

        summary = write_sequences(readers, tmp_path / "out", PAGES, engine="ray", workers=3, report=kill)
        assert killed_at
        assert killed_at[0] < 1
    finally:
        ray.shutdown()
        cluster.shutdown()
        gc.collect()  # closes the sockets here rather than in another test
    assert summary.counts == Counts(documents=360, tokens=360 * 103, images=360)
    keys = [example.key for shard in sequence_shards(tmp_path / "out") for example in shard.examples()]
    assert sorted(keys) == sorted(f"{s}-{p}" for s in range(12) for p in range(30))
    assert len(list((tmp_path / "out").iterdir())) == 13


def test_a_killed_command_can_be_resumed_and_starts_and_stops_its_own_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ray.shutdown()
    monkeypatch.chdir(tmp_path)
    corpus(tmp_path, 8, 100)
    out, actors, options = tmp_path / "out", list[int](), command("s*.jsonl", "--engine", "ray", "--workers", "2")
    arguments = [sys.executable, "-m", "mmpos", *options]
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not (actors and any(out.glob("*.parquet")) and any(out.glob(".*.parquet.*.tmp"))):
            assert process.poll() is None
            time.sleep(0.005)
            actors = [child for child in descendants(process.pid) if b"MapWorker" in read_proc(child, "cmdline")]
        process.kill()
    # A cluster's agents may linger for a minute, but its actors must not, since they write.
    assert eventually(lambda: not any(map(alive, actors))), "actors outlive their driver"
    kept = len(list(out.glob("*.parquet")))
    assert 0 < kept < 8
    assert main(options) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"files       8 in out: kept {kept}, added {8 - kept}\ndocuments   800\n")
    assert not ray.is_initialized()
    assert main(command("s*.jsonl", out="whole")) == 0
    assert contents(out) == contents(tmp_path / "whole")
