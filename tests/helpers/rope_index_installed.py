"""Pytest plugin that installs rope_index in every model that a run creates, for Transformers' own tests.

Those tests are in a checkout of Transformers, not in its package:
    PYTHONPATH=tests/helpers pytest -p rope_index_installed CHECKOUT/tests/models/qwen2_vl/test_modeling_qwen2_vl.py
The run fails if no rope_index was called in this process: do not add -n.
"""

from __future__ import annotations

from collections import Counter
from functools import wraps
from typing import Any

import pytest
from transformers import PreTrainedModel

from mmpos import UnsupportedError
from mmpos.integrations.hf import get_rope_index, install
from mmpos.support.checks import counted

CALLS, REFUSED = Counter[str](), Counter[str]()
"""Number of calls, by the function's class, and number of models that ``install`` refused, by message."""


def pytest_configure(config: pytest.Config) -> None:
    """Wrap the end of every model constructor and every rope_index call until the run ends."""
    CALLS.clear()
    REFUSED.clear()
    patch = pytest.MonkeyPatch()
    config.add_cleanup(patch.undo)
    post_init: Any = PreTrainedModel.post_init

    @wraps(post_init)
    def installing(model: Any) -> None:
        post_init(model)
        if hasattr(type(model), "get_rope_index"):
            try:
                install(model)
            except UnsupportedError as error:
                REFUSED[str(error)] += 1

    patch.setattr(PreTrainedModel, "post_init", installing)
    for kind in [kind for name, kind in vars(get_rope_index).items() if name.endswith("RopeIndex")]:
        patch.setattr(kind, "__call__", counting(kind.__call__))


def counting(call: Any) -> Any:
    """Wrap a method to count its calls."""

    @wraps(call)
    def called(function: Any, *args: Any, **kwargs: Any) -> Any:
        CALLS[type(function).__name__] += 1
        return call(function, *args, **kwargs)

    return called


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run in which no rope_index was called."""
    if not CALLS and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the number of calls, and the number of models without rope_index."""
    terminalreporter.write_line(f"rope_index was called {counted(CALLS.total(), 'time')}: {dict(CALLS)}")
    for message, times in REFUSED.items():
        terminalreporter.write_line(f"{counted(times, 'model')} without it: {message}")
