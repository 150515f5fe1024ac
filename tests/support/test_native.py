"""The extension returns the same numbers as numpy or declines, Python raises the errors, and every build works."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from importlib import import_module
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import CASES, Case, Document, batches

import mmpos
from mmpos import (
    Grid,
    InvalidInputError,
    MmposError,
    Placeholders,
    PositionTable,
    SegmentTable,
    SequenceBuilder,
    Text,
    place,
)
from mmpos.data.collate import PackedCollator, PaddedCollator
from mmpos.data.examples import Example
from mmpos.positions import table_rows
from mmpos.positions.plan import forget_plans
from mmpos.positions.table_rows import AXES, DENOMINATOR, HEIGHT, WIDTH
from mmpos.schemes import get_scheme
from mmpos.segments import Audio, CropMarkers, table
from mmpos.support import native

assert native.core is not None, "the extension was not built"
CORE = native.core

GUARD = 0x5A

ROOT = Path(__file__).parents[2]
SOURCES = sorted(map(str, (ROOT / "csrc").glob("*.c")))
COMPILER = shlex.split(os.environ.get("CC", "cc"))
FLAGS = ["-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", f"-I{sysconfig.get_path('include')}"]
CPYTHON = f"cp{sys.version_info.major}{sys.version_info.minor}"


class Narrow:
    """The extension without the vector instructions that only some CPUs support."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(CORE, name)
        return (lambda *arguments: function(*arguments[:-1], False)) if name == "expand" else function


