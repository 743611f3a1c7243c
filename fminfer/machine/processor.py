"""What of the processor a run may use: all of it, or as much as FMINFER_CPU names.

So one machine can try what a lesser one will do. It holds for our kernels, torch,
oneDNN and MKL.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fminfer.core.errors import UsageError
from fminfer.machine.control_groups import read_system_file

VARIABLE = "FMINFER_CPU"
NATIVE = "native"  # all that the processor has
CPUINFO = Path("/proc/cpuinfo")


@dataclass(slots=True, frozen=True)
class Level:
    """A processor that a greater one can stand for."""

    # that it has and that this package asks for, as Linux names them
    units: frozenset[str]
    compiler_flags: tuple[str, ...]
    caps: dict[str, str]  # variables that torch, oneDNN and MKL read as they load


def _make_level(units: str, flags: str, *names: str) -> Level:
    variables = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
    caps = dict(zip(variables, names, strict=True))
    return Level(frozenset(units.split()), tuple(flags.split()), caps)


# What a compiler may take from them, as x86-64-v3 and v4 say.
_AVX2 = "avx2 fma f16c bmi1 bmi2 abm movbe"
_AVX512 = f"{_AVX2} avx512f avx512bw avx512dq avx512vl avx512cd"
LEVELS = {  # from the least up
    "avx2": _make_level(_AVX2, "-march=x86-64-v3", "avx2", "AVX2", "AVX2"),
    "avx512": _make_level(
        _AVX512, "-march=x86-64-v4", "avx512", "AVX512_CORE", "AVX512"
    ),
    "avx512_bf16": _make_level(
        f"{_AVX512} avx512_bf16",
        "-march=x86-64-v4 -mavx512bf16",
        "avx512",
        "AVX512_CORE_BF16",
        "AVX512_E3",
    ),
    "amx": _make_level(
        f"{_AVX512} avx512_bf16 amx_tile amx_bf16",
        "-march=x86-64-v4 -mavx512bf16 -mamx-tile -mamx-bf16",
        "avx512",
        "AVX512_CORE_AMX",
        "AVX512_E4",
    ),
}


def read_chosen_name() -> str:
    """Return what FMINFER_CPU names; an empty text: this processor, whole."""
    name = os.environ.get(VARIABLE, "").lower()
    return "" if name == NATIVE else name


def choose_level() -> Level | None:
    """Return the processor to stand for; None: this one, whole.

    Raises:
        UsageError: FMINFER_CPU names an unknown processor, or one that this cannot stand for.
    """
    name = read_chosen_name()
    if not name:
        return None
    if name not in LEVELS:
        raise UsageError(
            f"{VARIABLE} is {name!r}; set it to {', '.join(LEVELS)}, or to {NATIVE} "
            "(all that this processor has, as without it)"
        )
    level = LEVELS[name]
    missing = sorted(level.units - _read_units())
    if missing:
        raise UsageError(
            f"{VARIABLE} is {name}, and this processor has no {', '.join(missing)}; "
            f"unset {VARIABLE} to use what it has"
        )
    return level


def choose_level_name() -> str:
    """Return the name of the greatest level that a run may use; "": this processor has none."""
    name = read_chosen_name()
    if name:
        choose_level()
        return name

    units = _read_units()
    names = [name for name, level in LEVELS.items() if level.units <= units]
    return names[-1] if names else ""


def cap_libraries() -> None:
    """Limit torch, oneDNN and MKL to the chosen processor, before any of them is loaded."""
    level = choose_level()
    if level is not None:
        os.environ.update(level.caps)


def has_unit(name: str) -> bool:
    """Tell whether a run may use a unit of the processor, such as "amx_bf16"."""
    level = choose_level()
    return name in _read_units() and (level is None or name in level.units)


def hide_tiles() -> None:
    """Keep this process, and those that it starts, from using tiles (AMX)."""
    if has_unit("amx_bf16"):
        has_pairs = has_unit("avx512_bf16")
        os.environ[VARIABLE] = "avx512_bf16" if has_pairs else "avx512"


def hides_unit(name: str) -> bool:
    """Tell whether the processor has a unit that FMINFER_CPU keeps a run from using."""
    return name in _read_units() and not has_unit(name)


def choose_compiler_flags() -> Iterable[str]:
    """Return the compiler's flags for what a run may use of the processor."""
    level = choose_level()
    return ("-march=native",) if level is None else level.compiler_flags


def describe_processor() -> str:
    """Return all that tells this processor, and how it is used, from another."""
    lines = _read_cpuinfo().splitlines()
    wanted = ("model name", "flags", "Features")
    known = sorted({line for line in lines if line.startswith(wanted)})
    return "\n".join([*(known or [platform.processor()]), *choose_compiler_flags()])


def _read_units() -> frozenset[str]:
    for line in _read_cpuinfo().splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()  # no x86, or no Linux: nobody asks for its units by name


@functools.cache
def _read_cpuinfo() -> str:
    return read_system_file(CPUINFO)
