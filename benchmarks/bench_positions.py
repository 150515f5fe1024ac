"""Position ids against the per-image loop of serving engines: lists of parts in, dense ids out, in one run."""

from functools import partial

import numpy as np
from engine_loop import engine_loop
from timing import compare, machine
from workloads import WORKLOADS, Document

import mmpos

ROW = "{:<42} {:>28} {:>28} {:>7} {:>28} {:>7}"


def ids(documents: list[Document], scheme: str) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    """Everything a caller pays for: the table from Python lists, the positions, the ids."""
    return mmpos.place(mmpos.SegmentTable.from_documents(documents), scheme).dense()


def main() -> None:
    """Measure and print."""
    print(machine())
    print("median microseconds (20th–80th percentile); ratios are engine loop / mmpos\n")
    print(ROW.format("workload", "engine loop, mrope", "mmpos, mrope", "ratio", "mmpos, rope-tie", "ratio"))
    for name, (title, documents) in WORKLOADS.items():
        expected, deltas = engine_loop(documents)
        segments = mmpos.SegmentTable.from_documents(documents)
        positions = mmpos.place(segments, "mrope")
        assert (ids(documents, "mrope") == expected).all()
        assert positions.deltas.tolist() == deltas
        tie = mmpos.place(segments, "rope-tie")
        times = compare(
            {
                "loop": partial(engine_loop, documents),
                "mrope": partial(ids, documents, "mrope"),
                "tie": partial(ids, documents, "rope-tie"),
                "table": partial(mmpos.SegmentTable.from_documents, documents),
                "place": partial(mmpos.place, segments, "rope-tie"),
                "dense": tie.dense,
            }
        )
        loop, ours = times["loop"], [times["mrope"], times["tie"]]
        cells = [cell for t in ours for cell in (t.micros, f"{loop.median / t.median:.1f}×")]
        print(ROW.format(f"{name}: {title}", loop.micros, *cells))
        print(
            "   of rope-tie:",
            ", ".join(f"{part} {times[part].median * 1e6:,.1f}" for part in ("table", "place", "dense")),
        )


if __name__ == "__main__":
    main()
