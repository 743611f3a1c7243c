"""What `fminfer doctor` tells of a machine and an installation, on one page.

No key, no token and no home folder's name is on it. A fact that cannot be found says why.
"""

from __future__ import annotations

import getpass
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fminfer.compute.kernels.kernel_build import find_compiler, start_build
from fminfer.core.quantities import describe_bytes
from fminfer.core.version import __version__
from fminfer.machine import processor
from fminfer.machine.control_groups import find_group_folders, read_system_file
from fminfer.machine.device import describe_slow_dtype
from fminfer.machine.host_memory import NAMES, measure_free_host_bytes
from fminfer.machine.threads import find_usable_cores
from fminfer.machine.user_cache import describe_cache_fault, find_cache_path

CPU = torch.device("cpu")
UNITS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
# Variables whose values are numbers, words or folders; of others only the name is told.
SHOWN = re.compile(
    r"FMINFER_CPU|OMP_NUM_THREADS|HF_HUB_OFFLINE|CUDA_VISIBLE_DEVICES|CXX"
)
NAMED = re.compile(r"(FMINFER_|HF_|TRANSFORMERS_|CUDA_|NCCL_|OMP_|MKL_|ONEDNN_).*|CXX")
LEAST_FREE = 2 << 30  # bytes of memory that a small model needs


@dataclass(slots=True)
class MachineReport:
    """A page of facts in sections, and what could be better."""

    sections: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)  # each with what to do

    def add(self, title: str, facts: Callable[[], Iterator[tuple[str, str]]]) -> None:
        """Add a section; if its facts cannot be found, it says why."""
        rows = self.sections[title] = []
        try:
            rows.extend((name, hide_names(text)) for name, text in facts())
        except Exception as error:
            rows.append(("not known", hide_names(f"{type(error).__name__}: {error}")))


def make_machine_report() -> MachineReport:
    """Look at this machine and installation."""
    report = MachineReport()
    report.add("processor", lambda: _describe_processor(report.findings))
    report.add("memory", lambda: _describe_memory(report.findings))
    report.add("GPU", lambda: _describe_gpus(report.findings))
    report.add("versions", _describe_versions)
    report.add("folders", lambda: _describe_folders(report.findings))
    report.add("variables", _describe_variables)
    report.findings = [hide_names(finding) for finding in report.findings]
    return report


def hide_names(text: str) -> str:
    """Return a text without home folders, and folders named like the user."""
    homes = {os.path.expanduser("~"), os.environ.get("HOME", "")} - {"", "/", "~"}
    for home in sorted(homes, key=len, reverse=True):
        text = re.sub(rf"{re.escape(home)}(?=/|$|\W)", "~", text)
    text = re.sub(r"/(home|Users)/[^/\s]+", "~", text)
    with suppress(OSError, KeyError, ImportError):
        text = re.sub(rf"/{re.escape(getpass.getuser())}(?=/|$)", "/USER", text)
    return text


def _describe_processor(findings: list[str]) -> Iterator[tuple[str, str]]:
    cpuinfo = read_system_file(processor.CPUINFO)
    match = re.search(r"model name\s*: (.*)", cpuinfo)
    yield "name", match[1] if match else platform.processor() or platform.machine()
    yield "cores", f"{len(find_usable_cores())} usable of {os.cpu_count()}"
    units = [name for name in UNITS if processor.has_unit(name)]
    yield "instructions", " ".join(units) or "none of " + " ".join(UNITS)
    if hidden := [name for name in UNITS if processor.hides_unit(name)]:
        findings.append(
            f"{processor.VARIABLE}={processor.read_chosen_name()} hides "
            f"{' '.join(hidden)}; unset it to use them"
        )
    build = start_build()
    library = build.wait_for_library()
    if library is not None:
        yield "kernels", build.origin
        if build.shipped_fault:
            findings.append(f"Kernels are built here: {build.shipped_fault}")
    else:
        yield "kernels", "plain torch"
        findings.append(f"Plain torch computes, which is slower: {build.error}")
    compiler = find_compiler()
    yield "compiler", compiler[0] if compiler else "none"
    yield "threads", f"{torch.get_num_threads()} of torch"
    if text := describe_slow_dtype(torch.bfloat16, CPU):
        yield "bfloat16", text


def _describe_memory(findings: list[str]) -> Iterator[tuple[str, str]]:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = measure_free_host_bytes()
    yield "in all", describe_bytes(total)
    yield "free", f"{describe_bytes(free)}, within what control groups allow"
    for folder, version in find_group_folders("memory"):
        limit = read_system_file(folder / NAMES[version][0]).strip()
        if limit.isdigit() and int(limit) < total:
            yield "limit", f"{describe_bytes(int(limit))} of a control group"
    if free < LEAST_FREE:
        findings.append(
            f"{describe_bytes(free)} of memory are free; end other programs, or raise the "
            "container's limit"
        )


def _describe_gpus(findings: list[str]) -> Iterator[tuple[str, str]]:
    if not torch.cuda.is_available():
        yield "none", "torch sees no GPU"
        if os.path.exists("/dev/nvidiactl"):
            findings.append(
                f"The driver has a GPU, and torch {torch.__version__} uses none; install "
                "torch with CUDA"
            )
        return
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        yield str(number), f"{facts.name}, {describe_bytes(facts.total_memory)}"


def _describe_versions() -> Iterator[tuple[str, str]]:
    yield "fminfer", f"{__version__} in {Path(__file__).parents[1]}"
    yield "Python", f"{platform.python_version()} in {sys.prefix}"
    yield "system", f"{platform.platform()}, {' '.join(platform.libc_ver())}"
    yield "torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    by_extra: dict[str, list[str]] = {"needed": []}
    for requirement in importlib.metadata.requires("fminfer") or ():
        match = re.match(r"([\w.-]+)", requirement)
        extra = re.search(r"extra == [\"']([\w-]+)[\"']", requirement)
        if match and match[1] != "torch":
            key = extra[1] if extra else "needed"
            by_extra.setdefault(key, []).append(match[1])
    by_extra.pop("test", None)
    for group, names in by_extra.items():
        texts = [f"{name} {_find_version(name)}" for name in names]
        yield group, ", ".join(texts)


def _find_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "–"


def _describe_folders(findings: list[str]) -> Iterator[tuple[str, str]]:
    if fault := describe_cache_fault():
        yield "cache", "none"
        findings.append(f"Nothing is kept from run to run: {fault}")
    else:
        folder = find_cache_path()
        files = [path for path in folder.rglob("*") if path.is_file()]
        size = describe_bytes(sum(path.stat().st_size for path in files))
        yield "cache", f"{folder}, {size}"
    from huggingface_hub import constants

    yield "hub", constants.HF_HUB_CACHE


def _describe_variables() -> Iterator[tuple[str, str]]:
    for name in sorted(os.environ):
        if SHOWN.fullmatch(name):
            yield name, os.environ[name]
        elif NAMED.fullmatch(name):
            yield name, "is set"
