"""Holds a server's answer to what its request says it must be."""

from __future__ import annotations

import json
from functools import cache

from fminfer.client.held_worker import build_checker
from fminfer.core.config import Constraint
from fminfer.core.errors import UsageError
from fminfer.machine.installation import describe_install
from fminfer.text.limited_process import LimitedPool, LimitError

MAX_QUOTED = 200  # characters of an answer in an error
_too_slow = set[Constraint]()  # one of them would keep all other answers waiting


def check_held(constraint: Constraint, text: str) -> str:
    """Return why a text breaks a constraint; "": it does not, or nobody can tell.

    Nobody can of a grammar, of a regex that Python does not read, and of what takes
    longer than a limited process has.

    Raises:
        UsageError: what checks schemas is not installed.
    """
    kind = constraint.kind
    fault = ""
    if kind in ("choice", "labels"):
        value = json.loads(constraint.text)
        choices = value[0] if kind == "labels" else value
        fault = "" if text in choices else "it is none of the choices"
    elif kind in ("json", "regex") and constraint not in _too_slow:
        try:
            fault = _start_pool().ask([kind, constraint.text, text])
        except LimitError:
            _too_slow.add(constraint)
        except OSError as error:
            raise UsageError(
                "--engine checks answers by jsonschema, which does not run here: "
                f"{error}; {describe_install('remote-engine')}"
            ) from None
    if not fault:
        return ""
    quoted = json.dumps(text[:MAX_QUOTED], ensure_ascii=False)
    return (
        f"the server's answer breaks the request's constraint: {fault}. It is {quoted}"
    )


@cache
def _start_pool() -> LimitedPool:
    """Return the process that checks: a regex or a schema may take very long."""
    return LimitedPool(build_checker, 1)
