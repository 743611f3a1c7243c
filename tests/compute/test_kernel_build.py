"""How the CPU's kernel is built, kept and found again; and what goes wrong with that."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
import tempfile
import time
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fminfer
from fminfer.compute.kernels import kernel_build
from fminfer.compute.kernels.kernel_build import KernelBuild, find_compiler
from fminfer.core.config import EngineConfig
from fminfer.core.errors import UsageError
from fminfer.forward.registry import find_library
from fminfer.machine import processor
from fminfer.models.checkpoint import open_model
from fminfer.plan.planning import plan_ahead
from fminfer.runtime.load.one_pipeline import OnePipeline
from fminfer.runtime.process_roles import start_engine

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give an empty cache, and a source that is compiled at once; others build the real ones."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "one.cpp").write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(kernel_build, "SOURCES", sources)
    monkeypatch.setattr(kernel_build, "SHIPPED", sources / "built")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "fminfer"


def answers(build: KernelBuild) -> bool:
    library = build.wait_for_library()
    return library is not None and library.answer() == 42


@pytest.mark.parametrize(
    ("compiler", "message"),
    [("no-such-compiler", "is no C"), ("false", "failed"), ("'", "is no C")],
)
def test_without_a_compiler_auto_is_plain_torch_and_require_an_error(
    compiler: str, message: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    assert find_library("auto", CPU, KernelBuild()) is None
    with pytest.raises(UsageError, match=message):
        find_library("require", CPU, KernelBuild())
    assert not cache.exists() or not list(cache.iterdir()), "nothing is left behind"


def test_other_devices_have_no_library() -> None:
    assert find_library("off", CPU) is None
    for body in ("auto", "require"):
        assert find_library(body, torch.device("cuda")) is None


@needs_compiler
def test_it_is_built_once_and_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = KernelBuild()
    beside = KernelBuild()  # two processes may build it at once
    assert first._process is not None and beside._process is not None
    assert answers(first) and answers(beside)
    again = KernelBuild()
    assert again._process is None and answers(again)
    assert all(path.suffix == ".so" for path in cache.iterdir()), "nothing else is left"
    monkeypatch.setenv("CXX", "g++ -DANOTHER")
    assert KernelBuild()._process is not None, "another compiler's is another"


@pytest.fixture
def shipped(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a library that came with the package, for a pretended processor with AVX-512."""
    monkeypatch.delenv("FMINFER_CPU", raising=False)
    units = " ".join(processor.LEVELS["avx512"].units)
    monkeypatch.setattr(processor, "_read_cpuinfo", lambda: f"flags : {units}")
    source = cache.parent / "shipped.cpp"
    source.write_text('extern "C" int answer() { return 42; }\n')
    compiler = find_compiler()
    assert compiler is not None
    library = cache.parent / "library.so"
    command = [*compiler, "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True)

    kernel_build.SHIPPED.mkdir()
    for level in ("avx2", "avx512_bf16"):  # to load one of them is a mistake
        name = kernel_build.make_library_name(level, b"")
        (kernel_build.SHIPPED / name).write_bytes(b"")
    name = kernel_build.make_library_name("avx512", library.read_bytes())
    return library.rename(kernel_build.SHIPPED / name)


@needs_compiler
def test_a_library_that_came_along_needs_no_compiler(
    shipped: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(kernel_build, "_build", None)
    assert kernel_build.may_have_library()
    build = kernel_build.start_build()
    assert build._process is None and answers(build)
    assert build.origin == "the library avx512 that came with fminfer"
    assert not build.shipped_fault and not kernel_build.describe_shipped_fault()
    assert not cache.exists(), "nothing is kept"

    monkeypatch.setattr(processor, "_read_cpuinfo", lambda: "flags : fpu sse2")
    monkeypatch.setattr(kernel_build, "_build", None)
    assert not kernel_build.may_have_library(), "it is for another processor"
    assert "no C++ compiler" in kernel_build.start_build().error


@needs_compiler
@pytest.mark.parametrize("has_compiler", [True, False])
@pytest.mark.parametrize("is_cut", [True, False])
def test_a_library_that_cannot_be_loaded_falls_back(
    is_cut: bool,
    has_compiler: bool,
    shipped: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """To a build, or to plain torch; to load a cut file would end the process by SIGBUS."""
    whole = shipped.read_bytes()
    if is_cut:
        shipped.write_bytes(whole[: len(whole) // 2])
    else:  # of another system, and whole
        shipped.unlink()
        other = b"no library"
        name = kernel_build.make_library_name("avx512", other)
        (kernel_build.SHIPPED / name).write_bytes(other)
    # what the pretended processor has, this one may not have
    monkeypatch.setattr(processor, "choose_compiler_flags", lambda: ())
    if not has_compiler:
        monkeypatch.setenv("CXX", "no-such-compiler")

    build = KernelBuild()
    monkeypatch.setattr(kernel_build, "_build", build)
    assert answers(build) == has_compiler
    reason = "is damaged" if is_cut else "cannot be loaded"
    assert reason in build.shipped_fault
    if has_compiler:
        assert build.origin.startswith("built here by /")
    else:
        assert reason in build.error and "no C++ compiler" in build.error

    config = EngineConfig(model="demo")
    run: Any = SimpleNamespace(config=config, is_quiet=False)
    with pytest.raises(NotImplementedError):
        start_engine(run, plan_ahead(config, open_model(config)), compute_none)
    says = " ".join(capfd.readouterr().err.split())
    assert says.count("that came with fminfer are not used") == has_compiler, (
        "without a compiler the reason stands in what makes the run slower"
    )


def test_a_process_that_hides_tiles_builds_anew(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine before it, with tiles, would have given it kernels that use them."""
    monkeypatch.setenv("CXX", str(tmp_path / "cxx"))
    monkeypatch.setenv("FMINFER_CPU", "native")
    done = 'for o; do [ "$p" = -o ] && echo x > "$o"; p=$o; done; echo "$@" > "$0.said"'
    write_compiler(tmp_path / "cxx", done)
    monkeypatch.setattr(kernel_build, "_build", None)
    units = " ".join(processor.LEVELS["avx512_bf16"].units)
    cpuinfo = f"flags : {units} amx_bf16"
    monkeypatch.setattr(processor, "_read_cpuinfo", lambda: cpuinfo)

    first = kernel_build.start_build()
    assert kernel_build.start_build() is first
    first.wait_for_library()
    assert "-march=native" in (tmp_path / "cxx.said").read_text()

    processor.hide_tiles()
    second = kernel_build.start_build()
    assert second is not first and kernel_build.start_build() is second
    second.wait_for_library()
    said = (tmp_path / "cxx.said").read_text()
    assert "-mavx512bf16" in said and "native" not in said


def compute_none(*_: object) -> OnePipeline:
    raise NotImplementedError


def test_who_waits_for_a_build_is_told(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The first run was silent for a quarter of a minute."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    monkeypatch.setenv("CXX", str(tmp_path / "cxx"))
    write_compiler(tmp_path / "cxx", f"read line < {gate}; exit 1")
    monkeypatch.setattr(kernel_build, "_build", KernelBuild())

    config = EngineConfig(model="demo")
    plan = plan_ahead(config, open_model(config))

    def start(*, is_quiet: bool = False) -> str:
        run: Any = SimpleNamespace(config=EngineConfig(model="demo"), is_quiet=is_quiet)
        with pytest.raises(NotImplementedError):
            start_engine(run, plan, compute_none)
        return capfd.readouterr().err

    assert (
        "Building kernels for this machine; this takes some seconds, once." in start()
    )
    assert "Building" not in start(is_quiet=True)
    gate.write_text("go\n")
    assert (
        kernel_build.start_build().wait_for_library() is None
        and "Building" not in start()
    )


def test_an_updated_compiler_builds_anew(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kept library's name held the compiler's path, which an update leaves as it was."""
    monkeypatch.setenv("CXX", str(tmp_path / "cxx"))
    names = set()
    for version in ("12.2.0", "12.2.0", "13.1.0"):
        done = 'for o; do [ "$p" = -o ] && echo x > "$o"; p=$o; done'
        write_compiler(tmp_path / "cxx", done, version)
        assert KernelBuild().wait_for_library() is None, "what it makes is no library"
        names |= {path.name for path in cache.iterdir()}
    assert len(names) == 2


@needs_compiler
def test_a_torn_library_is_built_anew(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To load one ended the process by SIGBUS, and every later one."""
    assert answers(KernelBuild())
    (library,) = cache.iterdir()
    whole = library.read_bytes()
    torn = whole[: len(whole) // 2]
    library.unlink()
    library.write_bytes(torn)
    build = KernelBuild()
    assert build._process is not None and answers(build)
    (library,) = cache.iterdir()
    assert library.stat().st_size > len(torn)


@needs_compiler
@pytest.mark.parametrize("mode", [None, 0o777])
def test_a_folder_that_cannot_be_used_costs_only_the_build(
    mode: int | None, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in its place, or a folder into which others could put their own."""
    if mode is None:
        cache.write_text("")
    else:
        cache.mkdir()
        cache.chmod(mode)
    build = KernelBuild()
    assert answers(build)
    assert build._own_folder is not None
    assert mode is None or not list(cache.iterdir())


def test_a_full_disk_costs_only_the_kernel(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ended with a traceback."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(122, "Disk quota exceeded")

    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr(tempfile, "mkstemp", fail)
    monkeypatch.setattr(tempfile, "TemporaryDirectory", fail)
    build = KernelBuild()
    assert build.wait_for_library() is None and "quota" in build.error


def write_compiler(path: Path, text: str, version: str = "1.0") -> None:
    told = f'if [ "$1" = --version ]; then echo "cxx {version}"; exit; fi'
    path.write_text(f"#!/bin/sh\n{told}\n{text}\n")
    path.chmod(0o700)


def test_a_compiler_that_hangs_is_ended_with_its_children(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_compiler(tmp_path / "cxx", f"sleep 300 & echo $! > {tmp_path}/child; wait")
    monkeypatch.setenv("CXX", str(tmp_path / "cxx"))
    monkeypatch.setattr(kernel_build, "BUILD_S", 2.0)
    build = KernelBuild()
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
        time.sleep(0.05)
    assert build.wait_for_library() is None and "did not end within 2 s" in build.error
    child = int((tmp_path / "child").read_text())
    until = time.monotonic() + 20
    while is_alive(child) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_alive(child)
    assert not list(cache.iterdir())


def is_alive(pid: int) -> bool:
    try:
        return (
            "Z"
            not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        )
    except OSError:
        return False


def test_a_build_that_nobody_waits_for(cache: Path, tmp_path: Path) -> None:
    """What is done is kept; what is not is ended, and leaves nothing."""
    code = "from fminfer.compute.kernels.kernel_build import start_build\n"
    code += "import sys, time\nstart_build()\ntime.sleep(float(sys.argv[1]))"
    done = 'for o; do [ "$p" = -o ] && echo x > "$o"; p=$o; done'
    for seconds, script in ((2.0, done), (0.0, "sleep 300")):
        compiler = tmp_path / f"cxx{seconds}"
        write_compiler(compiler, script)
        environ = os.environ | {"CXX": str(compiler)}
        subprocess.run(
            [sys.executable, "-c", code, str(seconds)], env=environ, check=True
        )
        assert [path.suffix for path in cache.iterdir()] == [".so"]


def test_parts_of_killed_builds_are_removed(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir()
    old = cache / "a.so.part"
    new = cache / "b.so.part"
    for part in (old, new):
        part.write_text("")
    os.utime(old, (1, 1))
    monkeypatch.setenv("CXX", "false")
    KernelBuild().wait_for_library()
    assert list(cache.iterdir()) == [new]


def test_the_package_holds_all_of_the_sources() -> None:
    """An installed copy builds them from its own folder."""
    config = configparser.ConfigParser()
    config.read(Path(__file__).parent.parent.parent / "setup.cfg")
    patterns = config["options.package_data"]["fminfer"].split(", ")
    folder = Path(fminfer.__file__).parent
    sources = [
        path for path in kernel_build.SOURCES.iterdir() if path.suffix in (".cpp", ".h")
    ]
    assert len(sources) > 10
    for path in sources:
        name = path.relative_to(folder).as_posix()
        assert any(fnmatch(name, pattern) for pattern in patterns), name
