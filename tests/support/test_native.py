"""The extension returns the same numbers as numpy or declines, Python raises the errors, and every build works."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from copy import copy
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import CASES, Case, Document, batches
from twins import CORE, Recorder, both, replaced_by

import mmpos
from mmpos import Grid, InvalidInputError, Placeholders, PositionTable, SegmentTable, SequenceBuilder, Text, place
from mmpos.positions import table_rows
from mmpos.positions.plan import forget_plans
from mmpos.positions.table_rows import AXES, DENOMINATOR, HEIGHT, WIDTH
from mmpos.segments import Audio, CropMarkers, table
from mmpos.support import native

GUARD = 0x5A
ROOT = Path(__file__).parents[2]
SOURCES = sorted(map(str, (ROOT / "csrc").glob("*.c")))
COMPILER = shlex.split(os.environ.get("CC", "cc"))
FLAGS = ["-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", f"-I{sysconfig.get_path('include')}"]

# Calls that reach every entry of the extension, except those for rotations and messages, which have their own tests.

DOCUMENTS: list[list[Any]] = [[Text(3), Grid(2, 3), Text(2)], [Text(1), Grid(1, 2, row_separator=True), Audio(2)]]
SEGMENTS = SegmentTable.from_documents(DOCUMENTS)
BUILDER = SequenceBuilder()
TORCH = find_spec("torch") is not None  # test_dist runs these tests without it


def scanned(ids: list[int], kinds: Placeholders, image: list[int], video: Any = None) -> list[SegmentTable]:
    """Read token ids as a padded batch, and as a packed document."""
    padded = SegmentTable.from_input_ids([[*ids, 0]], kinds, [image], video, attention_mask=[[1] * 5 + [0]])
    return [padded, SegmentTable.from_input_ids(ids, kinds, [image], video, cu_seqlens=[0, 5])]


def cut(positions: PositionTable) -> list[PositionTable]:
    """Call every operation of a table."""
    joined = {1: positions.window([0], [0], [4])}
    tables = [positions.take([1, 4], [3, 9]), positions.window([0, 1], [2, 0], [2, 8]), positions.decode([1, 2])]
    tables.append(positions.pad([12, 8]).shard(1, 2))
    return [*tables, positions.updated(remove=[0], replace=joined, add=[positions])]


def collated() -> list[object]:
    from mmpos.data import Example, PackedCollator, PaddedCollator

    sequences = [BUILDER.build([[7] * 3, Grid(2, 2), "a", Grid(1, 2)]), BUILDER.build(["abc"])]
    examples = [Example("r", sequence, sequence.input_ids) for sequence in sequences]
    return [collate(examples) for collate in (PackedCollator(4, 24), PaddedCollator("left"))]


def placed(scheme: str) -> list[object]:
    forget_plans()
    positions = place(SegmentTable.from_documents(DOCUMENTS), scheme)
    return [positions, place(SEGMENTS, scheme), positions.dense(), positions.dense(axes=(1, 0)), *positions.rationals()]


CALLS: list[tuple[str, Callable[[], object]]] = [
    ("documents", lambda: SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)], [Text(1), Audio(2)]])),
    (
        "sound",
        lambda: SegmentTable(SEGMENTS.kind, SEGMENTS.extents, SEGMENTS.segment_offsets, None, SEGMENTS.row_separator),
    ),
    ("spans", lambda: SegmentTable.from_spans([9, 6], [1, 2], [[1, 2, 3], [1, 1, 2]], [0, 1])),
    ("scan", lambda: scanned([0, 8, 8, 9, 9], Placeholders(8, 9), [1, 1, 2], [[1, 1, 2]])),
    ("scan", lambda: scanned([8, 11, 8, 12, 10], Placeholders(8, rows=(11, 12)), [1, 2, 1])),
    ("scan", lambda: scanned([0, 3, 8, 8, 4], Placeholders(8, crops=CropMarkers(3, 4, 5, 6, 7)), [1, 1, 2])),
    *((entry, lambda: placed("rope-tie")) for entry in ("enter", "place", "expand")),
    ("placed", lambda: placed("xd-rope")),
    ("place", lambda: placed("rope-tie-v2")),
    ("mask", lambda: place(SEGMENTS).padded(12)),
    *((entry, lambda: cut(place(SEGMENTS))) for entry in ("cut", "concatenate")),
    ("numbers", lambda: BUILDER.build([[7] * 3, Grid(2, 2), "a"]).input_ids),
]
if TORCH:
    CALLS.append(("collate", collated))


@pytest.mark.parametrize(("entry", "call"), CALLS, ids=[f"{entry}-{n}" for n, (entry, _) in enumerate(CALLS)])
def test_an_entry_answers_with_the_result_of_python(entry: str, call: Callable[[], object]) -> None:
    both(call)
    with replaced_by(Recorder()) as recorder:
        call()
    assert entry in recorder.named(answered=True)


def cases() -> st.SearchStrategy[tuple[Case, list[Document]]]:
    return st.sampled_from(CASES).flatmap(lambda case: st.tuples(st.just(case), batches(case)))


@given(cases(), st.data())
def test_dense_ids_are_equal_for_any_form_of_out(case: tuple[Case, list[Document]], data: st.DataObject) -> None:
    positions = place(SegmentTable.from_documents(case[1]), case[0].scheme)
    bounds = sorted(data.draw(st.tuples(*[st.integers(0, positions.num_tokens)] * 2)))
    positions = data.draw(st.sampled_from([positions, positions.slice(*bounds), positions.pad()]))
    axes = data.draw(st.none() | st.lists(st.integers(0, positions.axes - 1), min_size=1, max_size=4).map(tuple))
    rows, tokens = positions.axes if axes is None else len(axes), positions.num_tokens
    dtype = np.dtype(data.draw(st.sampled_from(["i4", "i8", "f8"] * 3 + [">i4", "u4", "i2", "c16"])))
    shape = data.draw(
        st.sampled_from([(rows, tokens)] * 6 + [(rows, tokens + 1), (rows + 1, tokens), (rows * tokens,)])
    )
    shift, gap, turn = data.draw(st.tuples(st.integers(0, 15), st.integers(0, 9), st.sampled_from([1, 1, -1])))
    step = data.draw(st.sampled_from([1, 1, 1, 2])) * dtype.itemsize

    def dense() -> Any:
        memory = np.full(32 + (rows + 1) * ((tokens + 1) * 2 * dtype.itemsize + gap), GUARD, np.uint8)
        out = np.ndarray(shape, dtype, memory, shift, ((tokens + 1) * step + gap, step)[-len(shape) :])
        out = out[..., ::turn]
        try:
            assert positions.dense(out=out, axes=axes) is out
        except InvalidInputError:
            assert (memory == GUARD).all()
            raise
        written = out.copy()
        np.testing.assert_array_equal(written, positions.dense(axes=axes))
        out[...] = np.ndarray(1, dtype, np.full(dtype.itemsize, GUARD, np.uint8))
        assert (memory == GUARD).all()  # the bytes between and around the rows
        return written

    both(dense)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 400), st.integers(1, 400), st.data())
def test_any_part_of_a_grid_matches_numpy(height: int, width: int, skip: int, tokens: int, data: st.DataObject) -> None:
    steps = st.integers(-9, 9)
    numbers = [data.draw(st.tuples(st.integers(-50, 50), steps, steps, steps)) for _ in range(2)]
    denominator = data.draw(st.integers(1, 5))
    column = [0, skip, height, width, denominator, *numbers[0], *numbers[1]]
    positions = PositionTable(
        np.array(column, np.int64)[:, None], np.zeros((4, 1), np.int64), tokens, denominator > 1, "any"
    )
    both(lambda: [positions.dense(), positions.dense(dtype=np.float64), positions.rationals()])


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


def test_corrupted_arguments_cause_no_access_outside_the_arrays() -> None:
    random = Random(0)
    with replaced_by(Recorder()) as recorder:
        for _, call in CALLS:
            call()
    answers = dict.fromkeys(recorder.named(answered=True), 0)
    others = {"rotate", "served", "integers", "segments", "joined", *["collate"] * (not TORCH)}
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


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_only_grids_with_times_are_left_to_python(case: Case) -> None:
    timed = case.name in ("mrope-qwen2.5", "tmrope", "tmrope-qwen3") or "tokens_per_second" in case.label
    grid = Grid(2 * case.side, 3 * case.side, frames=2 if case.frames else 1, seconds_per_frame=1 if timed else None)
    document: Document = [Text(3), grid, Text(2)] if case.text else [grid]
    forget_plans()
    with replaced_by(Recorder()) as recorder:
        positions = place(SegmentTable.from_documents([document]), case.scheme)
        positions.dense()
        positions.rationals()
    assert {*recorder.named(answered=False)} - {"place"} == ({"documents"} if timed else set())
    assert timed or {"place", "placed"} & {*recorder.named(answered=True)}


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


def test_info_reports_whether_the_extension_is_built() -> None:
    assert mmpos.info()["extension"] == "built"
    with replaced_by(None):
        assert mmpos.info()["extension"] == "not built, numpy is used"


# With and without the extension, unusual inputs are read as numpy and Python read them.


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


def run_tests(native: str, *files: str, **environment: str) -> None:
    """Run tests in a separate process with another extension or without one."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "native_choice", "-p", "no:xdist", "-p", "no:cacheprovider"]
    path = os.pathsep.join([str(ROOT / "tests" / "helpers"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "NATIVE": native, **environment}
    done = subprocess.run([*command, *files], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout


@pytest.mark.slow
def test_the_sanitizers_find_no_errors(tmp_path: Path) -> None:
    built = tmp_path / "_native.so"
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    subprocess.run([*COMPILER, "-shared", "-fPIC", "-O1", "-g", *sanitize, *FLAGS, "-o", built, *SOURCES], check=True)
    libasan = subprocess.run([*COMPILER, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    assert os.path.isabs(libasan.stdout), "libasan is not there; it comes with gcc"
    run_tests(
        str(built),
        *sorted(map(str, (ROOT / "tests").rglob("test_native*.py"))),
        LD_PRELOAD=libasan.stdout.strip(),
        ASAN_OPTIONS="detect_leaks=0",  # the interpreter itself leaks at exit
        PYTHONMALLOC="malloc",  # lets the sanitizer see where every object ends
    )


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


WITHOUT_GIL = pytest.mark.skipif(sys.version_info < (3, 13), reason="the headers do not support Python without the GIL")


@pytest.mark.parametrize(
    "flags",
    [
        ["-O0", "-U__SSE2__"],  # imitates processors without SSE2
        ["-O3"],
        pytest.param(["-DPy_GIL_DISABLED=1"], marks=WITHOUT_GIL),
    ],
    ids=lambda flags: flags[-1],
)
@pytest.mark.slow
def test_strict_compilers_report_no_warnings(flags: list[str], tmp_path: Path) -> None:
    strict = ["-c", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-std=c11", *flags]
    for source in SOURCES:
        subprocess.run([*COMPILER, *strict, *FLAGS, "-o", tmp_path / "x.o", source], check=True)


@pytest.mark.slow
def test_the_wheel_has_the_stable_abi_only_if_python_has_the_gil() -> None:
    """Test the build for Python without the GIL, which has no stable ABI, so that setuptools refuses the option."""
    program = (
        "import sysconfig\n"
        "sysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1\n"
        "from setuptools import distutils\n"
        "command = distutils.core.run_setup('setup.py', stop_after='config').get_command_obj('bdist_wheel')\n"
        "command.ensure_finalized()\n"
        "print(*command.get_tag(), sep='-')\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert done.stdout.startswith(f"{python}-{python}")


@pytest.mark.slow
def test_the_library_passes_its_tests_without_the_extension() -> None:
    names = ("segments", "placeholders", "positions", "golden", "errors", "table_checks")
    run_tests("", *(str(path) for name in names for path in (ROOT / "tests").rglob(f"test_{name}.py")))
