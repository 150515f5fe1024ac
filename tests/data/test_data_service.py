"""A loader that builds sequences on a server yields the same batches and errors as one that builds them itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from data_corpus import records, write_parquet

from mmpos_server.config import load
from mmpos_server.testing import running

LOADER = """
import json, sys
from results import assert_equal
from torch.utils.data import DataLoader
from mmpos import ImageProcessor, SequenceBuilder
from mmpos.client import Client
from mmpos.data import BatchDataset, HFImages, PackedCollator, Packer, Preprocess, read_quarantine, shards

def run(builder, folder, workers, threads):
    dataset = BatchDataset(
        shards(path), Preprocess(HFImages(), builder), Packer(300, buffer=4, split_text=True), PackedCollator(),
        seed=1, shuffle=5, on_error="skip", quarantine=f"{path}.{folder}", threads=threads,
    )
    context = "fork" if workers else None
    batches = list(DataLoader(dataset, batch_size=None, num_workers=workers, multiprocessing_context=context))
    return batches, sorted((line["index"], line["error"]) for line in read_quarantine(f"{path}.{folder}"))

if __name__ == "__main__":
    path, address = sys.argv[1:]
    client = Client(address, timeout=300)
    builder = SequenceBuilder(images=ImageProcessor("pillow", patch_size=4, min_pixels=64))
    # Forked workers first, since a client that has made calls cannot simply be forked.
    for workers, threads in ((2, 4), (0, 0)):
        batches, skipped = served = run(client, f"served-{workers}", workers, threads)
        assert_equal(served, run(builder, f"alone-{workers}", workers, 0))
        print(json.dumps([len(batches), skipped]))
"""


@pytest.mark.slow
def test_batches_built_through_a_client_match_those_from_a_builder(tmp_path: Path) -> None:
    settings, loader, rows = tmp_path / "server.toml", tmp_path / "loader.py", records(0, 20)
    settings.write_text('[profiles.default.images]\nbackend = "pillow"\npatch_size = 4\nmin_pixels = 64\n')
    rows[5]["image"]["bytes"] = b"no image at all"
    rows[11]["image"]["bytes"] = rows[11]["image"]["bytes"][:300]
    path = write_parquet(tmp_path / "a.parquet", rows)
    loader.write_text(LOADER)
    helpers = {"GRPC_ENABLE_FORK_SUPPORT": "0", "PYTHONPATH": str(Path(__file__).parents[1] / "helpers")}
    with running(load(settings)) as server:
        command = [sys.executable, "-W", "ignore", loader, path, server]
        printed = subprocess.check_output(command, text=True, timeout=300, env={**os.environ, **helpers})
    first, second = map(json.loads, printed.splitlines())
    for batches, skipped in (first, second):
        assert batches > 3
        assert [index for index, _ in skipped] == [5, 11]
