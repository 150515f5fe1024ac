"""Run the tests as on other machines: with other vector instructions, with other thread counts, and on a busy machine.

python tests/helpers/portable.py               every setting
python tests/helpers/portable.py avx2 busy     these only
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

import numpy as np
from versions import parse_parts

SUITES = {"test": ["-n", "3", "--dist", "worksteal"], "slow": ["-n", "4", "--dist", "loadgroup", "-m", "slow"]}
"""pytest options for each suite, as in the Makefile."""

EXTENSIONS: list[str] = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
"""Vector extensions that numpy uses here but not on every machine."""

SETTINGS: dict[str, dict[str, str]] = {
    "as-it-is": {},
    # Like processors without AVX512 or without AVX: these variables apply to torch, MKL, oneDNN, numpy and its
    # OpenBLAS.
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "NPY_DISABLE_CPU_FEATURES": " ".join(name for name in EXTENSIONS if name != "X86_V3"),
        "OPENBLAS_CORETYPE": "Haswell",
    },
    "sse4.2": {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "NPY_DISABLE_CPU_FEATURES": " ".join(EXTENSIONS),
        "OPENBLAS_CORETYPE": "Nehalem",
    },
    "one-thread": {"OMP_NUM_THREADS": "1"},
    # Without MKL_DYNAMIC=FALSE, MKL starts no more threads than there are cores, and torch follows MKL.
    "four-threads": {"OMP_NUM_THREADS": "4", "MKL_DYNAMIC": "FALSE", "OMP_WAIT_POLICY": "PASSIVE"},
    "busy": {},
}


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Run processes that keep the processor busy while the context is open."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run(setting: str, suite: str) -> bool:
    """Run a suite, and return whether it passed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SUITES[suite]]
    # Use a separate cache: kernels that torch.compile built for other vector instructions have the same key.
    with TemporaryDirectory() as cache, busy((os.cpu_count() or 1) if setting == "busy" else 0):
        environment = {**os.environ, **SETTINGS[setting], "TORCHINDUCTOR_CACHE_DIR": cache}
        return subprocess.run(command, env=environment, check=False).returncode == 0


def main() -> int:
    """Run both suites with the selected settings, and print a line for each."""
    runs = [(setting, suite) for setting in parse_parts(__doc__, list(SETTINGS)) for suite in SUITES]
    passed = {names: run(*names) for names in runs}
    print(*(f"{' '.join(names):20}{'passed' if green else 'FAILED'}" for names, green in passed.items()), sep="\n")
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
