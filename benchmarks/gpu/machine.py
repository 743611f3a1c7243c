"""Phase 0: what is installed, what the machine is, and its roofs on this day."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator
from functools import partial

from benchmarks.gpu.cases import Case, Figures, Setting, Wrong, expect

# What an import is called, and the package that brings it.
NEEDED = {
    "torch": "torch",
    "triton": "triton",
    "transformers": "transformers",
    "tokenizers": "tokenizers",
    "safetensors": "safetensors",
    "numpy": "numpy",
    "orjson": "orjson",
    "llguidance": "llguidance",
    "click": "click",
    "tqdm": "tqdm",
    "jinja2": "jinja2",
    "sentencepiece": "sentencepiece",
    "google.protobuf": "protobuf",
    "pytest": "pytest",
}
CARRY = (
    "Bring their wheels in P/whl (--prepare P fetches orjson and llguidance). Here: python3 -m "
    "pip install "
    "--no-index --no-deps --target /tmp/site P/whl/*.whl, and export PYTHONPATH=/tmp/site"
)
OWN = (
    "fminfer.cli.app",
    "fminfer.runtime.engine_api",
    "fminfer.cli.check_command",
    "fminfer.compute.attention.triton_attention",
    "fminfer.compute.layers.triton_layers",
    "tests.models.test_oracle",
    "benchmarks.gpu.time_model",
)
# Elements of a square product, and bytes of a copy.
PRODUCT = {"cuda": 8192, "cpu": 256}
COPY_BYTES = {"cuda": 4 << 30, "cpu": 16 << 20}
TYPES = {"cuda": ("bfloat16", "float16", "float32"), "cpu": ("float32",)}


def cases(setting: Setting) -> Iterator[Case]:
    """Return the cases; the first ones import nothing that may be missing."""
    yield Case("imports", find_versions)
    yield Case("our modules", import_ours)
    yield Case("machine", partial(describe, setting))
    yield Case("roof copy", partial(time_copies, setting))
    for name in TYPES[setting.device]:
        yield Case(f"roof {name}", partial(time_products, setting, name))


def find_versions() -> Figures:
    """Import each package; tell all that are missing at once."""
    missing = list[str]()
    figures = Figures(python=platform.python_version())
    for name, package in NEEDED.items():
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            missing.append(package)
            figures[package] = f"missing: {error}"
            continue
        try:
            figures[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # some builds have another name
            figures[package] = str(getattr(module, "__version__", "unknown"))
    expect(not missing, f"{', '.join(missing)} missing. {CARRY}", figures)
    return figures


def import_ours() -> Figures:
    for name in OWN:
        importlib.import_module(name)
    return {"modules": len(OWN)}


def describe(setting: Setting) -> Figures:
    """Tell what the machine is, and that a GPU is there."""
    import torch

    figures: Figures = {"cores": os.cpu_count(), "cuda": torch.version.cuda}
    for tool in ("gcc", "g++", "nvcc", "compute-sanitizer"):
        figures[tool] = shutil.which(tool) or "none"
    if setting.device == "cpu":
        return figures
    if not torch.cuda.is_available():
        raise Wrong(
            "torch sees no GPU; with --cpu tiny shapes are tried without one", figures
        )
    facts = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    figures |= {"gpu": facts.name, "capability": f"{facts.major}.{facts.minor}"}
    figures |= {"processors": facts.multi_processor_count}
    figures |= {"free_gib": free / 2**30, "total_gib": total / 2**30}
    expect(figures["gcc"] != "none", "no gcc: Triton needs a C compiler", figures)
    return figures


def time_copies(setting: Setting) -> Figures:
    """Measure bytes read and written a second, of a copy within the device's memory."""
    import torch

    from benchmarks.gpu.stopwatch import median_s

    device = torch.device(setting.device)
    size = COPY_BYTES[setting.device]
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    took = median_s(lambda: target.copy_(source), device, turns=10)
    rate = 2 * source.nbytes / took
    return {"roof": rate, "GB/s": rate / 1e9}


def time_products(setting: Setting, name: str) -> Figures:
    """Measure FLOP/s of a square product."""
    import torch

    from benchmarks.gpu.stopwatch import median_s

    device = torch.device(setting.device)
    size = PRODUCT[setting.device]
    left, right = (
        torch.randn(size, size, device=device).to(getattr(torch, name))
        for _ in ("x", "y")
    )
    took = median_s(lambda: left @ right, device, turns=8)
    rate = 2 * size**3 / took
    return {"roof": rate, "TFLOP/s": rate / 1e12}
