"""Before its first step the command imports little, which changes no answer, and
touches memory."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import mmap
import os
import pickle
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner

import fminfer
from fminfer.cli import app, process
from fminfer.core.config import ComputeOptions
from fminfer.machine import control_groups, host_memory, library_imports
from fminfer.machine.host_memory import (
    measure_free_host_bytes,
    read_mapped_bytes,
    reading_files,
    touching_memory,
)
from fminfer.models.model_folder import find_weight_files
from tests.conftest import FEW, FIELDS, IS_ALL, family_config

UNUSED = (
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.tensor",
    "sympy",
    "transformers.modeling_utils",
    "transformers.generation.utils",
)


def unused_modules() -> list[str]:
    """Return what no run uses and this process has imported: also transformers' models.

    Configs themselves import `models.auto.modeling_auto`, a table of names.
    """
    return [
        name
        for name in sys.modules
        if name in UNUSED
        or re.match(r"transformers\.models\.(?!auto).*\.modeling_", name)
    ]


# Prints the answers of random models, of config.json files, and what else it had to import.
ANSWER = """
import json, sys
from fminfer.machine.library_imports import import_transformers
import_transformers()
from tests.cli.test_start import answers_of, unused_modules
print(json.dumps([answers_of(config) for config in sys.argv[1:]]))
print(json.dumps(unused_modules()))
"""


def answers_of(config: str) -> list[Any]:
    """Return the choices of a random model, or what is wrong."""
    engine = fminfer.Engine(random_init=config, dtype="float32")
    request = {"prompt": list(range(40)), "max_tokens": 4, "logprobs": 2, "echo": True}
    records = list(engine.run([request]))
    engine.close()
    return [
        record.result["choices"] if record.result else str(record.error)
        for record in records
    ]


def run_python(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_family_answers_the_same_without_what_no_run_uses(tmp_path: Path) -> None:
    configs = []
    for name in sorted(FIELDS) if IS_ALL else FEW[::3]:
        family_config(name).save_pretrained(tmp_path / name)
        configs.append(str(tmp_path / name))
    with ThreadPoolExecutor() as pool:
        trimmed = pool.submit(run_python, ANSWER, *configs)
        expected = json.dumps([answers_of(config) for config in configs])
        found, unused = trimmed.result().splitlines()
    assert expected.count("token_logprobs") == len(configs), expected
    assert found == expected
    assert unused == "[]"


def test_the_command_imports_no_model_no_compiler_and_no_sharded_tensors(
    tmp_path: Path,
) -> None:
    """They are half of what is imported; `check` had them all."""
    rows = tmp_path / "rows.jsonl"
    answers = tmp_path / "answers.jsonl"
    rows.write_text('{"prompt": "The kitchen", "max_tokens": 2}\n')
    code = rf"""
import re, sys
from fminfer.cli.app import main
model = re.compile(r"transformers\.models\.(?!auto).*\.modeling_")
rows, answers = sys.argv[1:]
for words in (["check", rows], ["run", rows, "-q", "--output", answers]):
    try:
        main(words)
    except SystemExit as end:
        assert not end.code, end.code
    assert not [name for name in sys.modules if name in {UNUSED} or model.match(name)], words
"""
    run_python(code, str(rows), str(answers))
    assert '"choices":[' in answers.read_text()


def test_help_waits_for_nothing_that_only_runs_need() -> None:
    """tqdm and importlib.metadata, which reads e-mails, took a third of `fminfer --help`."""
    heavy = {"torch", "numpy", "tqdm", "email", "sqlite3", "fsspec", "jinja2"}
    run_python(
        f"import sys, fminfer.cli.app; assert not {heavy} & sys.modules.keys(), sys.modules"
    )


# Prints how often transformers' folders were read for the list of its models.
LIST = """
from pathlib import Path
from fminfer.machine import library_imports
reads = []
class Counts(library_imports._CachedList):
    def __init__(self, folder, read):
        def count(path):
            reads.append(path)
            return read(path)
        super().__init__(folder, count)
        self.of_models = [folder, folder / "__init__.py"]
