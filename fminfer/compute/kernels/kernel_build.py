"""Loads the CPU's kernels: a library that came with the package, or one that is built here.

A wheel has a library for each level of processors (`scripts/wheel`), whose name holds its
checksum. Without one that can be loaded kernels/*.cpp are built. This takes some seconds of g++
once on a machine and needs no torch, so it can run while the process imports and loads. The
library is kept in the user's cache folder, under a name made of its source, the compiler and its
version, the processor and its own checksum.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import IO

from fminfer.compute.kernels.library_calls import Library
from fminfer.machine import processor
from fminfer.machine.user_cache import make_cache_folder

SOURCES = Path(__file__).parent
SHIPPED = SOURCES / "built"  # a clone has none
FLAGS = [
    "-std=gnu++17",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-pthread",
    # Tuned for Zen, g++ would fuse products and sums in some loops and not in others.
    # A sum's last bits would then depend on how many rows a loop has.
    "--param",
    "avoid-fma-max-bits=0",
]
BUILD_S = 120.0  # a compiler that takes longer hangs
VERSION_S = 5.0  # so does one that does not tell its version by then


class KernelBuild:
    """The kernels' library: shipped, in the cache, or being built. Starting raises nothing."""

    def __init__(self) -> None:
        self._library: Library | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._own_folder: tempfile.TemporaryDirectory[str] | None = None
        self.error = ""  # why there is no library
        self.origin = ""  # where the library is from
        # why the library that came with the package is not used; "": it is, or none came
        self.shipped_fault = ""
        self.processor_flags = [*processor.choose_compiler_flags()]
        try:
            if not self._load_shipped_library():
                self._find_or_start_build()
        except OSError as error:
            self.error = f"the kernels cannot be built: {error}"

    def _load_shipped_library(self) -> bool:
        """Load the library that came for this processor; tell whether it is usable."""
        level = processor.choose_level_name()
        for path in SHIPPED.glob(f"kernels-{level}-*.so"):
            try:
                self._library = _load_whole_library(path, level)
            except OSError as error:
                self.shipped_fault = f"{path} cannot be loaded: {error}"
            else:
                self.origin = f"the library {level} that came with fminfer"
                return True
        return False

    def _find_or_start_build(self) -> None:
        compiler = find_compiler()
        if compiler is None:
            missing = "there is no C++ compiler; install g++, or set CXX to one"
            self.error = "; ".join(filter(None, (self.shipped_fault, missing)))
            return
        self.origin = f"built here by {compiler[0]}"
        folder = make_cache_folder()
        if folder is None:
            self._own_folder = tempfile.TemporaryDirectory(prefix="fminfer-")
            folder = Path(self._own_folder.name)
        self._folder = folder
        self._key = _make_build_key(compiler)
        self._path = _find_library(folder, self._key)
        if self._path is None:
            self._start_compiler(compiler)

    def _start_compiler(self, compiler: list[str]) -> None:
        _remove_old_parts(self._folder)
        descriptor, name = tempfile.mkstemp(dir=self._folder, suffix=".so.part")
        os.close(descriptor)
        self._partial_path = Path(name)
        # It is open until the build ends.
        # open until the build ends
        self._compiler_output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._started_s = time.monotonic()
        flags = [
            *FLAGS,
            *self.processor_flags,
            "-shared",
            "-fPIC",
            "-o",
            name,
        ]
        sources = map(str, sorted(SOURCES.glob("*.cpp")))
        try:
            self._process = _run_compiler(
                [*compiler, *flags, *sources], self._compiler_output
            )
        except OSError:
            self._partial_path.unlink(missing_ok=True)
            raise
        atexit.register(self.abandon)

    def wait_for_library(self) -> Library | None:
        """Return the library, once the build is done; None: `error` says why there is none."""
        if self._process is not None:
            self._finish_build(self._process)
        if self._library is None and not self.error:
            try:
                self._library = Library(str(self._path))
            except OSError as error:
                self.error = f"{self._path} cannot be loaded: {error}"
        return self._library

    def may_succeed(self) -> bool:
        """Tell whether there is a library or may still be one, without waiting."""
        if self._process is not None and not self.is_under_way():
            self._finish_build(self._process)
        return not self.error

    def is_under_way(self) -> bool:
        """Tell whether the compiler is still at work."""
        return self._process is not None and self._process.poll() is None

    def abandon(self) -> None:
        """End a build that nobody waited for; keep what it made, if it is done."""
        if self._process is not None:
            if self.is_under_way():
                _end_compiler(self._process)
            self._finish_build(self._process)

    def _finish_build(self, process: subprocess.Popen[bytes]) -> None:
        try:
            process.wait(timeout=max(0.0, self._started_s + BUILD_S - time.monotonic()))
            if process.returncode == 0:
                self._path = _store_library(self._partial_path, self._folder, self._key)
            else:
                self._compiler_output.seek(0)
                said = self._compiler_output.read().decode(errors="replace").strip()
                self.error = f"the compiler failed: {said[-300:]}"
        except subprocess.TimeoutExpired:
            _end_compiler(process)
            self.error = f"the compiler did not end within {BUILD_S:.0f} s"
        except OSError as error:
            self.error = f"the kernels cannot be kept: {error}"
        self._process = None
        self._compiler_output.close()
        self._partial_path.unlink(missing_ok=True)


