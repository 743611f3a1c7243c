"""Turns a chat request that passed into a request whose prompt is the rendered template."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fminfer.contract.chat import ChatRequest
from fminfer.contract.prompts import check_text
from fminfer.contract.read_fields import describe_guess
from fminfer.contract.request import Request
from fminfer.contract.row_warnings import MAX_NAMES, RowWarning, cut_name
from fminfer.contract.tool_choice import CallMode, HeldCalls
from fminfer.core.config import Constraint, EngineConfig, KnownParser
from fminfer.core.errors import RequestError
from fminfer.core.thought_form import Thought
from fminfer.engine.thinking import BUDGET
from fminfer.text.calls.call_forms import find_form, find_parser
from fminfer.text.calls.call_grammars import make_calls_constraint
from fminfer.text.chat_template import (
    THOUGHT_NAMES,
    ChatTemplate,
    RenderCall,
    RenderedChat,
)
from fminfer.text.thoughts import THOUGHT_FORMS, find_thoughts, has_open_thought

# Keys of messages and of their parts that many templates do without.
_USUAL_KEYS = frozenset(
    {"role", "content", "tool_calls", "tool_call_id", "type", "text", "id"}
)

OPEN_THOUGHT = RowWarning(
    "the prompt ends inside an open thought, and the constraint holds from there on, "
    "so that the answer has no thought. A chat tells the two apart, unless "
    "--reasoning-parser is none"
)


@dataclass(slots=True, frozen=True)
class ChatIntake:
    """Renders chat requests."""

    template: ChatTemplate
    config: EngineConfig

    def begin_render(self, chat: ChatRequest, clock: str) -> RenderCall:
        """Return the call of the template for a chat, at the time of `clock`."""
        return self.template.make_call(
            chat.messages,
            chat.tools,
            adds_generation_prompt=chat.adds_generation_prompt,
            continues_final_message=chat.continues_final_message,
            args=chat.template_args,
            clock=clock,
        )

    def render(self, chat: ChatRequest, call: RenderCall) -> Request:
        """Return the request of a chat, with the prompt that the template writes."""
        rendered = self.template.finish_call(call)
        if not rendered.text:
            raise RequestError(
                "missing_prompt",
                "the chat template writes nothing for these messages; give others",
                "messages",
            )
        template = self.template.find_template(has_tools=bool(chat.tools)) or ""
        has_calls = bool(chat.tools) and chat.params.constraint is None
        parser = self._find_parser(template) if has_calls else None
        thought = self._find_thought(chat, template, rendered.text)
        warnings = (
            *chat.warnings,
            *self._find_warnings(chat, template, rendered, parser, has_calls=has_calls),
            *_find_open_beginnings(chat, thought),
        )
        params = replace(chat.params, thought=thought)
        form = None if parser is None else find_form(parser)
        marks = [] if form is None else [*form.markers]
        if thought is not None:
            tags = thought.form
            marks += [tags.opening, tags.closing, *tags.leads]
            if tags.answer_end:
                params = replace(params, stop=(*params.stop, tags.answer_end))
        if any(map(self.template.tokenizer.find_special_texts, marks)):
            # the text would lose its calls, or its thought
            params = replace(params, skip_special_tokens=False)
        if chat.held_calls is not None:
            constraint = self._make_calls_constraint(chat.held_calls, template, parser)
            params = replace(params, constraint=constraint)
        return Request(
            [check_text(rendered.text, "messages")],
            params,
            warnings,
            endpoint="chat",
            fills_context=chat.fills_context,
            tool_parser=parser,
            tools=tuple(chat.tools) if form and form.needs_tools else (),
            keeps_one_call=parser is not None and chat.keeps_one_call,
            call_mode=choose_call_mode(chat.held_calls),
        )

    def _find_parser(self, template: str) -> KnownParser | None:
        """Return the form of a model's calls; None: it is not known, or they stay text."""
        parser = self.config.tool_call_parser
        if parser == "auto":
            return find_parser(template)
        return None if parser == "none" else parser

    def _make_calls_constraint(
        self, calls: HeldCalls, template: str, parser: KnownParser | None
    ) -> Constraint:
        """Return the constraint that holds a chat's calls, which are read in a known form."""
        if parser is None:
            field = "tool_choice" if calls.is_forced else "tools"
            raise RequestError(
                "unsupported_parameter",
                f"{field} asks for calls that follow their tools, and the form of this model's "
                f"calls is not known (--tool-call-parser {self.config.tool_call_parser}). Let "
                "that option name the form, or ask for JSON by response_format",
                field,
            )
        return make_calls_constraint(
            parser,
            template,
            calls.functions,
            self.template.tokenizer.find_special_id,
            is_forced=calls.is_forced,
            is_single=calls.is_single,
        )

    def _find_thought(
        self, chat: ChatRequest, template: str, prompt: str
    ) -> Thought | None:
        """Return how an answer's thought is told from it; None: it has none.

        Raises:
            RequestError: a budget is asked for, and the model's tags are not known.
        """
        name = self.config.reasoning_parser
        if name == "auto":
            name = find_thoughts(template) or "none"
        budget = chat.thinking_budget
        if budget is None:
            budget = self.config.thinking_budget
        if budget == -1:
            budget = None
        if name == "none":
            if budget is not None:
                raise _no_tags_error(budget)
            return None
        form = THOUGHT_FORMS[name]
        prompt = prompt.rstrip()
        begun = _find_begun_text(chat)
        is_open = prompt.endswith(form.opening) or has_open_thought(begun, form)
        if prompt.endswith((form.closing, *form.leads)) or (begun and not is_open):
            return None  # the template has closed it, or the answer has begun
        if form.opening[0].isalpha() and form.opening not in prompt:
            return None  # words, which a model writes as a tag where it is told to
        if chat.tools:  # a call has a header of its own
            behind = form.behind.removesuffix("".join(form.leads[-1:]))
            form = replace(form, behind=behind)
        if chat.held_calls is not None and chat.held_calls.is_forced:
            form = replace(form, leads=())
        return Thought(form, is_open, budget, chat.includes_reasoning)

    def _find_warnings(
        self,
        chat: ChatRequest,
        template: str,
        rendered: RenderedChat,
        parser: KnownParser | None,
        *,
        has_calls: bool,
    ) -> Iterator[RowWarning]:
        """Warn of what a request wants, and the template or the run cannot do."""
        if has_calls and parser is None and self.config.tool_call_parser == "auto":
            yield RowWarning(
                "the form of this model's tool calls is not known, so that they stay text; "
                "--tool-call-parser names one"
            )
        if chat.tools and "tools" not in template:
            yield RowWarning("the chat template does not write tools")
        yield from _find_unread_names(chat, template, rendered.variables)
        yield from map(RowWarning, rendered.losses)


