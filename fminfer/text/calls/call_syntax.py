"""How each form writes its calls, as texts around names and arguments: what grammars force."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fminfer.core.config import KnownParser


@dataclass(slots=True, frozen=True)
class TagSyntax:
    """Texts around the keys and values of arguments that are written one by one."""

    before_key: str
    before_value: str
    after_value: str
    separator: str = ""
    key: str = r'[^<>"\s]+'  # a regex in Python's form
    free_key: str = key  # of an argument without a schema, in Rust's form
    has_raw_text: bool = True  # of strings; otherwise all values are JSON


@dataclass(slots=True, frozen=True)
class CallSyntax:
    """Texts of one form: `opening`, then calls with `between` between them, then `closing`.

    A call is `before_name`, its name, `before_arguments`, its arguments, `after_arguments`.
    """

    before_name: str
    before_arguments: str
    after_arguments: str
    trigger: str  # in a text, a call begins here
    opening: str = ""
    between: str | None = "\n"  # None: an answer has one call
    closing: str = ""
    lead: str = ""  # may stand before all of it
    tags: TagSyntax | None = None  # None: the arguments are an object in JSON
    begins_answer: bool = False  # calls stand at the beginning of an answer alone
    free_marks: tuple[str, ...] = ()  # special tokens that may stand in other text
    template_sign: str = ""  # a text in the templates of its models; "": all others


def _make_list_syntax(
    trigger: str, opening: str, closing: str = "]", sign: str = ""
) -> CallSyntax:
    """Return the syntax of a list of JSON objects between two texts."""
    return CallSyntax(
        '{"name": "',
        '", "arguments": ',
        "}",
        trigger,
        opening=opening,
        between=", ",
        closing=closing,
        template_sign=sign,
    )


_DEEPSEEK = CallSyntax(
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁begin｜>",
    opening="<｜tool▁calls▁begin｜>",
    between="",
    closing="<｜tool▁calls▁end｜>",
)
# By form, its variants: the first whose sign a template has is the model's.
SYNTAXES: dict[KnownParser, tuple[CallSyntax, ...]] = {
    "hermes": (
        CallSyntax(
            '<tool_call>\n{"name": "',
            '", "arguments": ',
            "}\n</tool_call>",
            "<tool_call>",
        ),
    ),
    "llama3_json": (
        CallSyntax(
            '{"name": "',
            '", "parameters": ',
            "}",
            "{",
            between="; ",
            lead="<|python_tag|>",
            begins_answer=True,
        ),
    ),
    "qwen3_coder": (
        CallSyntax(
            "<tool_call>\n<function=",
            ">\n",
            "</function>\n</tool_call>",
            "<tool_call>",
            tags=TagSyntax("<parameter=", ">\n", "\n</parameter>\n"),
        ),
    ),
    "glm45": (
        CallSyntax(
            "<tool_call>",
            "\n",
            "</tool_call>",
            "<tool_call>",
            tags=TagSyntax("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
        ),
    ),
    "pythonic": (
        CallSyntax(
            "",
            "(",
            ")",
            "[",
            opening="[",
            between=", ",
            closing="]",
            lead="<|python_start|>",
            # in Rust, \w has marks and joiners that Python's has not
            tags=TagSyntax(
                before_key="",
                before_value="=",
                after_value="",
                separator=", ",
                key=r"[^\W\d]\w*",
                free_key=r"[\p{L}_][\p{L}\p{Nd}_]*",
                has_raw_text=False,
            ),
            begins_answer=True,
        ),
    ),
    "mistral": (
        CallSyntax(
            "[TOOL_CALLS]",
            "[ARGS]",
            "",
            "[TOOL_CALLS]",
            between="",
            template_sign="[ARGS]",
        ),
        _make_list_syntax("[TOOL_CALLS]", "[TOOL_CALLS]["),
    ),
    "openai": (
        CallSyntax(
            "<|channel|>commentary to=functions.",
            " <|constrain|>json<|message|>",
            "",
            "to=functions.",
            between=None,
            lead="<|start|>assistant",
            free_marks=("<|channel|>", "<|message|>", "<|start|>", "<|end|>"),
        ),
    ),
    "deepseek_v3": (
        replace(
            _DEEPSEEK,
            before_name="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            before_arguments="\n```json\n",
            after_arguments="\n```<｜tool▁call▁end｜>",
            between="\n",
            template_sign="```json",
        ),
        _DEEPSEEK,
    ),
    "granite": (
        _make_list_syntax("<|tool_call|>", "<|tool_call|>["),
        _make_list_syntax("<tool_call>", "<tool_call>["),
    ),
    "phi4_mini_json": (
        _make_list_syntax("functools[", "functools[", sign="functools"),
        _make_list_syntax("<|tool_call|>", "<|tool_call|>[", "]<|/tool_call|>"),
    ),
    "minimax_m2": (
        CallSyntax(
            '<invoke name="',
            '">\n',
            "</invoke>",
            "<minimax:tool_call>",
            opening="<minimax:tool_call>\n",
            closing="\n</minimax:tool_call>",
            tags=TagSyntax('<parameter name="', '">', "</parameter>\n"),
        ),
    ),
}


def choose_variant(form: KnownParser, template: str) -> int:
    """Return the place of a form's variant that a chat template shows."""
    variants = SYNTAXES[form]
    return next(
        place
        for place, variant in enumerate(variants)
        if variant.template_sign in template
    )