def _run_compiler(command: list[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a compiler, in a session of its own: its children can then be ended with it."""
    no_input = subprocess.DEVNULL
    return subprocess.Popen(
        command, stdin=no_input, stdout=output, stderr=output, start_new_session=True
    )


def _end_compiler(process: subprocess.Popen[bytes]) -> None:
    """End the compiler with its children, which first remove their temporary files."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(timeout=1.0)


_build: KernelBuild | None = None


def start_build() -> KernelBuild:
    """Return this process's build, started if it is not; another one once tiles are hidden."""
    global _build
    flags = [*processor.choose_compiler_flags()]
    if _build is None or _build.processor_flags != flags:
        _build = KernelBuild()
    return _build


def may_have_library() -> bool:
    """Tell whether this process's build gives a library, as far as is known without waiting."""
    if _build is not None:
        return _build.may_succeed()
    level = processor.choose_level_name()
    has_shipped = any(SHIPPED.glob(f"kernels-{level}-*.so"))
    return has_shipped or find_compiler() is not None


def describe_shipped_fault() -> str:
    """Return why kernels are built here, though some came with the package; "": they are not."""
    if _build is None or not _build.may_succeed():
        return ""
    return _build.shipped_fault


def is_building() -> bool:
    """Tell whether this process's build is under way, so that who wants kernels waits for it."""
    return _build is not None and _build.is_under_way()


def abandon_build() -> None:
    """End this process's build if it is under way; for those who leave without Python's
    own end."""
    if _build is not None:
        _build.abandon()


def find_compiler() -> list[str] | None:
    """Return the command of $CXX or g++; None: there is none."""
    try:
        command = shlex.split(os.environ.get("CXX") or "g++")
    except ValueError:
        return None
    path = shutil.which(command[0]) if command else None
    return None if path is None else [path, *command[1:]]


def _load_whole_library(path: Path, level: str) -> Library:
    """Load a shipped library; raise an OSError for one that is cut, or not for this system."""
    if path.name != make_library_name(level, path.read_bytes()):
        raise OSError("it is damaged; install fminfer again")
    return Library(str(path))


def _find_library(folder: Path, key: str) -> Path | None:
    """Return the library if it is there and whole; a torn one would end the process."""
    for path in folder.glob(f"kernels-{key}-*.so"):
        if path.name == make_library_name(key, path.read_bytes()):
            return path
        path.unlink(missing_ok=True)
    return None


def _store_library(part: Path, folder: Path, key: str) -> Path:
    """Give a finished library its name, whole or not at all, whoever else builds it."""
    with part.open("rb") as file:
        path = folder / make_library_name(key, file.read())
        os.fsync(file.fileno())
    os.replace(part, path)
    return path


def make_library_name(key: str, library: bytes) -> str:
    """Return a library's file name: what it is for, and its checksum."""
    return f"kernels-{key}-{hashlib.sha256(library).hexdigest()[:16]}.so"


def _remove_old_parts(folder: Path) -> None:
    """Remove what builds left that were killed."""
    for part in folder.glob("*.so.part"):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > 2 * BUILD_S:
                part.unlink()


def _make_build_key(compiler: list[str]) -> str:
    """Name a build: another processor of a cluster may share the folder."""
    sources = [
        p.read_bytes() for p in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")])
    ]
    parts = [
        *FLAGS,
        *compiler,
        _read_compiler_version(compiler),
        platform.machine(),
        processor.describe_processor(),
    ]
    return hashlib.sha256(b"\0".join([*sources, *map(os.fsencode, parts)])).hexdigest()[
        :24
    ]


def _read_compiler_version(compiler: list[str]) -> str:
    """Return what the compiler says of its version; an update keeps its path."""
    with tempfile.TemporaryFile() as output:
        process = _run_compiler([*compiler, "--version"], output)
        try:
            process.wait(timeout=VERSION_S)
        except subprocess.TimeoutExpired:
            _end_compiler(process)
        output.seek(0)
        return output.read().decode(errors="replace")
