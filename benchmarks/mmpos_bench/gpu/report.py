"""The results of all parts as one page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mmpos_bench.gpu.journal import Journal, Row


def read_rows(folder: Path) -> list[Row]:
    """Read the results of all parts that are there; what was under way at a sudden end is an error among them."""
    return [row for path in sorted(folder.glob("part-*.jsonl")) for row in Journal(path).rows if row["kind"] != "begin"]


def share_of_copy(rows: Sequence[Row]) -> Iterator[tuple[Row, float]]:
    """Yield what was timed with its share of the bandwidth of a copy in one launch, at the same size."""
    timed = [row for row in rows if row["kind"] == "speed" and "us" in row]
    limits = {_size(row): row["bytes"] / row["us"] for row in timed if row["role"] == "limit"}
    for row in timed:
        if _size(row) in limits:
            yield row, row["bytes"] / row["us"] / limits[_size(row)]


def _size(row: Row) -> tuple[str, int, int]:
    return row["shape"], row["documents"], row["tokens"]


def problems_in(rows: Sequence[Row]) -> list[str]:
    """List what is wrong with ours: tests, launches, findings of sanitizers, parts that broke; not tools that fail."""
    found = []
    peers = {row["way"] for row in rows if row.get("role") == "peer"}
    for row in rows:
        name = row.get("name", "")
        if row["kind"] == "test" and row["outcome"] == "failed":
            found.append(f"{name}: {row['error']}")
        elif row["kind"] == "sanitizer" and row.get("found"):
            found.append(f"{name}: {row['found']} findings: {row['said']}")
        elif (
            "error" in row and row["kind"] not in ("test", "sanitizer", "ncu") and name.partition(": ")[2] not in peers
        ):
            found.append(f"{row['kind']}, {name}: {row['error']}")
    return found


def write_report(folder: Path) -> None:
    """Write report.md beside the results."""
    rows = read_rows(folder)
    (folder / "report.md").write_text("\n".join([*_head(rows), *_tests(rows), *_speeds(rows), *_looks(rows)]) + "\n")


def _head(rows: Sequence[Row]) -> Iterator[str]:
    machines = [row for row in rows if row["kind"] == "machine"]
    yield f"# The kernels on {machines[0]['gpu'] or 'no GPU'}" if machines else "# No results"
    if any(row["dry"] for row in machines):
        yield "\n**A dry run: toys in Triton's interpreter, whose figures mean nothing.**"
    for row in machines:
        driver, torch = row.get("driver") or "none", f"torch {row['torch']}, CUDA {row['cuda']}"
        triton = row["packages"].get("triton", "none")
        of = f"commit {row['commit'] or 'unknown'}, driver {driver}, {torch}, triton {triton}, Python {row['python']}"
        yield f"\nPart {row['part']}: {of}; {row['cpu']}, {row['cores']} cores."
    problems = problems_in(rows)
    yield "\n## Wrong\n" if problems else "\nNothing was wrong."
    yield from (f"- {problem}" for problem in problems)


def _tests(rows: Sequence[Row]) -> Iterator[str]:
    last = {row["name"]: row for row in rows if row["kind"] == "tests"}
    if last:
        yield "\n## Tests\n\nThe worst error is a share of its bound, of launches against float64.\n"
        columns = ("passed", "failed", "skipped", "worst_share_of_bound", "seconds")
        heads = ["folder", "passed", "failed", "skipped", "worst error", "s of all workers"]
        yield from table(heads, ([name, *(str(row[c]) for c in columns)] for name, row in last.items()))


def _speeds(rows: Sequence[Row]) -> Iterator[str]:
    shares = list(share_of_copy(rows))
    if shares:
        yield "\n## Bandwidth\n"
        yield "Microseconds of a call by replays of a graph, with cold caches; and its share of the bandwidth of a copy"
        yield "of q and k in one launch. The last line compares the fastest peer with ours, without and with a norm:"
        yield "above 1, ours is faster."
    for shape, documents in dict.fromkeys(_size(row)[:2] for row, _ in shares):
        here = {(r["way"], r["tokens"]): (r, s) for r, s in shares if _size(r)[:2] == (shape, documents)}
        lengths = sorted({tokens for _, tokens in here})
        of = f", of {documents:,} documents" if documents > 1 else ""
        yield f"\n### {shape}{of}\n"
        lines = []
        for way in dict.fromkeys(way for way, _ in here):
            cells = [here.get((way, tokens)) for tokens in lengths]
            lines.append([way, *("" if c is None else f"{c[0]['us']:.4g} ({c[1]:.2f})" for c in cells)])
        lines.append(
            ["fastest peer / ours", *(_over_peers([x for (_, n), x in here.items() if n == t]) for t in lengths)]
        )
        yield from table(["tokens", *(f"{tokens:,}" for tokens in lengths)], lines)


def _over_peers(timed: Iterable[tuple[Row, float]]) -> str:
    """Compare the fastest peer with ours: above 1, ours is faster; with norms and without are apart."""
    best: dict[tuple[bool, str], float] = {}
    for row, _ in timed:
        if row["role"] == "peer" or row["way"] in ("in place", "new tensors", "norm"):
            key = "norm" in row["way"], row["role"]
            best[key] = min(best.get(key, row["us"]), row["us"])
    pairs = [(best.get((norm, "peer")), best.get((norm, "ours"))) for norm in (False, True)]
    return ", ".join(f"{peer / ours:.2f}×" for peer, ours in pairs if peer and ours)


def _looks(rows: Sequence[Row]) -> Iterator[str]:
    hosts = [row for row in rows if row["kind"] == "host" and "us" in row]
    if hosts:
        yield "\n## The host\n\nMicroseconds of the host for a call, and the 20th and 80th percentile.\n"
        yield from table(
            ["call", "µs", "from", "to"], ([r["name"], *(f"{r[c]:.4g}" for c in ("us", "p20", "p80"))] for r in hosts)
        )
    looked = [row for row in rows if row["kind"] == "sanitizer"]
    if looked:
        yield "\n## compute-sanitizer\n"
        for row in looked:
            yield f"- {row['name']}: " + (row["error"] if "error" in row else f"{row['found'] or 'no'} findings")
    counted = [(row["name"], kernel) for row in rows if row["kind"] == "ncu" for kernel in row.get("kernels", ())]
    if counted:
        yield "\n## Hardware counters\n"
        names = list(dict.fromkeys(name for _, kernel in counted for name in kernel if name != "kernel"))
        lines = ([f"{way}: {kernel['kernel']}", *(kernel.get(name, "") for name in names)] for way, kernel in counted)
        yield from table(["launch", *names], lines)
    unread = [row for row in rows if row["kind"] == "ncu" and "error" in row]
    if unread:
        yield "\n## Hardware counters that were not read\n"
        yield from (f"- {row['name']}: {row['error']}" for row in unread)
    absent = [row for row in rows if row["kind"] == "missing" or (row["kind"] == "note" and "text" in row)]
    if absent:
        yield "\n## Not here\n"
        yield from (f"- {row['name']}: {row['why']}" if "why" in row else f"- {row['text']}" for row in absent)


def table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> Iterator[str]:
    """Write a table of Markdown."""
    yield f"| {' | '.join(heads)} |"
    yield f"|{'|'.join(['---', *['--:'] * (len(heads) - 1)])}|"
    yield from (f"| {' | '.join(line)} |" for line in lines)
