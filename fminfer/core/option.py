"""Options as fields of dataclasses: each is declared once, with all facts about it.

They become flags, arguments of `fminfer.Engine`, keys of configuration files, FMINFER_
variables, what journals record, what ranks compare, and the reference in docs/running.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from functools import cache, reduce
from numbers import Integral, Real
from operator import or_
from os import PathLike
from pathlib import Path
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from fminfer.core.errors import UsageError

GROUPS = (  # titles of the help, in its order
    "Input and output",
    "Tables",
    "Server",
    "Jobs",
    "Queue",
    "Check",
    "Bench",
    "Requests",
    "Model",
    "Engine elsewhere",
    "Speed and memory",
    "Kept answers",
    "Ranks",
    "Made-up requests and --prompt",
    "Configuration",
    "Old command lines",
    "Help",
)
EMPTY = "the value is empty; is a variable of the shell unset?"
Command = Literal["run", "serve", "check", "bench", "submit", "quantize"]
OF_ENGINE: tuple[Command, ...] = ("run", "serve", "check", "bench")
OF_WEIGHTS: tuple[Command, ...] = (*OF_ENGINE, "quantize")  # all that read weights


@dataclass(slots=True, frozen=True)
class Least:
    """The least value of a number. If it is shown, help says it and click checks it."""

    number: int
    is_shown: bool = False


@dataclass(slots=True, frozen=True)
class PlaceHint:
    """What may name a place, such as a path."""

    noun: str  # what an error calls such a place


KINDS: dict[Any, Any] = {  # the values that each type accepts
    **{bool: Integral, int: Integral, float: Real, tuple: tuple, dict: Mapping},
    str: (str, PathLike),
}
# Types that say more than Python's: limits, and how a value is written on the command line.
Count = Annotated[int, Least(1)]
Amount = Annotated[int, Least(0)]
ShownCount = Annotated[int, Least(1, True)]
ShownAmount = Annotated[int, Least(0, True)]
ModelPlace = Annotated[str, PlaceHint("a path or hub id")]
ConfigPlace = Annotated[str, PlaceHint("a path, hub id or size")]
FILE = PlaceHint("the path of a file")  # fingerprints have a digest of its content
TextFile = Annotated[str, FILE]
Seconds = Annotated[float, "duration", Least(0)]
Bytes = Annotated[int, "size", Least(1)]
Rate = Annotated[float, "rate", Least(1)]  # a second: of bytes, or of operations
Folder = Annotated[Path, "folder"]
PipeName = Annotated[str, "pipe"]  # of a schedule, as the old tool calls it
# a variable holds one text, with its commas
WholeTexts = Annotated[tuple[str, ...], "whole"]


@dataclass(slots=True, frozen=True)
class Option:
    """The facts about one option."""

    help: str
    group: str | Mapping[Command, str] = "Help"
    commands: tuple[Command, ...] = ()  # those that have it as a flag
    flags: tuple[str, ...] = ()  # (): one flag, made from the name
    metavar: str | None = None
    # "answers": kept answers depend on it. "requests": it shows in prepared requests, or decides
    # whether they are answered. Journals record both, if the value is not the default.
    alters: Literal["", "answers", "requests"] = ""
    # at its default, too: of options older than this rule
    is_always_recorded: bool = False
    must_agree: bool = False  # all ranks must have the same value
    sets: str = ""  # the field of requests that it sets
    # Its old names, each with what old values mean today; {}: the same. Names with -- are flags,
    # others are keys of configuration files.
    old: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    name: str = ""  # from here on: of the dataclass field
    default: Any = None
    hint: Any = None

    @property
    def all_flags(self) -> tuple[str, ...]:
        """The flags: `is_wait` and `wait_s` give --wait, `wait_bytes` gives --wait-size."""
        plain = self.name.removeprefix("is_").removesuffix("_s")
        return self.flags or (
            f"--{plain.replace('_bytes', '_size').replace('_', '-')}",
        )

    @property
    def told(self) -> str:
        """What messages and journals call it."""
        if self.commands or self.flags:
            return self.all_flags[0]
        return f"the {self.name.replace('_', ' ')}"

    @property
    def type_name(self) -> str:
        """The type as Python writes it, a closed set as its values."""
        kind = unwrap_hint(self.hint)
        name = getattr(kind, "__name__", "") if not get_args(kind) else str(kind)
        name = (
            " | ".join(map(repr, get_args(kind)))
            if get_origin(kind) is Literal
            else name
        )
        return f"{name} | None" if is_optional(self.hint) else name

    @property
    def old_flags(self) -> dict[str, Mapping[str, Any]]:
        """Old flags that `fminfer` shows, with what their values mean."""
        return {
            name: values
            for name, values in self.old.items()
            if values and name[0] == "-"
        }

    def check_value(self, value: Any, name: str) -> None:
        """Raise UsageError for a value outside the option's type or limits.

        `name` is what the message calls the option.
        """
        if value is None and is_optional(self.hint):
            return
        marks = find_annotations(self.hint)
        texts = value if isinstance(value, tuple) else (value,)
        if "" in texts and "whole" not in marks:
            raise UsageError(f"{name}: {EMPTY}")
        kind = unwrap_hint(self.hint)
        if get_origin(kind) is Literal and value not in (allowed := get_args(kind)):
            raise UsageError(
                f"{name} is {value!r}; it must be one of {', '.join(allowed)}"
            )
        if not _is_of_type(kind, value):
            noun = next(
                (mark.noun for mark in marks if isinstance(mark, PlaceHint)),
                self.type_name,
            )
            raise UsageError(
                f"{name} is of type {type(value).__name__}; give {noun}, not {value!r:.100}"
            )
        for mark in marks:
            if isinstance(mark, Least) and not value >= mark.number:  # or nan
                raise UsageError(
                    f"{name} is {value}; it must be at least {mark.number}"
                )


def option(
    help: str, *, default: Any = None, is_positional: bool = False, **facts: Any
) -> Any:
    """Return a dataclass field that declares an option; `facts` are fields of `Option`.

    None as the default is False for a bool, and () for a tuple.
    """
    return field(
        default=default,
        kw_only=not is_positional,
        metadata={"option": Option(help, **facts)},
    )


def _is_of_type(kind: Any, value: Any) -> bool:
    """Tell whether a value, and each item of a tuple, is of a type; True for unknown types."""
    if get_origin(kind) is tuple and isinstance(value, tuple | list):
        return all(_is_of_type(get_args(kind)[0], each) for each in value)
    return isinstance(value, KINDS.get(get_origin(kind) or kind, object))


def is_optional(hint: Any) -> bool:
    """Tell whether a type allows None."""
    return type(None) in get_args(hint)


def unwrap_hint(hint: Any) -> Any:
    """Return a type without None and without annotations."""
    if get_origin(hint) is Annotated:
        return unwrap_hint(get_args(hint)[0])
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    return unwrap_hint(reduce(or_, kinds)) if is_optional(hint) else hint


def find_annotations(hint: Any) -> list[Any]:
    """Return the annotations of a type and of the types in it."""
    return [
        *(hint.__metadata__ if get_origin(hint) is Annotated else ()),
        *(mark for each in get_args(hint) for mark in find_annotations(each)),
    ]


def options_of(table: type, *, is_own: bool = False) -> dict[str, Option]:
    """Return the options of a dataclass by name; its own, none that it inherits, if `is_own`."""
    return _options_of(table, is_own)


@cache
def _options_of(table: type, is_own: bool) -> dict[str, Option]:
    hints = get_type_hints(table, include_extras=True)
    return {
        each.name: replace(
            each.metadata["option"],
            name=each.name,
            default=each.default,
            hint=hints[each.name],
        )
        for each in fields(table)
        if "option" in each.metadata
        and not (is_own and each.name not in table.__annotations__)
    }


Table = TypeVar("Table")


def pop_options(table: type[Table], params: dict[str, Any]) -> Table:
    """Make a dataclass of its options, and remove these from a command's parameters."""
    return table(
        **{name: params.pop(name) for name in options_of(table) if name in params}
    )