library_imports._CachedList = Counts
library_imports.import_transformers()
import transformers.utils.import_utils as reader
kept = reader.create_import_structure_from_path
print(len([path for path in reads if Path(path) in kept.of_models]))
"""
IS_RIGHT = """
print(kept(str(kept.of_models[1])) == kept._read(kept.of_models[0]))
from transformers import AutoTokenizer, BertConfig, LlamaForCausalLM
"""


def test_the_list_of_models_is_kept_for_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run_python(LIST) == "1\n"
    assert run_python(LIST + IS_RIGHT) == "0\nTrue\n"
    (kept,) = (tmp_path / "fminfer").iterdir()
    assert kept.name.startswith("transformers-")


class Planted:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_planted_or_damaged_list_of_models_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was unpickled without a look: a planted file ran code, a damaged one failed
    every run."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "models"
    monkeypatch.setattr(library_imports, "make_cache_folder", lambda: tmp_path)
    right = {"llama": {frozenset({"torch"}): {"modeling_llama": {"LlamaModel"}}}}
    assert library_imports._CachedList(folder, lambda path: right)(folder) == right
    (kept,) = tmp_path.iterdir()
    ran = tmp_path / "ran"
    whole = kept.read_bytes()
    texts = [
        '[["no", "list"]]',
        "3",
        "[",
        '{"items": [[["a"], "b"]]}',
        '{"items": [[1, ["b"]]]}',
    ]
    signed = [
        f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}".encode()
        for text in texts
    ]
    torn = [whole[:-1] + b" ", whole[: len(whole) // 2], b""]
    for damaged in (pickle.dumps(Planted(ran)), pickle.dumps({1: 2}), *torn, *signed):
        kept.write_bytes(damaged)
        assert library_imports._CachedList(folder, lambda path: right)(folder) == right
        assert not ran.exists() and kept.read_bytes() == whole, damaged
    assert library_imports._CachedList(folder, lambda path: {})(folder) == right, (
        "this one is taken"
    )


def test_without_a_cache_the_list_of_models_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no folder").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no folder"))
    folder = Path(transformers.__path__[0]) / "models"
    lists = iter([{"llama": {}}])
    kept = library_imports._CachedList(folder, lambda path: next(lists))
    assert kept(folder) == kept(str(folder / "__init__.py")) == {"llama": {}}


def test_the_collector_looks_now_and_then_and_what_stood_aside_is_there_for_who_asks() -> (
    None
):
    """Rows' tokens stay until their row ends: to look at them every 700 costs a third
    of a step."""
    code = """
import gc, sys
from fminfer.machine.library_imports import importing_libraries
with importing_libraries():
    assert not gc.isenabled()
print(gc.isenabled(), gc.get_threshold()[0], gc.get_freeze_count() > 100_000)
import torch
assert "torch._dynamo" not in sys.modules and torch.distributed.is_available()
add = torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)
assert add(torch.ones(2)).tolist() == [2.0, 2.0]
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "not compiled"
"""
    assert run_python(code) == "True 10000 True\n"


def test_a_version_that_cannot_be_trimmed_is_imported_as_usual() -> None:
    code = """
import sys
from fminfer.machine import library_imports
class Refuses(library_imports._NoCompiler):
    def __getattr__(self, name):
        raise ImportError(name)
library_imports._NoCompiler = Refuses
library_imports.import_transformers()
from transformers import LlamaForCausalLM
assert "torch._dynamo" in sys.modules
assert sys.modules["torch._dynamo"].__file__
"""
    run_python(code)


def test_a_compiler_that_is_there_already_stays() -> None:
    code = """
import sys, torch, types
from fminfer.machine.library_imports import import_transformers
before = sys.modules["torch._dynamo"] = types.ModuleType("torch._dynamo")
import_transformers()
assert sys.modules["torch._dynamo"] is before
"""
    run_python(code)


def test_a_process_that_has_transformers_keeps_it_as_it_is() -> None:
    """As this process has, whose fixtures import it."""
    library_imports.import_transformers()
    assert torch.distributed.is_available()
    assert transformers.utils.is_torch_distributed_available()


def own_bytes() -> int:
    """Return the memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def wait_until(is_so: Callable[[], bool]) -> None:
    for _ in range(1000):
        if is_so():
            return
        time.sleep(0.01)
    raise AssertionError("waited for 10 s")


def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})


def test_memory_is_touched_meanwhile_and_free_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two_cores(monkeypatch)
    monkeypatch.setattr(host_memory, "measure_free_host_bytes", lambda: 1 << 30)
    size = 200 << 20
    before = own_bytes()
    with touching_memory(size):
        wait_until(lambda: own_bytes() - before > 0.95 * size)
        time.sleep(0.1)
        assert own_bytes() - before < 1.2 * size, "more than it was told"
    assert own_bytes() - before < 0.2 * size


def test_no_more_than_a_quarter_of_free_memory_is_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two_cores(monkeypatch)
    monkeypatch.setattr(host_memory, "measure_free_host_bytes", lambda: 400 << 20)
    before = own_bytes()
    with touching_memory(1 << 40):
        wait_until(lambda: own_bytes() - before > 95 << 20)
        time.sleep(0.1)
        assert own_bytes() - before < 120 << 20


