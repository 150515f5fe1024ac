"""The command that plans training: it writes an index of balanced packs of preprocessed sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmpos.cli import report
from mmpos.cli.commands import group
from mmpos.errors import InvalidInputError
from mmpos.support.checks import as_typed, counted

if TYPE_CHECKING:
    from mmpos.data import Headers, SequenceShard

data = group("data", "Plan the packs of a training run.")


@data.command("plan")
def plan_packs(
    inputs: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="Folders or files of mmpos preprocess.", show_default=False)
    ],
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Path or URL of the index: .parquet.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens in a pack.")] = 8192,
    ranks: Annotated[int, typer.Option(min=1, help="Number of data-parallel ranks.")] = 1,
    microbatches: Annotated[int, typer.Option(min=1, help="Number of packs per rank and step.")] = 1,
    config: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder of the model to plan for.", show_default="a 7B model")
    ] = None,
    patches_per_token: Annotated[int, typer.Option(min=1, help="Number of patches merged into one token.")] = 4,
) -> None:
    """Plan balanced packs of preprocessed sequences, and write the index that PlannedPacks reads.

    Pixels are not read: sizes come from the files' columns.
    """
    from mmpos.data import Cost, plan, read_headers, write_index
    from mmpos.data.paths import checked_path

    if not output.endswith(".parquet"):
        raise InvalidInputError(f"--output: got {output!r}, want a file ending in .parquet")
    output = checked_path("--output", output)
    cost = Cost.from_hf_config(config) if config else Cost()
    with as_typed(paths="FILE"):
        files = _ready_shards(inputs)
    with report.progress_bar() as bar:
        headers = read_headers(_shown(files, bar), patches_per_token=patches_per_token)
    _check_lengths(headers, files, max_tokens)
    planned = plan(headers, max_tokens=max_tokens, ranks=ranks, microbatches=microbatches, cost=cost)
    write_index(output, planned, files)
    labels = planned.sums(headers.labels).reshape(planned.num_steps, -1).sum(axis=1).astype(int)
    report.show_values(
        {
            "examples": f"{len(headers):,}, with {headers.tokens.sum():,} tokens and {headers.labels.sum():,} labels",
            "steps": f"{planned.num_steps:,} of {counted(ranks, 'rank')} and {counted(microbatches, 'microbatch')}",
            "fill": f"{planned.fill:.1%} of packs of {max_tokens:,} tokens",
            "slowest rank": f"{planned.straggling:.3f} of the mean",
            "labels of a step": f"{labels.min():,} to {labels.max():,}, {labels.mean():,.0f} on average",
            "dummy images": f"{planned.needs_image.sum():,} packs",
        }
    )
    typer.echo(output)


def _ready_shards(inputs: Sequence[str]) -> list[SequenceShard]:
    """Open folders of finished runs, and other files directly, in the order of the inputs."""
    from mmpos.data import SequenceShard, sequence_shards, shards
    from mmpos.data.paths import checked_path, kind_of

    opened: list[str] = []
    for i, name in enumerate(inputs):
        path = checked_path(f"paths[{i}]", name)
        opened += [one.source for one in sequence_shards(path)] if kind_of(path) == "folder" else [path]
    return [SequenceShard(reader.source) for reader in shards(opened)]


def _check_lengths(headers: Headers, files: Sequence[SequenceShard], max_tokens: int) -> None:
    """Refuse the first example that no pack can hold, by its file, row and key."""
    for row in (headers.tokens > max_tokens).nonzero()[0][:1].tolist():
        got = f"got {headers.tokens[row]} tokens, want <= --max-tokens {max_tokens}"
        for file in files:
            keys = file.columns(["key"])["key"]
            if row < len(keys):
                raise InvalidInputError(f"{file.source}[{row}]: {got} (key {keys[row].as_py()!r})")
            row -= len(keys)


def _shown(files: Sequence[SequenceShard], bar: Callable[..., None] | None) -> Iterator[SequenceShard]:
    """Yield the files, and show how many were read."""
    for done, file in enumerate(files, 1):
        yield file
        if bar is not None:
            bar(done, len(files), f"{done} of {counted(len(files), 'file')}")
