"""`scripts/demo`, in a copy of the clone whose .venv is made already."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.forked import programs

ROOT = Path(__file__).parents[2]
SUM = "cat setup.cfg pyproject.toml constraints.txt | cksum | cut -d' ' -f1"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    clone = tmp_path / "clone"
    (clone / ".venv" / "bin").mkdir(parents=True)
    for name in (
        "scripts",
        "examples",
        "setup.cfg",
        "pyproject.toml",
        "constraints.txt",
    ):
        (clone / name).symlink_to(ROOT / name)
    for name, start in (
        ("fminfer", f"{sys.executable} -m fminfer"),
        ("python", sys.executable),
    ):
        path = clone / ".venv" / "bin" / name
        path.write_text(f'#!/bin/sh\nexec {start} "$@"\n')
        path.chmod(0o755)
    for extra in ("core", "serve"):
        subprocess.run(
            f"touch .venv/.fminfer-{extra}-$({SUM})", shell=True, cwd=clone, check=True
        )
    (tmp_path / "temporary").mkdir()
    return clone


@contextmanager
def demo_of(clone: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    demo = subprocess.Popen(
        ["bash", "-c", f"cd {clone} && exec bash scripts/demo {' '.join(words)}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ
        | {"TMPDIR": str(clone.parent / "temporary"), "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    try:
        yield demo
    finally:
        with suppress(ProcessLookupError):
            os.killpg(demo.pid, signal.SIGKILL)  # what it left


def test_it_shows_answers_of_every_kind(clone: Path) -> None:
    """It ended at the first chat, and named outputs that it then deleted."""
    programs(clone.parent / "programs")
    forking = f'#!/bin/sh\nexec {clone.parent}/programs/fminfer "$@"\n'
    (clone / ".venv" / "bin" / "fminfer").write_text(forking)
    with demo_of(clone) as demo:
        told, _ = demo.communicate(timeout=300)
    assert demo.returncode == 0, told
    for path in (ROOT / "examples" / "queries").glob("*.jsonl"):
        assert f"── output_{path.name}" in told
    assert "How do you go from the den to the porch?\n   → ' south'  (stop)" in told
    assert not [*(clone.parent / "temporary").glob("tmp.*")]
    named = re.findall(r"^(?:output|errors) +(.+)$", told, flags=re.MULTILINE)
    assert named and all((clone / path).is_file() for path in named)


# Stands in for the Python of .venv: notes what pip is to install, and reaches the
# address or not.
PYTHON = """#!/bin/sh
case "$1" in
    -c) exit $UNREACHED ;;
    *) echo "$*" >> "$PWD/pip_calls"; case "$*" in *download.pytorch*) exit $FAILED ;; esac ;;
esac
"""
GPU = "#!/bin/sh\nexit $NO_GPU\n"


@pytest.mark.skipif(
    sys.platform != "linux", reason="PyPI's build has CUDA on Linux only"
)
@pytest.mark.parametrize(
    ("no_gpu", "unreached", "failed", "has_torch", "says"),
    [
        (1, 0, 0, False, "about 260 MB into .venv: PyTorch without CUDA"),
        (1, 0, 1, False, "That failed; pip goes on with the PyTorch that it finds"),
        (1, 1, 0, False, "about 3060 MB into .venv: PyTorch with CUDA, since https://"),
        (
            0,
            0,
            0,
            False,
            "about 3060 MB into .venv: PyTorch with CUDA, for the GPU here",
        ),
        (1, 0, 0, True, "at most 60 MB into .venv; PyTorch is there"),
    ],
)
def test_a_set_up_takes_the_small_torch_without_a_gpu(
    no_gpu: int, unreached: int, failed: int, has_torch: bool, says: str, clone: Path
) -> None:
    """Several GB of CUDA came on machines without a GPU, and nothing said so beforehand."""
    for stamp in (clone / ".venv").glob(".fminfer-*"):
        stamp.unlink()
    programs = {clone / ".venv/bin/python": PYTHON, clone.parent / "nvidia-smi": GPU}
    for path, text in programs.items():
        path.write_text(text)
        path.chmod(0o755)
    if has_torch:
        (clone / ".venv/lib/python3.11/site-packages/torch-2.13.0+cpu.dist-info").mkdir(
            parents=True
        )
    numbers = {"NO_GPU": no_gpu, "UNREACHED": unreached, "FAILED": failed}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", 'source scripts/environment ""'],
        cwd=clone,
        env=os.environ
        | {name: str(number) for name, number in numbers.items()}
        | {"PATH": f"{clone.parent}:{os.environ['PATH']}"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0 and says in done.stderr, done.stderr
    first, *rest = (clone / "pip_calls").read_text().splitlines()
    is_small = "without CUDA, as" in done.stderr
    assert [first, *rest][-1].endswith("--constraint constraints.txt -e .")
    assert (
        "--extra-index-url https://download.pytorch.org/whl/cpu torch" in first
    ) is is_small
    assert len(rest) == is_small


def test_whoever_ends_it_ends_the_server(clone: Path) -> None:
    """The server went on, and kept its port."""
    with demo_of(clone, "serve", "--port", "0") as demo:
        assert demo.stdout is not None
        lines = iter(demo.stdout.readline, "")
        url = (
            next(line for line in lines if " at http" in line).split(" at ")[1].strip()
        )
        assert urllib.request.urlopen(f"{url}/health", timeout=30).status == 200
        assert any(line == "Try:\n" for line in lines)
        demo.send_signal(signal.SIGTERM)
        demo.communicate(timeout=60)
        assert demo.returncode == 0, "the server's own status"
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(f"{url}/health", timeout=30)
