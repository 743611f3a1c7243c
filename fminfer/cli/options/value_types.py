"""The types of the options' values: what each understands, and what it says of anything else."""

from __future__ import annotations

import re
from typing import Any, ClassVar, get_args

import click

from fminfer.core.config import DType
from fminfer.machine.stopper import parse_duration


class Numbers(click.ParamType):  # type: ignore[type-arg]
    """Whole numbers with commas between them."""

    name = "N,N,…"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not whole numbers with commas between them", param, ctx)

    def written(self, value: tuple[int, ...]) -> str:
        """Write a value as people type it."""
        return ",".join(map(str, value))


class DTypeName(click.Choice):  # type: ignore[type-arg]
    """A dtype, also in the short names that others give them."""

    LATER: ClassVar = ("int8", "int4")
    SHORT: ClassVar = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}

    def __init__(self) -> None:
        super().__init__(get_args(DType), case_sensitive=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if str(value).lower() in self.LATER:
            bits = str(value)[3:]
            self.fail(
                f"{value!r}: weights of {bits} bits are not there yet; give float16, bfloat16 or "
                "float32",
                param,
                ctx,
            )
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


class Duration(click.ParamType):  # type: ignore[type-arg]
    """Seconds, or hours, minutes and seconds."""

    name = "H:MM:SS"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            return value if isinstance(value, float) else parse_duration(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)

    def written(self, value: float) -> str:
        """Write a value as people type it."""
        return f"{value:g}"


class ByteSize(click.ParamType):  # type: ignore[type-arg]
    """Bytes, with a letter for their unit."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(?:i?B)?", str(value), re.IGNORECASE)
        size = int(float(found[1]) * 1024 ** (1 + "KMGT".index(found[2].upper()))) if found else 0
        if size == 0:
            self.fail(
                f"{value!r} is no size; give a number and K, M, G or T, as in 80G", param, ctx
            )
        return size

    def written(self, value: int) -> str:
        """Write a value as people type it: 16777216 is 16M."""
        power = max(n for n in range(5) if value % 1024**n == 0)
        return f"{value // 1024**power}{['', *'KMGT'][power]}"
