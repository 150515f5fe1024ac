"""Test setup: Triton's interpreter without a GPU, one thread per worker, and options for long tests."""

import gc
import json
import os
import re
import sys
import tempfile
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import pytest

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # a worker has one core, on which torch threads would block each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# When a grpc.aio channel is collected, it waits for its thread, which does not exist in a forked child.
os.register_at_fork(after_in_child=gc.freeze)


def pytest_runtest_logfinish() -> None:
    """End a worker whose CUDA context is lost, so that the next tests run in a new worker."""
    torch = sys.modules.get("torch")
    if "PYTEST_XDIST_WORKER" in os.environ and torch is not None and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Steal work so that one worker that has just ended, to which nothing can be sent, does not end the run."""
    if config.getoption("dist") != "worksteal":
        return None
    from xdist.scheduler import WorkStealingScheduling

    class Scheduling(WorkStealingScheduling):
        def check_schedule(self) -> None:
            with suppress(OSError):  # the worker is removed soon, which calls this again
                super().check_schedule()

    return Scheduling(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """Choose where kernels run; at exit, unfreeze what pytest_collection froze so that modules can release it."""
    config.add_cleanup(gc.unfreeze)
    if architecture := config.getoption("kernels"):
        sys.path.insert(0, str(Path(__file__).parent / "tests/machine"))
        os.environ.pop("TRITON_INTERPRET", None)  # as triton and the kernels are imported
        import standin

        folder = tempfile.TemporaryDirectory()
        config.add_cleanup(folder.cleanup)
        standin.use("sm_90" if architecture == "machine" else architecture, Path(folder.name))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude the millions of module and test objects from garbage collection, since they live until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


# Not collected: a plugin and modules for separate runs, and modules that import other projects, which takes seconds and
# may fail.
collect_ignore = [
    "tests/helpers/native_choice.py",
    "tests/machine/sample.py",
    "tests/machine/standin.py",
    "benchmarks/mmpos_bench/peers",
    "contrib/vllm/mmpos_vllm/models.py",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options for longer runs than in CI, and for the release to test."""
    parser.addoption("--release", help="Folder of a release to test, instead of building one.")
    parser.addoption("--mutations", type=int, default=10_000, help="Number of broken messages to send to the service.")
    parser.addoption("--attack-seconds", type=float, default=4.0, help="Seconds to attack a server.")
    parser.addoption("--attack-seed", default="slow", help="Seed of the attacks.")
    parser.addoption(
        "--attack-only", default="", help="Names of attacks, such as streams,metadata, or a round: streams:17."
    )
    parser.addoption(
        "--batches", type=int, default=150, help="Number of random batches for the get_rope_index of a model type."
    )
    parser.addoption(
        "--kernels", help="Run kernels without a GPU on the machine of tests/machine, as sm_90 if it is 'machine'."
    )
    parser.addoption("--one-of-each", action="store_true", help="Run one test of each function and kind of launch.")
    parser.addoption("--one-in", type=int, default=16, help="Test one in N variants of the configs of a model type.")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files in which -m selects no test, since every worker would import these files."""
    selected = config.getoption("markexpr")
    if collection_path.suffix != ".py" or selected not in ("slow", "not slow and not systemd"):
        return None
    text = collection_path.read_text(encoding="utf-8")
    if selected == "slow":
        return True if "mark.slow" not in text else None
    return True if re.search(r"^pytestmark = \[?\s*pytest\.mark\.slow", text, re.MULTILINE) else None


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Leave out the search for doctests in files without any, since every worker would import these files."""
    collectors = yield
    if file_path.suffix == ".py" and ">>> " not in file_path.read_text(encoding="utf-8"):
        return [collector for collector in collectors if type(collector) is pytest.Module]
    return collectors


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what the installed Transformers lacks, and deselect what --one-of-each leaves out."""
    _skip_missing_types(items)
    if config.getoption("one_of_each"):
        _keep_one_of_each(config, items)


def _skip_missing_types(items: list[pytest.Item]) -> None:
    """Skip the tests of model types that the installed Transformers, an older one, does not have."""
    transformers = sys.modules.get("transformers")
    if transformers is not None:
        known = json.loads(
            (Path(__file__).parent / "mmpos" / "rotary" / "hf_defaults.json").read_text(encoding="utf-8")
        )
        missing = {name for name in known if name not in transformers.CONFIG_MAPPING}
        for item in items:
            values = vars(getattr(item, "callspec", item)).get("params", {}).values()
            for name in missing.intersection(value for value in values if isinstance(value, str)):
                item.add_marker(
                    pytest.mark.skip(reason=f"Transformers {transformers.__version__} does not have {name}")
                )


def _keep_one_of_each(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one test of each function and of each kind of launch, a quick one if there is one."""
    kinds: dict[str, pytest.Item] = {}
    for item in sorted(items, key=lambda item: item.get_closest_marker("slow") is not None):
        function, _, parameters = item.nodeid.partition("[")
        launch, tokens, _ = parameters.partition(" tokens=")
        kinds.setdefault(f"{function}[{launch}" if tokens else function, item)
    config.hook.pytest_deselected(items=[item for item in items if item not in kinds.values()])
    items[:] = kinds.values()
