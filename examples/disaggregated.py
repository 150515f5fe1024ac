"""Disaggregated serving: a processor, two prefill workers and a decode worker in separate processes.

The processor computes position ids once. Processes exchange only mmpos.rpc.v1 messages. At every hop, a judge compares
token ids, positions, deltas and rotated q and k with those of the whole sequence placed at once. The judge does so for
chunks that cut images, a prefix cache hit, single tokens, a draft that is half wrong, a rollback, and a request that is
retracted and prefilled elsewhere. docs/disaggregated.md describes the messages.

    python examples/disaggregated.py
    python examples/disaggregated.py --forget-delta decode    # the judge finds the usual mistake
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
WORKERS = ("prefill 1", "prefill 2", "decode")


def main() -> int:
    """Run the workers, print the judge's findings, and return 1 if anything disagrees."""
    parser = argparse.ArgumentParser(description="Disaggregated serving in four processes, checked at every hop.")
    parser.add_argument("--forget-delta", choices=WORKERS, help="worker that makes the usual mistake")
    return judge(run(parser.parse_args().forget_delta))


def run(forgetful: str | None) -> dict[str, list[bytes]]:
    """Start the workers, and return each worker's messages once all have exited."""
    (to_first, from_processor), (to_other, other_from_processor) = SPAWN.Pipe(), SPAWN.Pipe()
    (first_to_decode, decode_from_first), (other_to_decode, decode_from_other) = SPAWN.Pipe(), SPAWN.Pipe()
    receivers, senders = zip(*(SPAWN.Pipe() for _ in WORKERS), strict=True)
    first, other, last = (Witness(end, name == forgetful) for end, name in zip(senders, WORKERS, strict=True))
    processes = [
        _started("processor", processor, to_first, to_other),
        _started("prefill 1", prefill, first, from_processor, first_to_decode, (0, 1), False),
        _started("prefill 2", prefill, other, other_from_processor, other_to_decode, (1,), True),
        _started("decode", decode, last, decode_from_first, decode_from_other),
    ]
    # Close our copies, so that a pipe closes when its worker exits.
    ends = (to_first, from_processor, to_other, other_from_processor)
    for end in (*ends, first_to_decode, decode_from_first, other_to_decode, decode_from_other, *senders):
        end.close()
    reports = dict(zip(WORKERS, _received(receivers), strict=True))
    for process in processes:
        process.join()
        if process.exitcode:
            sys.exit(f"{process.name} ended with status {process.exitcode}")
    return reports


def _started(name: str, work: Callable[..., None], *arguments: Any) -> BaseProcess:
    process = SPAWN.Process(target=work, args=arguments, name=name)
    process.start()
    return process


def _received(connections: tuple[Connection, ...]) -> list[list[bytes]]:
    """Return all messages from each connection, received in any order."""
    messages: dict[Connection, list[bytes]] = {connection: [] for connection in connections}
    open_connections = list(connections)
    while open_connections:
        for connection in wait(open_connections):
            assert isinstance(connection, Connection)
            try:
                messages[connection].append(connection.recv_bytes())
            except EOFError:
                open_connections.remove(connection)
    return list(messages.values())


if __name__ == "__main__":
    sys.exit(main())
