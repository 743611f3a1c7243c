"""The types of the options' values: what each accepts, and how it refuses the rest."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, get_args

import click

from fminfer.core.config import DType, ModelDType
from fminfer.machine.stopper import parse_duration


class Read(click.ParamType):  # type: ignore[type-arg]
    """Values that one function reads from a text, and another one writes for help."""

    def __init__(
        self, name: str, read: Callable[[str], Any], write: Callable[[Any], str], kind: type
    ) -> None:
        self.name, self._read, self.write, self._kind = name, read, write, kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return value if isinstance(value, self._kind) else self._read(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _read_numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise ValueError(f"{text!r} is not whole numbers with commas between them") from None


def _read_pipe(text: str) -> str:
    if not text.startswith("pipe_"):
        raise ValueError(f"{text!r} does not begin with pipe_")
    return text


def _read_size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(?:i?B)?", text, re.IGNORECASE)
    size = int(float(found[1]) * 1024 ** (1 + "KMGT".index(found[2].upper()))) if found else 0
    if size == 0:
        raise ValueError(f"{text!r} is no size; give a number and K, M, G or T, as in 80G")
    return size


def _read_rate(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([GT])(?:B?/s)?", text, re.IGNORECASE)
    if found is None or not float(found[1]):
        raise ValueError(f"{text!r} is no rate; give 10⁹ or 10¹² a second, as in 300G or 1.5T")
    return float(found[1]) * (1e9 if found[2].upper() == "G" else 1e12)


def _write_size(size: int) -> str:
    power = max(n for n in range(5) if size % 1024**n == 0)
    return f"{size // 1024**power}{['', *'KMGT'][power]}"


NUMBERS = Read("N,N,…", _read_numbers, lambda value: ",".join(map(str, value)), tuple)
DURATION = Read("H:MM:SS", parse_duration, "{:g} s".format, float)
PIPE = Read("pipe_…", _read_pipe, str, bytes)
BYTE_SIZE = Read("SIZE", _read_size, _write_size, int)
RATE = Read("RATE", _read_rate, "{:g}".format, float)


class DTypeName(click.Choice):  # type: ignore[type-arg]
    """A dtype, also in the short names that others give them."""

    SHORT: ClassVar = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(self.SHORT.get(str(value).lower(), value), param, ctx)


class PathOrUrl(click.Path):
    """A path, or a URL as it stands: a path would lose one of its slashes."""

    envvar_list_splitter = ","  # a URL has the colon that stands between paths

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        is_url = isinstance(value, str) and "://" in value
        return value if is_url else super().convert(value, param, ctx)


class Words(click.types.StringParamType):
    """A text of an option that may be repeated; a variable holds several with commas between."""

    def split_envvar_value(self, rv: str) -> list[str]:
        return [word for part in rv.split(",") if (word := part.strip())]


class WholeText(Words):
    """A text of an option that may be repeated; a variable holds one, with all its spaces."""

    def split_envvar_value(self, rv: str) -> list[str]:
        return [rv]


PATH, LOCATION = click.Path(path_type=Path), PathOrUrl(path_type=Path)
TYPES: Mapping[Any, click.ParamType[Any]] = {  # of Python's types, and of annotations
    **{str: click.STRING, int: click.INT, float: click.FLOAT, bool: click.BOOL},
    **{Path: PATH, tuple[Path, ...]: PATH, tuple[int, ...]: NUMBERS, tuple[str, ...]: Words()},
    **{Path | str: LOCATION, tuple[Path | str, ...]: LOCATION},
    **{kind: DTypeName(get_args(kind), case_sensitive=False) for kind in (DType, ModelDType)},
    **{"duration": DURATION, "size": BYTE_SIZE, "rate": RATE, "whole": WholeText(), "pipe": PIPE},
    "folder": click.Path(file_okay=False, path_type=Path),
}