def test_touching_ends_when_what_it_is_for_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two_cores(monkeypatch)
    monkeypatch.setattr(host_memory, "measure_free_host_bytes", lambda: 2 << 30)
    # a slow host: 6 s for all
    monkeypatch.setattr(ctypes, "memset", lambda *_: time.sleep(0.1))
    began = time.monotonic()
    with pytest.raises(KeyError), touching_memory(1 << 40):
        raise KeyError
    assert time.monotonic() - began < 1.0
    assert not [
        thread for thread in threading.enumerate() if thread.name == "fminfer memory"
    ]


@pytest.mark.parametrize(
    ("num_bytes", "cores", "free", "limit", "is_touched"),
    [
        (1, 2, 1, resource.RLIM_INFINITY, True),
        (0, 2, 1, resource.RLIM_INFINITY, False),
        (1, 1, 1, resource.RLIM_INFINITY, False),
        (1, 2, 0, resource.RLIM_INFINITY, False),
        (1, 2, -1, resource.RLIM_INFINITY, False),
        (1, 2, 1, 1 << 40, False),
    ],
)
def test_nothing_is_touched_for_nothing(
    num_bytes: int,
    cores: int,
    free: int,
    limit: int,
    is_touched: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor beside the only core's own work, nor where memory is gone or counted when reserved."""
    touched: list[int] = []
    monkeypatch.setattr(
        host_memory, "_touch_pages", lambda memory, _: touched.append(len(memory))
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(host_memory, "measure_free_host_bytes", lambda: free << 30)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    with touching_memory(num_bytes << 20):
        pass
    assert touched == [1 << 20] * is_touched


@pytest.mark.parametrize("version", [1, 2])
def test_free_memory_is_what_the_control_groups_leave(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job's limit may be that of its own group or of one above; cached files can go."""
    monkeypatch.setattr(control_groups, "SYSTEM", tmp_path)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(
        "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n"
    )
    assert measure_free_host_bytes() == 8000 << 10, "no groups"
    names = host_memory.NAMES[version]
    top = tmp_path / "sys/fs/cgroup" / ("memory" if version == 1 else "")
    group = "4:cpu:/other\n3:memory:/job/step\n" if version == 1 else "0::/job/step\n"
    (tmp_path / "proc/self/cgroup").write_text(group)

    def limit(folder: Path, most: str, used: int, cached: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in zip(names, (most, str(used)), strict=False):
            (folder / name).write_text(f"{value}\n")
        files = {"inactive_file": cached // 5, "active_file": cached - cached // 5}
        told = "".join(f"{names[2]}{name} {count}\n" for name, count in files.items())
        (folder / "memory.stat").write_text(f"anon 7\n{told}")

    limit(top / "job/step", "max" if version == 2 else str(2**63 - 4096), 500, 100)
    assert measure_free_host_bytes() == 8000 << 10, "no limit"
    limit(top / "job", "1000000", 400_000, 100_000)
    assert measure_free_host_bytes() == 700_000, "the group above"
    limit(top / "job/step", "500000", 400_000, 50_000)
    assert measure_free_host_bytes() == 150_000
    (top / "job/step/memory.stat").unlink()
    assert measure_free_host_bytes() == 100_000, "what is cached is not told"
    limit(top, "90000", 1, 0)  # all that a container may see
    assert measure_free_host_bytes() == 89_999


def test_weight_files_are_found_in_a_folder_and_in_the_hubs_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    here = tmp_path / "models--some--model" / "snapshots" / "abc"
    here.mkdir(parents=True)
    (here.parent.parent / "refs").mkdir()
    (here.parent.parent / "refs" / "main").write_text("abc")
    assert find_weight_files("some/model") == {}
    (here / "config.json").write_text("{}")
    for number in (1, 2):
        (here / f"model-{number}.safetensors").write_bytes(b"1" * number)
    # the same weights once more
    (here / "consolidated.safetensors").write_bytes(b"1" * 100)
    index = here / "model.safetensors.index.json"
    index.write_text(
        '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    )
    expected = {here / f"model-{number}.safetensors": number for number in (1, 2)}
    assert find_weight_files("some/model") == find_weight_files(str(here)) == expected
    for broken in ("[]", "{", '{"weight_map": {"a": "model-3.safetensors"}}'):
        index.write_text(broken)
        assert find_weight_files(str(here)) == {}
    for name in ("no/model", "no model", str(index)):
        assert find_weight_files(name) == {}


def test_a_run_reads_its_weights_and_touches_twice_as_much(
    tmp_path: Path, llama_checkpoint: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once packed, and as much for the KV cache; nothing for another device or what is
    not here."""
    folder, _ = llama_checkpoint
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "max_tokens": 1}\n')
    driver = tmp_path / "driver"
    monkeypatch.setattr(process, "GPU_DRIVERS", (str(driver),))
    sizes: list[int] = []

    @contextmanager
    def record(num_bytes: int) -> Iterator[None]:
        sizes.append(num_bytes)
        yield

    read: list[list[Path]] = []

    @contextmanager
    def record_files(paths: Iterable[Path]) -> Iterator[None]:
        read.append([*paths])
        yield

    monkeypatch.setattr(process, "touching_memory", record)
    monkeypatch.setattr(process, "reading_files", record_files)
    here = ["--model-name", str(folder)]
    for more in (
        here,
        [*here, "--device", "cuda"],
        ["--model-name", "no/such/model"],
        [],
    ):
        CliRunner().invoke(app.main, ["run", "-q", "--restart", str(rows), *more])
    driver.touch()  # of a GPU
    CliRunner().invoke(app.main, ["run", "-q", "--restart", str(rows), *here])
    file = folder / "model.safetensors"
    assert sizes == [2 * file.stat().st_size, 0, 0, 0, 0]
    assert read == [[file], [], [], [], []]


@pytest.mark.parametrize(("free", "expected"), [(1 << 30, 2_500), (4_000, 1_000)])
def test_files_are_read_meanwhile_as_far_as_memory_allows(
    free: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / name for name in "ab"]
    for file, size in zip(files, (1_000, 1_500), strict=True):
        file.write_bytes(b"x" * size)
    given: list[int] = []
    readv = os.readv

    def count(descriptor: int, buffers: list[bytearray]) -> int:
        given.append(readv(descriptor, buffers))
        return given[-1]

    monkeypatch.setattr(host_memory, "READ_PIECE", 50)
    monkeypatch.setattr(host_memory, "NUM_PIECES", 2)
    monkeypatch.setattr(host_memory, "measure_free_host_bytes", lambda: free)
    monkeypatch.setattr(os, "readv", count)
    with reading_files([*files, tmp_path / "missing"]):
        wait_until(
            lambda: not [t for t in threading.enumerate() if t.name == "fminfer files"]
        )
    assert sum(given) == expected


def test_reading_ends_when_what_it_is_for_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(descriptor: int, buffers: list[bytearray]) -> int:
        time.sleep(0.1)
        return 1

    monkeypatch.setattr(os, "readv", read)  # a slow disk
    began = time.monotonic()
    (tmp_path / "endless").touch()
    with pytest.raises(KeyError), reading_files([tmp_path / "endless"]):
        raise KeyError
    assert time.monotonic() - began < 1.0


@pytest.mark.skipif(sys.platform != "linux", reason="it is Linux that is asked to read")
def test_mapped_bytes_are_in_memory_once_they_are_read(tmp_path: Path) -> None:
    """Touching them takes no page faults: Linux has them in the process's own tables.

    Other threads of the process may have some meanwhile.
    """
    size = 400 * mmap.PAGESIZE
    (tmp_path / "file").write_bytes(b"x" * size)
    with (
        open(tmp_path / "file", "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped,
    ):
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        if host_memory._advise_system(address, size, host_memory.POPULATE_READ):
            pytest.skip("Linux before 5.14")
        mapped.madvise(mmap.MADV_DONTNEED)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        read_mapped_bytes(address + 5, size - 5)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 100
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        assert sum(mapped[:: mmap.PAGESIZE]) == 400 * ord("x")
        assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 100


def test_the_cpus_kernels_are_not_built_for_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With --device cuda a compiler ran for half a minute beside the loading, for nothing."""
    built: list[str] = []
    monkeypatch.setattr(process, "start_build", lambda: built.append("built"))
    monkeypatch.setattr(process, "GPU_DRIVERS", ())
    for kernels, device in (("auto", "cuda"), ("require", "cuda:1"), ("off", "cpu")):
        process.start_kernel_build(ComputeOptions(kernels=kernels, device=device))
    assert not built
    for device in ("cpu", "auto"):
        process.start_kernel_build(ComputeOptions(device=device))
    assert built == ["built"] * 2


def test_tiles_are_hidden_before_kernels_are_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels with tiles would be built first, in a quarter of a minute, for nothing."""
    names: list[str] = []
    monkeypatch.setattr(process, "start_build", lambda: names.append("built"))
    monkeypatch.setattr(process, "hide_tiles", lambda: names.append("hidden"))
    process.start_kernel_build(ComputeOptions(device="cpu"))
    process.start_kernel_build(ComputeOptions(device="cpu", same_answers="on"))
    assert names == ["built", "hidden", "built"]
