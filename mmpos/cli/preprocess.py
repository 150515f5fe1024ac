"""The command that preprocesses a corpus into sequences, with a progress bar on a terminal and lines elsewhere."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mmpos.cli import report
from mmpos.cli.commands import app
from mmpos.cli.options import DEFAULT, SchemeName, flat, make_scheme
from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.support.checks import as_typed, counted, did_you_mean, naming
from mmpos.support.extras import needed_for
from mmpos.support.interrupts import Terminated, stopped_by_sigterm
from mmpos.support.program import INTERRUPTED, TERMINATED

if TYPE_CHECKING:
    from mmpos.data import Progress, Summary
    from mmpos.data.examples import Preprocess
    from mmpos.sequence.builder import SequenceBuilder

FORMATS = ("obelics", "mmc4", "chat", "llava", "finevision", "hf", "pairs", "tar-documents", "texts")

_PAUSE = 5.0  # seconds between two progress lines
_REASONS, _OTHERS = 5, 10  # numbers of reasons and of inputs of earlier runs that the summary lists


@dataclass(frozen=True)
class RecordFlags:
    """The options for reading records."""

    format_name: Annotated[
        str,
        typer.Option(
            "--format",
            "-f",
            metavar="NAME",
            help=f"Format of the records: {', '.join(FORMATS)}.",
            show_default=False,
            autocompletion=lambda incomplete: [name for name in FORMATS if name.startswith(incomplete)],
        ),
    ]
    images_from: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Base of image paths.", show_default="no paths are read")
    ] = None

    def preprocess(self, builder: SequenceBuilder) -> Preprocess:
        """Return the callable that reads a record and builds its sequence."""
        from mmpos.data.examples import Preprocess
        from mmpos.data.formats import FORMATS, ChatTemplate
        from mmpos.data.formats.images import Images

        name = self.format_name
        if name not in FORMATS:
            want = f"{did_you_mean(name, FORMATS)}, want one of {', '.join(FORMATS)}"
            raise InvalidInputError(f"--format: got {name!r}{want}")
        if self.images_from is not None and not self.images_from.is_dir():
            raise InvalidInputError(f"--images-from: got {str(self.images_from)!r}, want a folder")
        if self.images_from is not None and name == "texts":
            raise InvalidInputError("--images-from cannot be combined with --format texts")
        records = FORMATS[name](images=Images(self.images_from))
        own = getattr(builder.tokenizer, "inner", None)
        if hasattr(records, "template") and getattr(own, "chat_template", None) is None:
            records = replace(records, template=ChatTemplate())
        return Preprocess(records, builder)


@dataclass(frozen=True)
class SequenceFlags:
    """The options for building sequences."""

    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder of a Transformers model: use its tokenizer, chat template, image settings, markers, scheme.",
            show_default=False,
        ),
    ] = None
    image_option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Image option, such as std=[0.5,0.5,0.5].", show_default=False),
    ] = None
    tokenizer: Annotated[
        str | None, typer.Option(metavar="bytes|FILE", help="Bytes, or a tokenizer.json.", show_default="bytes")
    ] = None
    marker: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Marker token of images: begin, end, patch, row or last_row, such as begin=<|vision_start|>, or "
            "begin= for none.",
            show_default="[IMG], [/IMG], [PATCH] and no row",
        ),
    ] = None
    scheme: SchemeName = None

    def builder(self) -> SequenceBuilder:
        """Return the sequence builder for these options."""
        from mmpos.images import ImageProcessor
        from mmpos.sequence.builder import Markers, SequenceBuilder

        backend = "torchvision" if find_spec("torchvision") else "pillow"
        if self.config is not None:
            for option in ("tokenizer", "marker", "scheme"):
                if getattr(self, option):
                    raise InvalidInputError(f"--config cannot be combined with --{option}")
            return self._model_builder(self.config, backend)
        images = _assigned("--image-option", ImageProcessor(backend), self.image_option)
        markers = _assigned("--marker", Markers(), self.marker)
        scheme = make_scheme(DEFAULT if self.scheme is None else self.scheme)
        return SequenceBuilder(_tokenizer(self.tokenizer or "bytes"), images=images, scheme=scheme, markers=markers)

    def _model_builder(self, folder: Path, backend: str) -> SequenceBuilder:
        """Return the sequence builder for the model in a folder."""
        from mmpos.integrations.models import from_hf_config
        from mmpos.sequence.builder import Markers, SequenceBuilder

        if not folder.is_dir():
            raise InvalidInputError(f"--config: got {str(folder)!r}, want the folder of a model")
        with naming("--config"):
            model = from_hf_config(folder)
            if model.start:
                got = f"{model.model_type!r} with first id {model.start}"
                raise UnsupportedError(f"got {got}, want a model whose first id is 0")
            tokenizer = _model_tokenizer(folder)
            if model.placeholders.image is None:
                if self.image_option:
                    raise InvalidInputError("got a text-only model with --image-option, want a model with images")
                return SequenceBuilder(tokenizer, scheme=model.scheme, markers=Markers(None, None, len(tokenizer)))
            images, markers = model.image_processor(backend=backend), model.markers
        images = _assigned("--image-option", images, self.image_option)
        return SequenceBuilder(tokenizer, images=images, scheme=model.scheme, markers=markers)


@dataclass(frozen=True)
class WorkFlags:
    """The options for execution and for broken records."""

    on_error: Annotated[Literal["raise", "skip"], typer.Option(help="Action for a broken record.")] = "raise"
    max_skipped: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="Largest fraction of a worker's first 1,000 records that may be skipped; ten records always may.",
        ),
    ] = 0.1
    on_image_error: Annotated[
        Literal["drop", "skip-document", "raise"] | None,
        typer.Option(help="Action for a broken image.", show_default="the same as for a broken record"),
    ] = None
    engine: Annotated[
        Literal["local", "ray"],
        typer.Option(
            help="Processes on this machine, or Ray: the cluster of RAY_ADDRESS, else a running local one, else a new "
            "one; RAY_ADDRESS=local always starts a new one."
        ),
    ] = "local"
    workers: Annotated[int, typer.Option(min=1, help="Number of shards that are processed in parallel.")] = 1
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace existing files, even those with other settings.")
    ] = False


@app.command()
@flat
def preprocess(
    inputs: Annotated[
        list[str],
        typer.Argument(metavar="INPUT...", help="Shards: .tar .parquet .jsonl, or patterns.", show_default=False),
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FOLDER", help="Output folder or URL.", show_default=False)
    ],
    records: RecordFlags,
    sequences: SequenceFlags,
    work: WorkFlags,
) -> None:
    """Build preprocessed sequences from a corpus: one Parquet file per 64 MiB of each shard.

    A run that is stopped, by Ctrl-C or SIGTERM, leaves only complete files, and the same command resumes it.
    With [bold]--on-error skip[/bold], an unusable record becomes a row with its error; with
    [bold]--on-image-error drop[/bold], a record keeps the errors of its unusable images.
    """
    try:
        from mmpos.data import shards, write_sequences

        with as_typed(paths="INPUT", folder="--output", max_skipped="--max-skipped"):
            readers = shards(inputs)
            what = f"{counted(len(readers), 'input', ',')} ({inputs[0]}{' …' * (len(inputs) > 1)})"
            workers = f"{counted(min(work.workers, len(readers)), 'worker')} ({work.engine})"
            typer.echo(f"reading {what} into {output}; starting {workers}", err=True)
            options = asdict(work)
            own = replace(records.preprocess(sequences.builder()), on_image_error=options.pop("on_image_error"))
            logging.getLogger("mmpos").addHandler(logging.NullHandler())  # the files list skipped records
            with stopped_by_sigterm(), report.progress_bar() as bar:
                summary = write_sequences(readers, output, own, report=_shown(bar), **options)
    except KeyboardInterrupt as stop:
        typer.echo("mmpos: stopped; run the same command to resume", err=True)
        raise typer.Exit(TERMINATED if isinstance(stop, Terminated) else INTERRUPTED) from None
    _print(summary, output)


def _tokenizer(name: str) -> Any:
    if name == "bytes":
        from mmpos.sequence.tokenizers import ByteTokenizer

        return ByteTokenizer()
    with needed_for("--tokenizer", extra="tokenizers"):
        from tokenizers import Tokenizer
    if not Path(name).is_file():
        raise InvalidInputError(f"--tokenizer: got {name!r}, want bytes or the path of a tokenizer.json")
    try:
        return Tokenizer.from_file(name)
    except Exception as error:  # the library raises Exception for a broken file
        raise InvalidInputError(f"--tokenizer: got {name!r}, want a tokenizer.json ({error})") from None


def _model_tokenizer(folder: Path) -> Any:
    """Read the tokenizer of a model; its chat template may be in one of the processor's files."""
    from mmpos.support.files import read_json

    with needed_for("the tokenizer of --config", extra="hf"):
        from transformers import AutoTokenizer
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # missing or broken files raise exceptions of many types
        got = f"{type(error).__name__} ({str(error).strip()[:200]})"
        raise InvalidInputError(f"{folder / 'tokenizer.json'}: got {got}, want the tokenizer of the model") from error
    for name in ("chat_template.json", "processor_config.json"):
        if tokenizer.chat_template is None and (folder / name).is_file():
            tokenizer.chat_template = read_json(folder / name).get("chat_template")
    return tokenizer


