"""Position ids against the per-image loop of serving engines: lists of parts in, dense ids out, in one run."""

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
    print(machine())
    print("median microseconds (20th–80th percentile); ratios are engine loop / mmpos\n")
    print(ROW.format("workload", "engine loop, mrope", "mmpos, mrope", "ratio", "mmpos, rope-tie", "ratio"))
    for name, (title, documents) in WORKLOADS.items():
        expected, deltas = engine_loop(documents)
        segments = mmpos.SegmentTable.from_documents(documents)
        positions = mmpos.place(segments, "mrope")
        assert (ids(documents, "mrope") == expected).all()
        assert positions.deltas.tolist() == deltas
        times = compare(
            {
                "loop": lambda documents=documents: engine_loop(documents),
                "mrope": lambda documents=documents: ids(documents, "mrope"),
                "tie": lambda documents=documents: ids(documents, "rope-tie"),
                "table": lambda documents=documents: mmpos.SegmentTable.from_documents(documents),
                "place": lambda segments=segments: mmpos.place(segments, "rope-tie"),
                "dense": mmpos.place(segments, "rope-tie").dense,
            }
        )
        loop, mrope, tie = times["loop"], times["mrope"], times["tie"]
        ratios = [f"{loop.median / t.median:.1f}×" for t in (mrope, tie)]
        print(ROW.format(f"{name}: {title}", loop.micros, mrope.micros, ratios[0], tie.micros, ratios[1]))
        print(
            "   of rope-tie:",
            ", ".join(f"{part} {times[part].median * 1e6:,.1f}" for part in ("table", "place", "dense")),
        )


if __name__ == "__main__":
    main()
