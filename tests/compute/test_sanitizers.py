"""Sanitizers see nothing wrong in the kernels, over random shapes, for several processors."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fminfer.compute.formats.gguf_rows import GGUF_FORMATS
from fminfer.compute.formats.own_rows import INT8
from fminfer.compute.kernels.kernel_build import SOURCES, find_compiler
from fminfer.core.errors import UsageError
from fminfer.machine import processor
from tests.conftest import IS_ALL, more
from tests.random_blocks import FORMS, NEAR, first_scale_bytes, halves_of

STRESS = Path(__file__).parent.parent / "kernels"  # stress.cpp says what it runs
# in files of STRESS, which try what is theirs alone
INCLUDED = ("pool.cpp", "whole_layers.cpp")
KERNELS = [path for path in sorted(SOURCES.glob("*.cpp")) if path.name not in INCLUDED]
FLAGS = ["-std=gnu++17", "-g1", "-Wno-psabi", "-pthread", f"-I{SOURCES}"]
OWN = "own"  # what the run of the tests may use of the processor
LEAST = "x86-64"  # vectors of four numbers, as on ARM
# With each how much the compiler optimizes the kernels: what takes least to build and run.
SANITIZERS = {"address,undefined": "-O0", "thread": "-O1" if IS_ALL else "-O0"}
FIRST = {"address,undefined": (OWN, "avx2"), "thread": (LEAST,)}  # without --all
# a fourth of the random shapes
OF_CALLERS = ["-O1"] if IS_ALL else ["-O0", "-DSHARE=4"]


def _flags_of(level: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the compiler's flags for a processor; the test is skipped where that
    cannot be had."""
    if level == LEAST:
        return [f"-march={LEAST}"] if platform.machine() == "x86_64" else []
    if level != OWN:
        if os.environ.get(processor.VARIABLE):
            pytest.skip(f"{processor.VARIABLE} asks for one processor")
        if level == "avx2" and not (IS_ALL or processor.has_unit("avx512f")):
            pytest.skip("this processor's own vectors are these; scripts/test --all")
        monkeypatch.setenv(processor.VARIABLE, level)
    try:
        return list(processor.choose_compiler_flags())
    except UsageError as error:
        pytest.skip(str(error))


def _compile(flags: list[str], sanitizer: str, folder: Path) -> None:
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    sanitize = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    command = [*compiler, *FLAGS, *sanitize, *flags]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if "cannot find" in built.stderr:
        pytest.skip(f"this compiler has no library for -fsanitize={sanitizer}")
    assert built.returncode == 0, built.stderr[-2000:]


def _kinds() -> Iterator[str]:
    """Describe each kind of weights in blocks, as stress_weights.h takes them."""
    kinds = {form.kind: form for form in FORMS.values() if form.kind is not None}
    fixed = {form.kind for form in GGUF_FORMATS if form.kind != INT8.kind}
    for number, form in sorted(kinds.items()):
        torch.manual_seed(number)
        halves = halves_of(form)
        block = form.block or NEAR
        blocks = torch.randint(256, (1000, form.row_bytes(block)), dtype=torch.uint8)
        for place in halves:
            blocks[:, place : place + 2] = torch.ones(1).half().view(torch.uint8)
        first = first_scale_bytes(form)
        if first == 1:
            blocks[:, 0] = 127
        elif first:
            blocks[:, :first] = torch.ones(1).view(torch.uint8)
        numbers = form.unpack(blocks)
        scale = 1 / float(numbers[numbers.isfinite()].abs().max())
        size = form.block_bytes
        bits = 0
        # one that is not GGUF's, whose block may be of any size
        if number not in fixed:
            size = 2 * len(halves) + first
            bits = (form.row_bytes(block) - size) * 8 // block
            block = 0
        places = ", ".join(map(str, halves))
        fields = f"{number}, {block}, {size}, {bits}, {{{places}}}, {scale}f, {first}"
        yield f"{{{fields}}},  // {form.name}"


@pytest.fixture(scope="module")
def callers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Path]]:
    """Return what calls the kernels, compiled once for each sanitizer: it is of no processor."""
    folders: dict[str, Path] = {}

    def compile_once(sanitizer: str) -> list[Path]:
        if sanitizer not in folders:
            folder = tmp_path_factory.mktemp("callers")
            (folder / "kinds.h").write_text("\n".join(_kinds()))
            files = "".join(
                f'#include "{path}"\n' for path in sorted(STRESS.glob("*.cpp"))
            )
            # in one, whose headers are read once
            (folder / "all.cpp").write_text(files)
            _compile([*OF_CALLERS, "-c", "-I.", "all.cpp"], sanitizer, folder)
            folders[sanitizer] = folder
        return [folders[sanitizer] / "all.o"]

    return compile_once


# Threads share out the work in the same way whatever the vectors' width: theirs are the least.
@pytest.mark.parametrize(
    ("sanitizer", "level"),
    [
        pytest.param(sanitizer, level, marks=[] if level in FIRST[sanitizer] else more)
        for sanitizer in SANITIZERS
        for level in (OWN, "avx2", "avx512", LEAST)
    ],
)
def test_kernels_under_a_sanitizer(
    sanitizer: str,
    level: str,
    callers: Callable[[str], list[Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every kernel reads and writes what is its own, and nan behind the end reaches no result.

    Results are near those summed in float64, and the same with one thread and with three. Where
    there is no memory the caller is told.
    """
    flags = [SANITIZERS[sanitizer], *_flags_of(level, monkeypatch)]
    files = map(str, [*callers(sanitizer), *KERNELS])
    _compile([*flags, "-o", "stress", *files], sanitizer, tmp_path)
    environ = os.environ | {"TSAN_OPTIONS": "halt_on_error=1:die_after_fork=0"}
    program = tmp_path / "stress"
    ran = subprocess.run(
        [program], capture_output=True, text=True, env=environ, timeout=120
    )
    if "unexpected memory mapping" in ran.stderr:
        pytest.skip("this kernel places memory where the sanitizer cannot have it")
    assert ran.returncode == 0, ran.stderr[-2000:]