def _assigned(option: str, target: Any, assignments: Sequence[str] | None) -> Any:
    """Apply the values of a repeatable option, NAME=VALUE, to settings."""
    known, assigned = [field.name for field in fields(target) if field.init], set[str]()
    for assignment in assignments or ():
        name, equals, value = assignment.partition("=")
        if not equals:
            raise InvalidInputError(f"{option}: got {assignment!r}, want NAME=VALUE")
        if name not in known:
            want = f"{did_you_mean(name, known)}, want one of {', '.join(known)}"
            raise InvalidInputError(f"{option} {assignment}: got {name!r}{want}")
        if name in assigned:
            raise InvalidInputError(f"{option} {assignment}: got {name!r} again, want each name once")
        assigned.add(name)
        with naming(f"{option} {assignment}"):
            target = replace(target, **{name: _value(value)})
    return target


def _value(text: str) -> object:
    """Read a value as JSON; other text is itself, and nothing is None."""
    try:
        return json.loads(text)
    except ValueError:
        return text or None


def _shown(bar: Callable[..., None] | None) -> Callable[[Progress], None]:
    """Return a function that shows progress on stderr: in a bar, or without one in a line every few seconds."""
    said_at = time.monotonic()

    def show(progress: Progress) -> None:
        nonlocal said_at
        now, words = time.monotonic(), described(progress)
        if bar is not None:
            bar(progress.read, progress.total, words)
        elif progress.read == progress.total or now - said_at > _PAUSE:
            typer.echo(words, err=True)
            said_at = now

    return show