class Recorder:
    """The extension, wrapped to record its calls: names, arguments and results."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], Any]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, arguments, getattr(CORE, name)(*arguments)))
            return self.calls[-1][2]

        return call


@contextmanager
def replaced_by(core: Any) -> Iterator[None]:
    native.core = core
    try:
        yield
    finally:
        native.core = CORE


def outcome(call: Callable[[], object]) -> Any:
    """Call a function; return its arrays in a comparable form, or its error."""
    try:
        value = call()
    except MmposError as error:
        return type(error), str(error)
    return [(str(array.dtype), array.tolist()) for array in (value if isinstance(value, tuple) else (value,))]


def both(call: Callable[[], object]) -> Any:
    """Return the outcome of a call after comparing it with and without the extension."""
    with replaced_by(None):
        want = outcome(call)
    with replaced_by(Narrow()):
        assert outcome(call) == want
    assert outcome(call) == want
    return want


def cases() -> st.SearchStrategy[tuple[Case, list[Document]]]:
    return st.sampled_from(CASES).flatmap(lambda case: st.tuples(st.just(case), batches(case)))


@given(cases(), st.data())
def test_dense_ids_are_equal_for_any_form_of_out(case: tuple[Case, list[Document]], data: st.DataObject) -> None:
    positions = place(SegmentTable.from_documents(case[1]), case[0].scheme)
    bounds = sorted(data.draw(st.tuples(*[st.integers(0, positions.num_tokens)] * 2)))
    positions = data.draw(st.sampled_from([positions, positions.slice(*bounds), positions.pad()]))
    axes = data.draw(st.none() | st.lists(st.integers(0, positions.axes - 1), min_size=1, max_size=4).map(tuple))
    dtype = np.dtype(data.draw(st.sampled_from(["int32", "int64", "float64"])))
    rows = positions.axes if axes is None else len(axes)
    shift, gap = data.draw(st.integers(0, 15)), data.draw(st.integers(0, 9))

    def dense() -> Any:
        memory = np.full(16 + rows * (positions.num_tokens * dtype.itemsize + gap), GUARD, np.uint8)
        shape, strides = (rows, positions.num_tokens), (positions.num_tokens * dtype.itemsize + gap, dtype.itemsize)
        out = np.ndarray(shape, dtype, memory, shift, strides)
        ids = positions.dense(out=out, axes=axes)
        assert ids is out
        # The bytes between and around the rows must stay unchanged.
        return out.copy(), memory

    both(dense)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 400), st.integers(1, 400), st.data())
def test_any_part_of_a_grid_matches_the_same_part_in_numpy(
    height: int, width: int, skip: int, tokens: int, data: st.DataObject
) -> None:
    steps = st.integers(-9, 9)
    numbers = [data.draw(st.tuples(st.integers(-50, 50), steps, steps, steps)) for _ in range(2)]
    denominator = data.draw(st.integers(1, 5))
    column = [0, skip, height, width, denominator, *numbers[0], *numbers[1]]
    table = np.array(column, np.int64)[:, None]
    positions = PositionTable(table, np.zeros((4, 1), np.int64), tokens, denominator > 1, "any")
    both(positions.dense)
    both(lambda: positions.dense(dtype=np.float64))
    both(positions.rationals)


@pytest.mark.parametrize(
    "out",
    [
        np.zeros((2, 11), ">i4"),
        np.zeros((2, 11), np.uint32),
        np.zeros((2, 11), np.int16),
        np.zeros((2, 12), np.int32),
        np.zeros((3, 11), np.int32),
        np.zeros(22, np.int32),
        np.zeros((2, 22), np.int32)[:, ::2],
        np.zeros((2, 11), np.complex128),
    ],
    ids=lambda out: f"{out.dtype.str}-{out.shape}",
)
def test_unsuitable_outputs_are_declined(out: npt.NDArray[Any]) -> None:
    positions = place(SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)]]))
    assert CORE.expand(positions.table, 11, False, out, None, True) is False
    assert not out.any()


def test_integer_outputs_are_declined_for_fractional_ids() -> None:
    positions = place(SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)]]), "rope-tie-v2")
    assert CORE.expand(positions.table, 11, True, np.zeros((2, 11), np.int64), None, True) is False
    with pytest.raises(InvalidInputError, match="out: got dtype int64, want float64"):
        positions.dense(out=np.zeros((2, 11), np.int64))


def test_numerators_too_large_for_doubles_are_divided_by_numpy() -> None:
    huge, denominator = 2**53 + 1, 2**31 - 1
    table = np.array([0, 0, 1, 3, denominator, huge, 0, 0, 1], np.int64)[:, None]
    positions = PositionTable(table, np.zeros((4, 1), np.int64), 3, True, "any")
    assert CORE.expand(table, 3, True, np.zeros((1, 3)), None, True) is False
    assert positions.dense().tolist() == [[float(huge + i) / denominator for i in range(3)]]


@pytest.mark.parametrize("name", [name for name in dir(CORE) if not name.startswith("_")])
def test_invalid_arguments_do_not_crash(name: str) -> None:
    function, array = getattr(CORE, name), np.zeros((3, 2), np.int64)
    with pytest.raises(TypeError, match=name):
        function()
    for value in (None, 1, "a", b"", (), array, array[0], array.astype(np.uint8)):
        for count in range(1, 12):
            try:
                result = function(*[value] * count)
            except (TypeError, OverflowError):
                continue
            assert not result


# Whatever their arguments, entries read and write inside their arrays.

ODD = [*range(9), -1, 2**31, 2**53, 2**62, 2**63 - 1, -(2**31), -(2**63)]  # no length of a batch that fills the memory


def corrupted(random: Random, value: Any, guards: list[npt.NDArray[Any]]) -> Any:
    """Copy an argument of the extension; some of its numbers, shapes and objects become others.

    Arrays get guards around them, which are appended to ``guards``.
    """
    if isinstance(value, np.ndarray):
        memory = np.full(value.nbytes + 128, GUARD, np.uint8)
        guards += memory[:64], memory[64 + value.nbytes :]
        array = np.ndarray(value.shape, value.dtype, memory, 64)
        array[...] = value
        for _ in range(random.choice([0, 0, 0, 1, 2]) if array.size else 0):
            odd = random.choice(ODD if array.dtype == np.int64 else range(9))
            array.flat[random.randrange(array.size)] = odd
        if random.random() < 0.04:
            array = random.choice([array[..., ::-1], array.T, array[..., 1:], array[:0], array.reshape(-1)])
        return array
    if random.random() < 0.02:
        return random.choice([None, 1, -1, (), "a", np.zeros((2, 2), np.int64)])
    if isinstance(value, tuple | list):
        items = [corrupted(random, item, guards) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if type(value) is int and random.random() < 0.1:
        return random.choice(ODD)
    if not isinstance(value, type) and hasattr(value, "__dict__") and not callable(value):
        changed = copy(value)
        vars(changed).update({name: corrupted(random, item, guards) for name, item in vars(value).items()})
        return changed
    return value


def call_everything() -> None:
    """Call each entry of the extension, except those for rotations and messages, which have their own tests."""
    documents: list[list[Any]] = [[Text(3), Grid(2, 3), Text(2)], [Text(1), Grid(1, 2, row_separator=True), Audio(2)]]
    segments = SegmentTable.from_documents(documents)
    SegmentTable.from_spans([9, 6], [1, 2], [[1, 2, 3], [1, 1, 2]], [0, 1])
    for ids, placeholders, image, video in (
        ([0, 8, 8, 9, 9], Placeholders(8, 9), [1, 1, 2], [[1, 1, 2]]),
        ([8, 11, 8, 12, 10], Placeholders(8, 9, 10, rows=(11, 12)), [1, 2, 1], None),
        ([0, 3, 8, 8, 4], Placeholders(8, crops=CropMarkers(3, 4, 5, 6, 7)), [1, 1, 2], None),
    ):
        SegmentTable.from_input_ids([[*ids, 0]], placeholders, [image], video, attention_mask=[[1] * 5 + [0]])
        SegmentTable.from_input_ids(ids, placeholders, [image], video, cu_seqlens=[0, 5])
    for scheme in ("rope-tie", "xd-rope", "rope-tie-v2"):
        positions = place(segments, scheme)
        positions.dense()
        positions.dense(axes=(1, 0))
    positions.padded(12)
    positions.take([1, 4], [3, 9])
    positions.window([0, 1], [2, 0], [2, 8])
    positions.decode([1, 2])
    positions.pad([12, 8]).shard(1, 2)
    positions.updated(remove=[0], replace={1: positions.window([0], [0], [4])}, add=[positions])
    sequences = [SequenceBuilder().build([[7] * 3, Grid(2, 2), "a", Grid(1, 2)]), SequenceBuilder().build(["abc"])]
    examples = [Example("r", sequence, sequence.input_ids) for sequence in sequences]
    for collator in (PackedCollator(4, 24), PaddedCollator("left")):
        collator(examples)


def test_corrupted_arguments_cause_no_access_outside_the_arrays() -> None:
    recorder, random = Recorder(), Random(0)
    forget_plans()
    with replaced_by(recorder):
        call_everything()
    answers = dict.fromkeys((name for name, _, result in recorder.calls if result is not None), 0)
    others = {"rotate", "served", "integers", "segments", "joined"}
    assert answers.keys() == {name for name in dir(CORE) if name[0] != "_"} - others
    for name, arguments, _ in recorder.calls:
        for _ in range(200):
            guards: list[npt.NDArray[Any]] = []
            try:
                answer = getattr(CORE, name)(*corrupted(random, arguments, guards))
            except (TypeError, OverflowError):
                continue
            assert all((guard == GUARD).all() for guard in guards), name
            answers[name] += answer is not None and answer is not False
            if answer is not None and name in ("documents", "scan", "spans"):
                kind, extents, offsets, *_ = answer
                sides = native.int64(extents).reshape(3, -1)
                lengths = np.diff(native.int64(offsets))
                assert sides.shape[1] == len(kind) == lengths.sum()
                assert lengths.min(initial=1) >= 1
                assert sides.min(initial=1) >= 1
            elif isinstance(answer, tuple) and name in ("place", "cut", "concatenate"):
                assert len(answer[0]) % 8 == len(answer[1]) % 32 == 0
    assert min(answers.values()) > 20, answers


def test_info_reports_whether_the_extension_is_built() -> None:
    assert mmpos.info()["extension"] == "built"
    with replaced_by(None):
        assert mmpos.info()["extension"] == "not built, numpy is used"


class Fickle:
    """A part that empties its lists when it is read."""

    lists: list[list[Any]]

    @property
    def length(self) -> int:
        for parts in self.lists:
            parts.clear()
        return 3


def test_lists_that_change_while_they_are_read_are_declined() -> None:
    documents: list[list[Any]] = [[Fickle(), Fickle()], [Fickle()]]
    Fickle.lists = [documents, *documents]
    assert CORE.documents(documents, Fickle, Audio, Grid, table._FIELDS) is None


MASK = np.array([[0, 1, 1], [1, 1, 1]])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_the_extension_supports_every_scheme(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    forget_plans()
    monkeypatch.setattr(native, "core", recorder)
    scheme = get_scheme(case.scheme)
    timed = case.name in ("mrope-qwen2.5", "tmrope", "tmrope-qwen3") or "tokens_per_second" in case.label
    grid = Grid(2 * case.side, 3 * case.side, frames=2 if case.frames else 1, seconds_per_frame=1 if timed else None)
    document: Document = [Text(3), grid, Text(2)] if case.text else [grid]
    positions = place(SegmentTable.from_documents([document]), case.scheme)
    positions.dense()
    positions.rationals()
    planned = ["place"] if scheme.linear_in else []
    by_plan = ["enter", "place"] if planned and not timed else []  # a plan declines grids with times
    general = [] if by_plan else ["placed"]
    assert [name for name, *_ in recorder.calls] == ["documents", *planned, *by_plan, *general, *["expand"] * 2]
    declined = ["documents", *planned] if timed else []
    assert [name for name, _, answer in recorder.calls if answer is None or answer is False] == declined


def test_the_extension_scans_token_ids_in_a_single_call(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(native, "core", recorder)
    SegmentTable.from_input_ids([5, 7, 7, 5, 8], Placeholders(image=7, video=8), [(1, 1, 2)], [(1, 1, 1)])
    SegmentTable.from_input_ids(
        [[0, 7, 7], [5, 5, 7]], Placeholders(image=7), [(1, 1, 2), (1, 1, 1)], attention_mask=MASK
    )
    assert [name for name, _, answer in recorder.calls if answer] == ["scan", "scan"]


def test_table_rows_have_the_same_numbers_in_c_and_python() -> None:
    header = (ROOT / "csrc" / "table.h").read_text()
    enums = [names.replace(" ", "").split(",") for names in re.findall(r"enum \{([^}]*)\}", header)]
    known = [names for names in enums if hasattr(table_rows, names[0])]
    assert [[getattr(table_rows, name) for name in names] for names in known] == [[*range(6)], [*range(4)], [*range(5)]]


def test_the_extension_exports_only_its_entry_point() -> None:
    """Check that ``release`` is not exported: a library loaded earlier that exports it would receive our calls."""
    command = ["nm", "-D", "--defined-only", str(import_module("mmpos._native").__file__)]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [line.split()[-1] for line in symbols.splitlines()] == ["PyInit__native"]


# With and without the extension, unusual inputs are read as numpy and Python read them.


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint64, np.bool_, ">i4"])
def test_masks_of_any_integer_dtype_mark_padding(way: str, dtype: Any) -> None:
    for left, ones, right in product(range(3), range(1, 4), range(3)):
        mask = np.array([[0] * left + [1] * ones + [0] * right], dtype)
        segments = SegmentTable.from_input_ids(
            np.zeros_like(mask, np.int64), Placeholders(image=7), attention_mask=mask
        )
        assert segments.extents[2].tolist() == [count for count in (left, ones, right) if count]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_float_mask_is_refused_whatever_its_bits(way: str, dtype: Any) -> None:
    mask = np.ones((1, 2), f"i{np.dtype(dtype).itemsize}").view(dtype)
    with pytest.raises(InvalidInputError, match="attention_mask: got float"):
        SegmentTable.from_input_ids([[5, 5]], Placeholders(image=7), attention_mask=mask)


def test_a_table_can_have_more_than_255_axes(way: str) -> None:
    table = np.zeros((AXES + 4 * 300, 1), np.int64)
    table[[HEIGHT, DENOMINATOR]], table[WIDTH], table[AXES::4, 0] = 1, 2, np.arange(1, 301)
    positions = PositionTable(table, np.zeros((4, 1), np.int64), 2, False, "many")
    assert positions.dense().tolist() == [[i, i] for i in range(1, 301)]
    assert positions.dense(axes=(299, 3)).tolist() == [[300, 300], [4, 4]]


def test_a_list_with_its_own_iterator_is_read_through_it(way: str) -> None:
    class Reversed(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            return reversed(self[:])

    document = Reversed([Text(2), Grid(3, 4)])
    assert SegmentTable.from_documents([document]).extents.T.tolist() == [[1, 3, 4], [1, 1, 2]]
    assert SegmentTable.from_documents(Reversed([[Text(2)], [Text(5)]])).extents[2].tolist() == [5, 2]


# The extension under sanitizers, with strict compilers, for Python without the GIL, and when it is missing.


def run_tests(native: str, *files: str, **environment: str) -> str:
    """Run tests in a separate process with another extension or without one."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "native_choice", "-p", "no:xdist", "-p", "no:cacheprovider"]
    path = os.pathsep.join([str(ROOT / "tests" / "helpers"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "NATIVE": native, **environment}
    done = subprocess.run([*command, *files], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def library(name: str) -> str:
    """Return the path of a library that comes with the compiler."""
    done = subprocess.run([*COMPILER, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = done.stdout.strip()
    assert os.path.isabs(path), f"{name} is not there; it comes with gcc"
    return path


@pytest.mark.slow
def test_the_sanitizers_find_no_errors(tmp_path: Path) -> None:
    built = tmp_path / "_native.so"
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    subprocess.run([*COMPILER, "-shared", "-fPIC", "-O1", "-g", *sanitize, *FLAGS, "-o", built, *SOURCES], check=True)
    output = run_tests(
        str(built),
        *sorted(map(str, (ROOT / "tests").rglob("test_native*.py"))),
        LD_PRELOAD=library("libasan.so"),
        ASAN_OPTIONS="detect_leaks=0",  # the interpreter itself leaks at exit
        PYTHONMALLOC="malloc",  # lets the sanitizer see where every object ends
    )
    assert " passed" in output


@pytest.mark.slow
def test_the_sanitizer_finds_a_write_past_the_end(tmp_path: Path) -> None:
    """Run, under the sanitizer, a program that writes like the extension, but past the end."""
    source, built = tmp_path / "past.c", tmp_path / "past"
    source.write_text(
        '#include "native.h"\n#include <stdlib.h>\n'
        "int main(int n, char **v) { Vector x = {malloc(16), 2, 8}; (void)v; put(&x, n + 1, 1); return 0; }\n"
    )
    flags = [f"-I{ROOT / 'csrc'}", f"-I{sysconfig.get_path('include')}", "-fsanitize=address"]
    subprocess.run([*COMPILER, "-O1", *flags, "-o", built, source], check=True)
    done = subprocess.run([str(built)], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr


@pytest.mark.slow
def test_strict_compilers_report_no_warnings(tmp_path: Path) -> None:
    for flags in (["-O0", "-U__SSE2__"], ["-O3"]):  # the first set of flags imitates processors without SSE2
        strict = ["-c", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-std=c11", *flags]
        for source in SOURCES:
            subprocess.run([*COMPILER, *strict, *FLAGS, "-o", tmp_path / "x.o", source], check=True)


@pytest.mark.skipif(sys.version_info < (3, 13), reason="the headers do not support Python without the GIL")
@pytest.mark.slow
def test_the_sources_compile_for_python_without_the_gil() -> None:
    subprocess.run([*COMPILER, "-fsyntax-only", "-Werror", "-DPy_GIL_DISABLED=1", *FLAGS, *SOURCES], check=True)


@pytest.mark.parametrize(("disabled", "tag"), [(0, "cp311-abi3"), (1, f"{CPYTHON}-{CPYTHON}")])
@pytest.mark.slow
def test_the_wheel_has_the_stable_abi_if_python_has_the_gil(disabled: int, tag: str) -> None:
    """Test both builds: Python without the GIL has no stable ABI, so setuptools refuses the option there."""
    program = (
        "import sysconfig\n"
        f"sysconfig.get_config_vars()['Py_GIL_DISABLED'] = {disabled}\n"
        "from setuptools import distutils\n"
        "command = distutils.core.run_setup('setup.py', stop_after='config').get_command_obj('bdist_wheel')\n"
        "command.ensure_finalized()\n"
        "print(*command.get_tag(), sep='-')\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.startswith(tag)


@pytest.mark.slow
def test_the_library_passes_its_tests_without_the_extension() -> None:
    rooms = ("positions", "segments", "placeholders", "golden", "schemes", "custom_schemes", "errors")
    more = ("table_checks", "sequence", "rotary_apply", "differences")
    counting = ["-k", "not few_functions and not few_hops"]  # these tests count calls, and numpy needs more calls
    output = run_tests(
        "", *counting, *(str(next((ROOT / "tests").rglob(f"test_{name}.py"))) for name in (*rooms, *more))
    )
    assert " passed" in output
