"""The Ray engine on a local Ray cluster: the same files and errors as the local engine, and jobs that resume."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from test_data_preprocess import PAGES, command, contents, corpus

from mmpos.__main__ import main
from mmpos.data.examples import Location, RecordError
from mmpos.data.preprocess import Progress, write_sequences
from mmpos.data.readers import shards

ray = pytest.importorskip("ray")


# Ray warns about its own defaults.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),
    pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\."),
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


def test_the_command_starts_and_stops_its_own_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ray.shutdown()
    monkeypatch.chdir(tmp_path)
    corpus(tmp_path, 2, 2)
    assert main(command("s*.jsonl", "--engine", "ray", "--workers", "2")) == 0
    assert re.match(r"files       2 in out: kept 0, added 2\ndocuments   4\n", capsys.readouterr().out)
    assert not ray.is_initialized()
    assert main(command("s*.jsonl", out="here")) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "here")