class Options:
    """A dataclass of options; it refuses wrong values, its `check` those that do not fit."""

    calls_flags: ClassVar[bool] = False  # whether messages name options by their flags

    def __init_subclass__(cls) -> None:
        """Make False the default of switches, and () that of lists, where none is declared."""
        hints = get_type_hints(cls, include_extras=True)
        for name in cls.__annotations__:
            declared = vars(cls).get(name)
            if not isinstance(declared, Field) or declared.default is not None:
                continue
            if not is_optional(hints[name]):
                kind = unwrap_hint(hints[name])
                assert kind is bool or get_origin(kind) is tuple, (
                    f"{name} needs a default"
                )
                declared.default = False if kind is bool else ()

    def __post_init__(self) -> None:
        for name, each in options_of(type(self)).items():
            each.check_value(getattr(self, name), self.shown_name(name))
        for table in type(self).__mro__:
            if "check" in vars(table):
                table.check(self)  # type: ignore[attr-defined]

    def shown_name(self, name: str) -> str:
        """Return what messages call an option."""
        return options_of(type(self))[name].told if self.calls_flags else name


def describe_options(table: type) -> str:
    """Return a line for each option: its name, type, default and help."""
    return "\n".join(
        f"{name}: {each.type_name} = {each.default!r}  {each.help}"
        for name, each in options_of(table).items()
    )


Init = TypeVar("Init", bound=Callable[..., None])


def document_options(init: Init, table: type) -> Init:
    """Have `help` list the options that an `__init__` accepts, with their meanings."""
    signature = inspect.signature(init)
    declared = [
        each
        for each in signature.parameters.values()
        if each.kind is not each.VAR_KEYWORD
    ]
    options = [
        each.replace(kind=each.KEYWORD_ONLY)
        for each in inspect.signature(table).parameters.values()
        if each.name not in signature.parameters
    ]

    documented: Any = init
    documented.__doc__ = f"Load the model. The options:\n\n{describe_options(table)}\n"
    documented.__signature__ = signature.replace(parameters=[*declared, *options])
    return init