def choose_call_mode(calls: HeldCalls | None) -> CallMode:
    """Return whether an answer must be calls."""
    if calls is None or not calls.is_forced:
        return "auto"
    return "one" if calls.is_named else "required"


def _no_tags_error(budget: int) -> RequestError:
    return RequestError(
        "unsupported_parameter",
        f"{BUDGET} is {budget}, and the tags of this model's thoughts are not known. Name "
        "them by --reasoning-parser, or ask without that and --thinking-budget",
        BUDGET,
    )


def _find_begun_text(chat: ChatRequest) -> str:
    """Return the text of the message that is continued; "": none is."""
    if not chat.continues_final_message:
        return ""
    content = chat.messages[-1].get("content") or ""
    parts = content if isinstance(content, list) else [{"text": content}]
    return "".join(str(part.get("text") or "") for part in parts)


def _find_open_beginnings(
    chat: ChatRequest, thought: Thought | None
) -> Iterator[RowWarning]:
    """Warn of a constraint that would begin inside a thought or a JSON text."""
    begun = _find_begun_text(chat)
    if chat.params.constraint is None or thought is not None:
        return
    if any(has_open_thought(begun, form) for form in THOUGHT_FORMS.values()):
        yield OPEN_THOUGHT
    if any(begun.count(start) > begun.count(end) for start, end in ("{}", "[]")):
        yield RowWarning(
            "continue_final_message goes on from an unfinished JSON text, and the "
            "constraint asks for a whole one after it. Leave the beginning out"
        )


def _find_unread_names(
    chat: ChatRequest, text: str, read: frozenset[str]
) -> Iterator[RowWarning]:
    """Warn of variables and keys of messages that a template does not read."""
    set_names = {
        name for name, value in chat.template_args.items() if value is not None
    }
    if unread := sorted(set_names - read):
        yield RowWarning(
            "the chat template does not read these variables, which have no effect",
            tuple(
                name + describe_guess(name, read)
                for name in map(cut_name, unread[: MAX_NAMES + 1])
            ),
        )
    contents = [each.get("content") for each in chat.messages]
    parts = [part for each in contents if isinstance(each, list) for part in each]
    keys = (
        set().union(*(each.keys() for each in (*chat.messages, *parts))) - _USUAL_KEYS
    )
    if any(name in text for name in THOUGHT_NAMES):
        keys -= THOUGHT_NAMES.keys()
    if unread := sorted(key for key in keys if key not in text):
        yield RowWarning(
            "the chat template does not read these keys of messages, which have no effect",
            tuple(map(cut_name, unread[: MAX_NAMES + 1])),
        )
