"""Refuses a configuration in Python, and shows the TOML to write in its place.

The file is read, never executed: what it computes is left out.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

from fminfer.cli.config_aliases import translate
from fminfer.cli.config_keys import known_keys
from fminfer.core.errors import UsageError

# Of EnergonAI's files: where its own processes met, and how it made its engine.
OF_ITS_OWN = ("host", "port", "backend", "engine_server", "model_type")
UNTOLD = "an expression; write what it gives"


def refuse_python(path: Path) -> str:
    """Return the message that refuses a Python file, with the same in TOML as far as it is told."""
    try:
        tree = ast.parse(path.read_bytes())
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    except (SyntaxError, ValueError) as error:
        return f"{path} is no TOML, and no Python either: {error}"
    toml = path.with_suffix(".toml")
    text = "\n".join(_lines(tree))
    return (
        f"{path} is Python, which is never executed. Write this into {toml}, and give --config "
        f"{toml}:\n\n{text}\n"
    )


def _lines(tree: ast.Module) -> Iterator[str]:
    """Write each assignment under our name of its key, or as a comment with the reason."""
    told: dict[str, object] = {}
    for node in tree.body:
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        key, source = node.targets[0].id, " ".join(ast.unparse(node.value).split())
        value = _value(node.value)
        if key in OF_ITS_OWN:
            yield f"# {key} = {source}: of EnergonAI's own processes, not needed here"
        elif key not in known_keys():
            yield f"# {key} = {source}: not known here"
        elif value is None:
            yield f"# {key} = {source}: {UNTOLD}"
        else:
            try:
                translate({key: value}, str)
            except UsageError as error:
                yield f"# {error}"
            else:
                told[key] = value
    for entry in translate(told, str)[0]:
        yield f"{entry.key.replace('_', '-')} = {_toml(entry.value)}"


def _value(node: ast.expr) -> str | int | float | list[object] | None:
    """Return a literal's value; a name, such as opt_125M, is told as it stands."""
    if isinstance(node, ast.Name):
        return node.id
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    each = value if isinstance(value, list) else [value]
    return value if all(isinstance(one, str | int | float) for one in each) else None


def _toml(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False)  # of text, numbers and booleans TOML is the same
