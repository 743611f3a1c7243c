"""The threads of the kernels: each piece is computed once, and sanitizers see nothing wrong."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from fminfer.kernel_build import SOURCES, find_compiler
from fminfer.processor import compiler_flags

STRESS = Path(__file__).parent / "kernels" / "stress.cpp"


@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_regions_and_products_under_a_sanitizer(sanitizer: str, tmp_path: Path) -> None:
    compiler = find_compiler()
    assert compiler is not None
    program = tmp_path / "stress"
    command = [
        *compiler,
        "-std=gnu++17",
        "-O1",
        "-g",
        *compiler_flags(),
        f"-I{SOURCES}",
        "-pthread",
    ]
    command += [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-o", str(program)]
    command += map(
        str,
        [STRESS, *(SOURCES / f"{name}.cpp" for name in ("pool", "products", "experts", "head"))],
    )
    built = subprocess.run(command, capture_output=True, text=True)
    if "cannot find" in built.stderr:
        pytest.skip(f"this compiler has no library for -fsanitize={sanitizer}")
    assert built.returncode == 0, built.stderr[-2000:]
    environ = os.environ | {"TSAN_OPTIONS": "halt_on_error=1:die_after_fork=0"}
    ran = subprocess.run([program], capture_output=True, text=True, env=environ, timeout=120)
    if "unexpected memory mapping" in ran.stderr:
        pytest.skip("this kernel places memory where the sanitizer cannot have it")
    assert ran.returncode == 0, ran.stderr[-2000:]
