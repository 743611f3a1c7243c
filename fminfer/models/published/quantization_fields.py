"""Reads a config's `quantization_config`, and notes which of its fields were read."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import TypeGuard, TypeVar

from fminfer.core.errors import CheckpointError

Value = TypeVar("Value")
MOST_SIZE = 1 << 20  # outputs or inputs that share a scale
# What the paths of a text model begin with, if it is a part of another or not.
_PREFIX = re.compile(r"((model|language_model)\.)+")
REMEDY = (
    "Take the model in 16 bits, as a GGUF file, or quantized as docs/models.md lists"
)


def _is_size(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 < value < MOST_SIZE


class QuantizationFields:
    """A part of a `quantization_config`. What is null counts as absent."""

    def __init__(self, fields: object, path: str = "quantization_config") -> None:
        if not isinstance(fields, dict):
            raise CheckpointError(
                f"config.json sets {path} to {reprlib.repr(fields)}; an object is allowed"
            )
        self._path = path
        self._fields = {
            name: value for name, value in fields.items() if value is not None
        }
        self._unread = {*self._fields}

    def find(self, name: str, default: object = None) -> object:
        """Return the value of a field, of any type."""
        self._unread.discard(name)
        return self._fields.get(name, default)

    def choose(
        self, name: str, allowed: Collection[Value], default: Value | None = None
    ) -> Value:
        """Return the value of a field that has one of a few."""
        value = self.find(name, default)
        for each in allowed:
            if type(value) is type(each) and value == each:
                return each
        raise self.refusal_error(name, f"{', '.join(map(repr, allowed))} run")

    def read_group(self, name: str, default: int = 0) -> int:
        """Return how many inputs share a scale; 0: a whole row does, which is written as -1."""
        value = self.find(name, default or -1)
        if value == -1:
            return 0
        if not _is_size(value):
            raise self.refusal_error(name, "-1, or the inputs that share a scale")
        return value

    def read_tile(self, name: str) -> tuple[int, int]:
        """Return the outputs and inputs that share a scale; 0: all do, where it is absent."""
        value = self.find(name)
        if value is None:
            return 0, 0
        if isinstance(value, str) and re.fullmatch(r"\d{1,6}x\d{1,6}", value):
            value = [*map(int, value.split("x"))]
        if not (
            isinstance(value, list) and len(value) == 2 and all(map(_is_size, value))
        ):
            raise self.refusal_error(name, "two sizes such as [128, 128] are allowed")
        outputs, inputs = value
        return outputs, inputs

    def read_rules(self, *names: str) -> ModuleRules:
        """Return the modules that lists of names choose."""
        patterns: list[object] = []
        for name in names:
            value = self.find(name, [])
            if not isinstance(value, list):
                raise self.refusal_error(name, "a list of names of modules is allowed")
            patterns += value
        return make_rules(patterns, f"{self._path}.{', '.join(names)}")

    def read_parts(self, name: str) -> Mapping[str, QuantizationFields]:
        """Return the parts of an object of objects, such as groups of modules."""
        value = self.find(name, {})
        if not isinstance(value, dict):
            raise self.refusal_error(name, "an object is allowed")
        path = f"{self._path}.{name}"
        return {
            key: QuantizationFields(part, f"{path}[{reprlib.repr(key)}]")
            for key, part in value.items()
        }

    def read_part(self, name: str) -> QuantizationFields:
        """Return an object of fields."""
        return QuantizationFields(self.find(name, {}), f"{self._path}.{name}")

    def refuse(self, name: str, reason: str) -> None:
        """Refuse a field that is there, and neither false nor empty."""
        if self.find(name):
            raise self.refusal_error(name, reason)

    def check_unread(self, harmless: str) -> None:
        """Refuse the fields that nothing has read, but those that change no answer."""
        for name in sorted(self._unread - {*harmless.split()}):
            raise self.refusal_error(name, "fminfer does not know what it changes")

    def refusal_error(self, name: str, reason: str) -> CheckpointError:
        """Return the error of a field that does not run."""
        value = reprlib.repr(self._fields.get(name))
        field = f"{self._path}.{reprlib.repr(name)[1:-1]}"
        return CheckpointError(
            f"config.json sets {field} to {value}: {reason}. {REMEDY}"
        )


@dataclass(slots=True, frozen=True)
class ModuleRules:
    """Modules by their paths, by parts of them, or by regular expressions."""

    paths: frozenset[str]
    patterns: tuple[re.Pattern[str], ...] = ()

    def match(self, module: str) -> bool:
        """Tell whether a module, by its path, is one of them or lies in one."""
        # as it is, and as a part of a model with images
        core = _PREFIX.sub("", module, count=1)
        wheres = ("language_model.", "language_model.model.", "model.language_model.")
        names = (module, *(where + core for where in wheres))
        if any(pattern.match(name) for pattern in self.patterns for name in names):
            return True
        parts = module.split(".") if self.paths else []
        ends = combinations(range(len(parts) + 1), 2)
        return any(".".join(parts[first:last]) in self.paths for first, last in ends)


def make_rules(names: Iterable[object], path: str) -> ModuleRules:
    """Make rules of names such as "lm_head", "model.layers.*.mlp.gate" and "re:.*gate$"."""
    paths = set()
    patterns = []
    for name in names:
        if not isinstance(name, str):
            raise CheckpointError(
                f"config.json sets {path} to {reprlib.repr(name)}; names of modules are "
                "allowed"
            )
        if name.startswith("re:"):
            patterns.append(compile_pattern(name.removeprefix("re:"), path))
        elif "*" in name:
            patterns.append(compile_pattern(rf"(?:{name})(?:\.|$)", path))
        else:
            paths.add(_PREFIX.sub("", name.removesuffix(".weight"), count=1))
    return ModuleRules(frozenset(paths), tuple(patterns))


def compile_pattern(text: str, path: str) -> re.Pattern[str]:
    """Compile a regular expression of a config."""
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise CheckpointError(
            f"config.json sets {path} to {reprlib.repr(text)}, which is no regular "
            f"expression: {error}. {REMEDY}"
        ) from error
