"""Writes tool calls as models do, in each form that is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from fminfer.core.config import KnownParser

Call = tuple[str, dict[str, Any]]  # a function's name, and its arguments
Writer = Callable[[Sequence[Call]], str]


def dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def entries(calls: Sequence[Call], key: str = "arguments") -> list[dict[str, Any]]:
    return [{"name": name, key: arguments} for name, arguments in calls]


def write_hermes(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n{dump(entry)}\n</tool_call>" for entry in entries(calls)
    )


def write_llama3(calls: Sequence[Call]) -> str:
    return "; ".join(map(dump, entries(calls, "parameters")))


def write_python_value(value: object) -> str:
    """Write a value as Python does; strings in double quotes, as models prefer."""
    if isinstance(value, str):
        return dump(value)
    if isinstance(value, list):
        return f"[{', '.join(map(write_python_value, value))}]"
    if isinstance(value, dict):
        pairs = (f"{dump(key)}: {write_python_value(value[key])}" for key in value)
        return f"{{{', '.join(pairs)}}}"
    return repr(value)


def write_pythonic(calls: Sequence[Call]) -> str:
    texts = []
    for name, arguments in calls:
        pairs = (f"{key}={write_python_value(arguments[key])}" for key in arguments)
        texts.append(f"{name}({', '.join(pairs)})")
    return f"[{', '.join(texts)}]"


def write_mistral(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{dump(each)}" for name, each in calls)


def write_mistral_list(calls: Sequence[Call]) -> str:
    return f"[TOOL_CALLS]{dump(entries(calls))}"


def write_qwen_value(value: object) -> str:
    """Write a value as Qwen3-Coder's template does: Python's text, but JSON of lists."""
    return dump(value) if isinstance(value, (dict, list)) else str(value)


def write_qwen3_coder(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(
            f"<parameter={key}>\n{write_qwen_value(value)}\n</parameter>\n"
            for key, value in arguments.items()
        )
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def write_bare(value: object) -> str:
    """Write a string as it is, and anything else as JSON."""
    return value if isinstance(value, str) else dump(value)


def write_glm45(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{write_bare(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    )


def write_minimax_m2(calls: Sequence[Call]) -> str:
    texts = [
        f'<invoke name="{name}">\n'
        + "".join(
            f'<parameter name="{key}">{write_bare(value)}</parameter>\n'
            for key, value in arguments.items()
        )
        + "</invoke>\n"
        for name, arguments in calls
    ]
    return f"<minimax:tool_call>\n{''.join(texts)}</minimax:tool_call>"


def write_deepseek_v3(calls: Sequence[Call]) -> str:
    texts = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n"
        f"```json\n{dump(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return f"<｜tool▁calls▁begin｜>{chr(10).join(texts)}<｜tool▁calls▁end｜>"


def write_deepseek_v31(calls: Sequence[Call]) -> str:
    texts = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dump(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return f"<｜tool▁calls▁begin｜>{''.join(texts)}<｜tool▁calls▁end｜>"


def write_openai(calls: Sequence[Call]) -> str:
    return "<|call|>".join(
        f"<|start|>assistant<|channel|>commentary to=functions.{name} "
        f"<|constrain|>json<|message|>{dump(arguments)}"
        for name, arguments in calls
    )


def write_openai_recipient(calls: Sequence[Call]) -> str:
    """Write calls with the recipient first, behind a prompt that ends in `assistant`."""
    return "<|call|><|start|>assistant".join(
        f" to=functions.{name}<|channel|>commentary json<|message|>{dump(arguments)}"
        for name, arguments in calls
    )


def write_granite(calls: Sequence[Call]) -> str:
    return f"<|tool_call|>{dump(entries(calls))}"


def write_phi4(calls: Sequence[Call]) -> str:
    return f"<|tool_call|>{dump(entries(calls))}<|/tool_call|>"


def write_phi4_functools(calls: Sequence[Call]) -> str:
    return f"functools{dump(entries(calls))}"


# The first writer of a form is the one that its current models follow.
WRITERS: dict[KnownParser, tuple[Writer, ...]] = {
    "hermes": (write_hermes,),
    "llama3_json": (write_llama3,),
    "pythonic": (write_pythonic,),
    "mistral": (write_mistral, write_mistral_list),
    "qwen3_coder": (write_qwen3_coder,),
    "glm45": (write_glm45,),
    "minimax_m2": (write_minimax_m2,),
    "deepseek_v3": (write_deepseek_v31, write_deepseek_v3),
    "openai": (write_openai, write_openai_recipient),
    "granite": (write_granite,),
    "phi4_mini_json": (write_phi4, write_phi4_functools),
}


def write_calls(form: KnownParser, calls: Sequence[Call]) -> str:
    """Write calls as the current models of a form do."""
    return WRITERS[form][0](calls)
