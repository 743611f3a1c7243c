"""A greater processor can stand for a lesser one: FMINFER_CPU, and what keeps to it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fminfer.compute.kernels import kernel_build
from fminfer.compute.kernels.kernel_build import find_compiler
from fminfer.core.config import EngineConfig
from fminfer.core.errors import UsageError
from fminfer.machine import processor
from fminfer.machine.device import describe_slow_dtype, is_fast_in_bfloat16
from fminfer.machine.processor import (
    LEVELS,
    cap_libraries,
    choose_compiler_flags,
    choose_level_name,
    has_unit,
)
from fminfer.models.checkpoint import open_checkpoint
from fminfer.plan.planning import plan_ahead

CPU = torch.device("cpu")
GREATEST = f"flags\t\t: fpu {' '.join(sorted(LEVELS['amx'].units))}"
OLD = f"flags : fpu {' '.join(sorted(LEVELS['avx2'].units))}"
needs_avx2 = pytest.mark.skipif(
    not all(map(has_unit, LEVELS["avx2"].units)),
    reason="this processor has not all of avx2's level",
)


@pytest.fixture
def greatest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the processor has every unit."""
    monkeypatch.delenv("FMINFER_CPU", raising=False)
    monkeypatch.setattr(processor, "_read_cpuinfo", lambda: GREATEST)


@pytest.mark.parametrize(
    ("name", "has_pairs", "has_tiles"),
    [
        ("native", True, True),
        ("amx", True, True),
        ("avx512_bf16", True, False),
        ("avx512", False, False),
        ("avx2", False, False),
    ],
)
def test_a_greater_processor_hides_its_units(
    name: str,
    has_pairs: bool,
    has_tiles: bool,
    greatest: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FMINFER_CPU", name)
    assert has_unit("avx512_bf16") == has_pairs and has_unit("amx_bf16") == has_tiles
    assert is_fast_in_bfloat16(CPU) == has_pairs
    dtype = plan_ahead(EngineConfig(device="cpu"), open_checkpoint(None)).dtype
    assert dtype == (torch.bfloat16 if has_pairs else torch.float32)
    assert bool(describe_slow_dtype(torch.bfloat16, CPU)) != has_pairs
    assert not describe_slow_dtype(
        torch.float32, CPU
    ) and "float16" in describe_slow_dtype(torch.float16, CPU)


def test_a_processor_with_tiles_may_do_without(
    greatest: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FMINFER_CPU", "native")
    processor.hide_tiles()
    assert not has_unit("amx_bf16") and has_unit("avx512_bf16")
    assert is_fast_in_bfloat16(CPU), "pairs are"
    assert [*choose_compiler_flags()] == [*LEVELS["avx512_bf16"].compiler_flags]
    assert os.environ["FMINFER_CPU"] == "avx512_bf16", "processes it starts have it"


def test_the_greatest_level_that_a_processor_has_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of pretended processors; one that lacks a part of a level gets the level below."""
    monkeypatch.delenv("FMINFER_CPU", raising=False)
    units: set[str] = set()
    monkeypatch.setattr(
        processor, "_read_cpuinfo", lambda: f"flags : {' '.join(units)}"
    )
    assert choose_level_name() == ""
    before = ""
    for name, level in LEVELS.items():
        more = sorted(level.units - units)
        units |= {*more[1:]}
        assert choose_level_name() == before, f"there is no {more[0]}"
        units.add(more[0])
        assert choose_level_name() == name
        before = name
    monkeypatch.setenv("FMINFER_CPU", "AVX512")
    assert choose_level_name() == "avx512"
    monkeypatch.setenv("FMINFER_CPU", "native")
    assert choose_level_name() == "amx"


def test_a_processor_without_tiles_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FMINFER_CPU", "native")
    monkeypatch.setattr(processor, "_read_cpuinfo", lambda: "flags : avx2 fma")
    processor.hide_tiles()
    assert os.environ["FMINFER_CPU"] == "native"


def test_a_run_says_that_the_variable_hides_fast_products(
    greatest: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said of a processor that has them that it had none."""
    monkeypatch.setenv("FMINFER_CPU", "AVX2")
    says = describe_slow_dtype(torch.bfloat16, CPU)
    assert (
        "FMINFER_CPU=avx2 hides this CPU's fast products of bfloat16; unset it" in says
    )
    monkeypatch.setattr(processor, "_read_cpuinfo", lambda: OLD)
    for name in ("avx2", ""):
        monkeypatch.setenv("FMINFER_CPU", name)
        assert "this CPU has no fast products of bfloat16" in describe_slow_dtype(
            torch.bfloat16, CPU
        )
    monkeypatch.delenv("FMINFER_CPU")
    assert "this CPU has no fast products of bfloat16" in describe_slow_dtype(
        torch.bfloat16, CPU
    )


def test_upper_case_is_understood(
    greatest: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, flags in (("AVX2", "-march=x86-64-v3"), ("Native", "-march=native")):
        monkeypatch.setenv("FMINFER_CPU", name)
        assert list(choose_compiler_flags()) == [flags]


def test_the_libraries_are_told(
    greatest: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in LEVELS["avx2"].caps:
        monkeypatch.setenv(variable, "what the user set")
    cap_libraries()
    assert os.environ["ATEN_CPU_CAPABILITY"] == "what the user set", "native leaves it"
    for name, level in LEVELS.items():
        monkeypatch.setenv("FMINFER_CPU", name)
        cap_libraries()
        assert {variable: os.environ[variable] for variable in level.caps} == level.caps


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "_read_cpuinfo", lambda: OLD)
    monkeypatch.setenv("FMINFER_CPU", "avx3")
    allowed = r"'avx3'; set it to avx2, avx512, avx512_bf16, amx, or to native \(all that this"
    with pytest.raises(UsageError, match=allowed):
        cap_libraries()
    monkeypatch.setenv("FMINFER_CPU", "avx512")
    with pytest.raises(UsageError, match=r"has no avx512bw, .*unset FMINFER_CPU"):
        cap_libraries()


@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
def test_builds_for_each_processor_are_kept_apart(
    greatest: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = find_compiler()
    assert compiler is not None
    keys = set()
    for name in ("native", *LEVELS):
        monkeypatch.setenv("FMINFER_CPU", name)
        keys.add(kernel_build._make_build_key(compiler))
    assert len(keys) == 1 + len(LEVELS)
    assert list(choose_compiler_flags()) == [
        "-march=x86-64-v4",
        "-mavx512bf16",
        "-mamx-tile",
        "-mamx-bf16",
    ]


@needs_avx2
def test_torch_and_the_command_keep_to_it(tmp_path: Path) -> None:
    code = "import fminfer; fminfer.Engine; from torch.backends import cpu; "
    code += "print(cpu.get_cpu_capability())"
    environ = os.environ | {"FMINFER_CPU": "avx2"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True
    )
    assert done.stdout == "AVX2\n", done.stderr
    environ["FMINFER_CPU"] = "286"
    command = [sys.executable, "-m", "fminfer", "status", str(tmp_path)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 2 and "FMINFER_CPU is '286'" in done.stderr
