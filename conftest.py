"""Test set-up: kernels run in Triton's interpreter where there is no GPU; a thread a worker; options of long tests."""

import gc
import os
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # workers have a core each, on which threads of torch would wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Imported once, before doctests collect its modules one by one.
import mmpos  # noqa: F401

# A channel of grpc.aio waits for its thread when it is collected: for ever in a forked child, which has none.
os.register_at_fork(after_in_child=gc.freeze)


def pytest_runtest_logfinish() -> None:
    """End a worker whose CUDA context is lost, so that the next tests run in another one."""
    torch = sys.modules.get("torch")
    if "PYTEST_XDIST_WORKER" in os.environ and torch is not None and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)


def pytest_configure(config: pytest.Config) -> None:
    """Give back in the end what pytest_collection freezes, so that modules see their objects go."""
    config.add_cleanup(gc.unfreeze)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage among millions of objects of modules and tests, which live until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


# A plugin for runs of its own; and what imports other projects, which takes seconds and fails where they are missing.
collect_ignore = [
    "tests/helpers/native_choice.py",
    "benchmarks/mmpos_bench/peers",
    "mmpos/integrations/vllm/models.py",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    """More than CI has time for, and what `make dist` built."""
    parser.addoption("--release", help="The folder of a release, which tests judge instead of one that they build.")
    parser.addoption("--mutations", type=int, default=10_000, help="Broken messages that the service is sent.")
    parser.addoption("--batches", type=int, default=300, help="Random batches of a model type for its get_rope_index.")
    parser.addoption("--one-in", type=int, default=16, help="Read one in N variants of the configs of a model type.")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Pass over files that mark no test where the marked ones alone are run: every worker imports the others."""
    only_slow = config.getoption("markexpr") == "slow" and collection_path.suffix == ".py"
    return True if only_slow and "slow" not in collection_path.read_text(encoding="utf-8").lower() else None