def described(progress: Progress) -> str:
    """Return what was read of the total, the counts, the rates and the time left."""
    counts, seconds = progress.counts, progress.seconds
    records, new = counts.documents + counts.skipped, progress.read - progress.reused
    size = (1e-6, "MB") if max(progress.read, progress.total or 0) >= 1e6 else (1e-3, "kB")
    scale, unit = size if progress.unit == "bytes" else (1, "records")
    digits = 1 if progress.unit == "bytes" and (progress.total or 0) * scale < 100 else 0
    of = "" if progress.total is None else f" of {progress.total * scale:,.{digits}f}"
    words = [f"{progress.read * scale:,.{digits}f}{of} {unit}"]
    kept = progress.kept
    if kept.documents + kept.skipped:
        words += [f"{counted(kept.documents, 'document', ',')} kept"]
        words += [f"{counts.documents:,} added"] if records else []
    else:
        words += [counted(counts.documents, "document", ",")]
    words += [f"{counts.skipped:,} skipped"] if counts.skipped else []
    words += [f"{counted(counts.images_dropped, 'image', ',')} dropped"] if counts.images_dropped else []
    if seconds >= 1:
        words += [f"{records / seconds:,.0f} records/s", f"{counts.tokens / seconds:,.0f} tokens/s"]
        words += [f"{new * scale / seconds:,.1f} {unit}/s"] if progress.unit == "bytes" else []
        if progress.total is not None and new > 0 and progress.read < progress.total:
            words.append(f"{timedelta(seconds=round((progress.total - progress.read) / new * seconds))} left")
    return ", ".join(words)


def _print(summary: Summary, folder: str) -> None:
    counts, kept = summary.counts, sum(output.reused for output in summary.outputs)
    added = len(summary.outputs) - kept
    values = {"files": f"{len(summary.outputs):,} in {folder}: kept {kept:,}, added {added:,}"}
    values |= {name: f"{getattr(counts, name):,}" for name in ("documents", "tokens", "images", "skipped")}
    if counts.images_dropped:
        values["skipped"] += f", and {counted(counts.images_dropped, 'image', ',')} dropped"
    speed = f"{summary.tokens_per_second:,.0f} tokens/s" if summary.seconds >= 1 else "not measured in under a second"
    values["speed"] = speed if added else "nothing was left to do"
    if summary.others:
        names = ", ".join(summary.others[:_OTHERS]) + (" …" if len(summary.others) > _OTHERS else "")
        values["not given"] = f"{counted(len(summary.others), 'input', ',')} of earlier runs: {names}"
    report.show_values(values)
    for reason, count in summary.reasons.most_common(_REASONS):
        typer.echo(f"{count:,} × {reason}")
    if len(summary.reasons) > _REASONS:
        typer.echo(f"{len(summary.reasons) - _REASONS:,} more reasons; see the column error of the files")
