"""Plugin of pytest that installs rope_index in every model of a run, for Transformers' own tests.

They are in a checkout of Transformers, not in its package:
    PYTHONPATH=tests/helpers pytest -p rope_index_installed CHECKOUT/tests/models/qwen2_vl/test_modeling_qwen2_vl.py
A run fails if no model was given a function, or none was called, in this process: do not add -n.
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

_FUNCTIONS = [kind for name, kind in vars(get_rope_index).items() if name.endswith("RopeIndex")]


def pytest_configure(config: pytest.Config) -> None:
    """Cover the end of every constructor, and the calls of functions, until the run is over."""
    patch, seen = pytest.MonkeyPatch(), Seen()
    config.add_cleanup(patch.undo)
    config.pluginmanager.register(seen)
    post_init: Any = PreTrainedModel.post_init

    @wraps(post_init)
    def installing(model: Any) -> None:
        post_init(model)
        if hasattr(type(model), "get_rope_index"):
            try:
                install(model)
            except UnsupportedError as error:
                seen.refused[str(error)] += 1

    patch.setattr(PreTrainedModel, "post_init", installing)
    for kind in _FUNCTIONS:
        patch.setattr(kind, "__call__", seen.counting(kind.__call__))


class Seen:
    """What a run has called, by the class of the function, and the models that install refused, by its words."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    def counting(self, call: Any) -> Any:
        """Cover a method of a class by one that also counts."""

        @wraps(call)
        def called(function: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls[type(function).__name__] += 1
            return call(function, *args, **kwargs)

        return called

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a run that shows nothing."""
        if not self.calls and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say how often."""
        terminalreporter.write_line(f"rope_index was called {counted(self.calls.total(), 'time')}: {dict(self.calls)}")
        for words, times in self.refused.items():
            terminalreporter.write_line(f"{counted(times, 'model')} without it: {words}")
