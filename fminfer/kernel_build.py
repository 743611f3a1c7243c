"""Builds and calls the CPU's attention kernel, kernels/attention.cpp.

Building takes a second or two of g++ once on a machine and needs no torch, so it can run while the
process imports and loads; the library is kept in the user's cache folder, under a name made of its
source, the compiler and the processor. It knows nothing of layers, models or steps.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).parent / "kernels" / "attention.cpp"
FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp"]
BUILD_S = 120.0  # a compiler that takes longer hangs


class KernelBuild:
    """The kernel's library: found in the cache, or being built.

    Starting one returns at once.
    """

    def __init__(self) -> None:
        self._library: ctypes.CDLL | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._own_folder: tempfile.TemporaryDirectory[str] | None = None
        self.error = ""  # why there is no library
        compiler = find_compiler()
        if compiler is None:
            self.error = "there is no C++ compiler; install g++, or set CXX to one"
            return
        folder = _cache_folder()
        if folder is None:
            self._own_folder = tempfile.TemporaryDirectory(prefix="fminfer-")
            folder = Path(self._own_folder.name)
        self._path = folder / f"attention-{_build_key(compiler)}.so"
        if not self._path.exists():
            self._start(compiler)

    def _start(self, compiler: str) -> None:
        descriptor, name = tempfile.mkstemp(dir=self._path.parent, suffix=".so.part")
        os.close(descriptor)
        self._part = Path(name)
        command = [compiler, *FLAGS, "-shared", "-fPIC", "-o", name, str(SOURCE)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        except OSError as error:
            self._part.unlink(missing_ok=True)
            self.error = f"{compiler} cannot be started: {error}"
            return
        atexit.register(self._abandon)

    def library(self) -> ctypes.CDLL | None:
        """Return the library, once the build is done; None: `error` says why there is none."""
        if self._process is not None:
            self._finish(self._process)
            self._process = None
        if self._library is None and not self.error:
            try:
                self._library = ctypes.CDLL(str(self._path))
            except OSError as error:
                self._path.unlink(missing_ok=True)  # the next run builds it anew
                self.error = f"{self._path} cannot be loaded: {error}"
        return self._library

    def _abandon(self) -> None:
        """End a build that nobody waited for: the process ends."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._part.unlink(missing_ok=True)

    def _finish(self, process: subprocess.Popen[bytes]) -> None:
        try:
            said, _ = process.communicate(timeout=BUILD_S)
            if process.returncode == 0:
                os.replace(self._part, self._path)  # whole or not at all, whoever else builds it
                return
            self.error = f"the compiler failed: {said.decode(errors='replace').strip()[-300:]}"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            self.error = f"the compiler did not end within {BUILD_S:.0f} s"
        except OSError as error:
            self.error = f"the kernel cannot be kept: {error}"
        self._part.unlink(missing_ok=True)


_build: KernelBuild | None = None


def start_build() -> KernelBuild:
    """Return this process's build, started if it is not."""
    global _build
    if _build is None:
        _build = KernelBuild()
    return _build


def find_compiler() -> str | None:
    """Return the path of $CXX or g++."""
    return shutil.which(os.environ.get("CXX") or "g++")


def _cache_folder() -> Path | None:
    """Return a folder of this user alone that lasts, if there can be one."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fminfer"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
            return folder
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        pass
    return None


def _build_key(compiler: str) -> str:
    """Name a build: another processor of a cluster may share the folder."""
    parts = [SOURCE.read_text(), " ".join(FLAGS), compiler, platform.machine(), _processor()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
