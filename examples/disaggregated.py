"""Disaggregated serving: a processor, two prefill workers and a decode worker, each a process of its own.

Ids are computed once, by the processor. Then nothing but messages of mmpos.rpc.v1 goes from process to process, and at
every hop a judge compares token ids, positions, deltas and rotated q and k with those of the whole sequence placed at
once: chunks that cut images, a hit in the prefix cache, single tokens, a draft that is half wrong, a step back, and a
request that is retracted and prefilled elsewhere. docs/disaggregated.md describes the messages.

    python examples/disaggregated.py
    python examples/disaggregated.py --forget-delta decode    # what the judge says to the usual mistake
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from disaggregated_judge import judge
from disaggregated_workers import Witness, decode, prefill, processor

SPAWN = get_context("spawn")
PROVERS = ("prefill 1", "prefill 2", "decode")


def main() -> int:
    """Run the workers, print what the judge finds, and return 1 if anything disagrees."""
    parser = argparse.ArgumentParser(description="Disaggregated serving in four processes, proved at every hop.")
    parser.add_argument("--forget-delta", choices=PROVERS, help="a worker that makes the usual mistake")
    return judge(run(parser.parse_args().forget_delta))


def run(forgetful: str | None) -> dict[str, list[bytes]]:
    """Start the workers and listen until all have ended; returns what each reports, message by message."""
    (to_first, from_processor), (to_other, other_from_processor) = SPAWN.Pipe(), SPAWN.Pipe()
    (first_to_decode, decode_from_first), (other_to_decode, decode_from_other) = SPAWN.Pipe(), SPAWN.Pipe()
    listening, telling = zip(*(SPAWN.Pipe() for _ in PROVERS), strict=True)
    first, other, last = (Witness(end, name == forgetful) for end, name in zip(telling, PROVERS, strict=True))
    processes = [
        _started("processor", processor, to_first, to_other),
        _started("prefill 1", prefill, first, from_processor, first_to_decode, (0, 1), False),
        _started("prefill 2", prefill, other, other_from_processor, other_to_decode, (1,), True),
        _started("decode", decode, last, decode_from_first, decode_from_other),
    ]
    # Only the workers hold them now, so that a pipe ends where its worker does.
    ends = (to_first, from_processor, to_other, other_from_processor)
    for end in (*ends, first_to_decode, decode_from_first, other_to_decode, decode_from_other, *telling):
        end.close()
    reports = dict(zip(PROVERS, _heard(listening), strict=True))
    for process in processes:
        process.join()
        if process.exitcode:
            sys.exit(f"{process.name} ended with status {process.exitcode}")
    return reports


def _started(name: str, work: Callable[..., None], *arguments: Any) -> BaseProcess:
    process = SPAWN.Process(target=work, args=arguments, name=name)
    process.start()
    return process


def _heard(connections: tuple[Connection, ...]) -> list[list[bytes]]:
    """All that comes from each, whoever speaks first."""
    heard: dict[Connection, list[bytes]] = {connection: [] for connection in connections}
    speaking = list(connections)
    while speaking:
        for connection in wait(speaking):
            assert isinstance(connection, Connection)
            try:
                heard[connection].append(connection.recv_bytes())
            except EOFError:
                speaking.remove(connection)
    return list(heard.values())


if __name__ == "__main__":
    sys.exit(main())
