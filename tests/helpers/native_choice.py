"""Pytest plugin that runs tests with another extension, or without one.

The environment variable NATIVE contains the path of the extension; if it is empty, tests run without an extension.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader

_PATH = os.environ["NATIVE"]

if _PATH:
    _loader = ExtensionFileLoader("mmpos._native", _PATH)
    _spec = spec_from_loader("mmpos._native", _loader)
    assert _spec is not None
    _module = module_from_spec(_spec)
    _loader.exec_module(_module)
    sys.modules["mmpos._native"] = _module
else:
    sys.modules["mmpos._native"] = None  # type: ignore[assignment]  # importing it raises ImportError

from mmpos.support import native  # noqa: E402

assert native.core is sys.modules["mmpos._native"], "mmpos was imported before this plugin"
