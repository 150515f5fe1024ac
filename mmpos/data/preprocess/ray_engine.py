"""The engine of a cluster: shards over the actors of Ray Data."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import Any

from mmpos.data.preprocess.shard_job import Counts, ShardJob, Task
from mmpos.support.extras import needed_for

with needed_for("the ray engine", extra="ray"):
    import ray
    import ray.cloudpickle
    import ray.data

__all__ = ["ShardWorker", "run_ray"]


class ShardWorker:
    """What an actor holds: the callable of ``map_batches``, from rows of tasks to rows of what came of them.

    Args:
        job: what is done with every task.
        folder: where relative paths begin.
    """

    def __init__(self, job: ShardJob, folder: str) -> None:
        self._job = job
        with suppress(OSError):  # on another machine it may not be there
            os.chdir(folder)

    def __call__(self, rows: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """Do the tasks of some rows; their errors come back as values, since Ray would wrap them in its own."""
        return {"number": list(rows["number"]), "result": [self._result(task) for task in rows["task"]]}

    def _result(self, task: bytes) -> bytes:
        found: Counts | Exception = Counts()
        try:
            with closing(self._job.run(pickle.loads(task))) as steps:
                for counts in steps:
                    found = counts
        except Exception as error:
            found = error
        return pickle.dumps(found)


def run_ray(job: ShardJob, tasks: Sequence[Task], workers: int) -> Generator[tuple[int, Counts, bool], None, None]:
    """Do the tasks in the cluster that Ray is connected to; where there is none, in one that is started and stopped.

    Inputs and outputs must have the same paths on all machines. An actor that dies is replaced and its shard begun
    anew: an output is written under a name of its own and renamed in the end.

    Args:
        job: what to do.
        tasks: with what.
        workers: actors, of one processor each; where the cluster has fewer, those work that it has room for.

    Yields:
        Number of a task and what came of it, as tasks finish; True, since it is all.
    """
    with _connected():
        dumps: Any = ray.cloudpickle.dumps  # also takes readers defined in a script
        rows = [
            {"number": i, "task": dumps(replace(task, output=task.output.absolute()))} for i, task in enumerate(tasks)
        ]
        dataset = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
            ShardWorker,
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=min(workers, len(rows)), max_tasks_in_flight_per_actor=1),
            fn_constructor_args=(job, os.getcwd()),
            num_cpus=1,
        )
        # The bar is ours, and so is the last word.
        dataset.context.enable_progress_bars = False
        dataset.context.print_on_execution_start = False
        for row in dataset.iter_rows():
            found = pickle.loads(row["result"])
            if isinstance(found, Exception):
                raise found
            yield row["number"], found, True


@contextmanager
def _connected() -> Iterator[None]:
    if ray.is_initialized():
        yield
        return
    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
    try:
        yield
    finally:
        ray.shutdown()
