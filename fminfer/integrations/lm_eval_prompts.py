"""Prompts and generation_kwargs of lm-eval as its `hf` model has them."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateError
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

from fminfer.contract.constraint import CONSTRAINTS
from fminfer.contract.field_table import COLUMNS
from fminfer.core.errors import UsageError

log = logging.getLogger(__name__)

Messages = list[dict[str, str]]
# generation_kwargs that are fields of a completions request, by the same name
PENALTIES = {"repetition_penalty", "presence_penalty", "frequency_penalty"}
PASSED_ON = frozenset(
    {*(COLUMNS.keys() - {"temperature"}), "seed", *PENALTIES, *CONSTRAINTS}
)


class ChatRenderer:
    """Renders messages with a tokenizer of transformers.

    Args:
        template: in place of the tokenizer's own.
        template_args: further variables of the template.
    """

    def __init__(
        self, tokenizer: Any, template: str | None, template_args: dict[str, Any] | None
    ) -> None:
        self._tokenizer = tokenizer
        self.template = template
        self._args = template_args or {}
        self._has_warned = False  # that system messages are left out

    def render(self, messages: Messages, *, adds_generation_prompt: bool) -> str:
        """Return the prompt's text; without a generation prompt the last message goes on.

        A template that knows no role `system` gets the other messages, as `hf` does it.

        Raises:
            UsageError: there is no template, or it cannot write these messages.
        """
        if self.template is None and not self._tokenizer.chat_template:
            raise UsageError(
                "the model has no chat template; give one by chat_template=FILE in "
                "model_args, or leave apply_chat_template out"
            )
        try:
            try:
                return self._apply_template(messages, adds_generation_prompt)
            except TemplateError as error:
                others = [
                    message for message in messages if message["role"] != "system"
                ]
                if len(others) == len(messages):
                    raise
                if not self._has_warned:
                    log.warning(
                        "the chat template refuses system messages (%s); they are left out, as "
                        "lm-eval's hf model does it",
                        error,
                    )
                self._has_warned = True
                return self._apply_template(others, adds_generation_prompt)
        except (TemplateError, ValueError) as error:
            raise UsageError(
                f"the chat template cannot write the task's messages: {error}. Give another "
                "one by chat_template=FILE, change the task, or leave out apply_chat_template"
            ) from error

    @property
    def fingerprint(self) -> str:
        """Tell these settings from the tokenizer's own, for a cache of prompts."""
        if self.template is None and not self._args:
            return ""
        settings = json.dumps([self.template, self._args], sort_keys=True, default=str)
        return "-" + hashlib.sha256(settings.encode()).hexdigest()[:16]

    def warn_of_name(self, name: str) -> None:
        """Warn if a template is named that `hf`, and so we, do not apply."""
        templates = self._tokenizer.chat_template
        if isinstance(templates, dict) and name in templates and name != "default":
            log.warning(
                "lm-eval reports the chat template %r, but its hf model applies the "
                "default one, and so does fminfer; chat_template=FILE in model_args "
                "applies another",
                name,
            )

    def _apply_template(self, messages: Messages, adds_generation_prompt: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages,
            chat_template=self.template,
            tokenize=False,
            add_generation_prompt=adds_generation_prompt,
            continue_final_message=not adds_generation_prompt,
            **self._args,
        )
        return text


@dataclass(slots=True, frozen=True)
class Generation:
    """One text to generate."""

    body: dict[str, Any]  # the completions request
    is_cut: bool  # the prompt lost its beginning

    def decode_text(self, choice: dict[str, Any], tokenizer: Any) -> str:
        """Return the completion's text up to its end.

        `hf` detokenizes the completion without its prompt; sentencepiece then drops a
        first space.
        """
        ids = tokenizer.convert_tokens_to_ids(choice["logprobs"]["tokens"])
        # Ids beyond the tokenizer's vocabulary, which checkpoints pad, have no text.
        known = [token_id for token_id in ids if token_id is not None]
        completion = str(tokenizer.decode(known, skip_special_tokens=True))
        text = str(choice["text"])
        return text if completion.startswith(text) else text.removeprefix(" ")


def plan_generation(
    ids: list[int],
    gen_kwargs: dict[str, Any],
    tokenizer: Any,
    *,
    max_length: int,
    max_gen_toks: int,
    is_read_apart: bool = False,
) -> Generation:
    """Make the request of one prompt.

    Args:
        ids: the prompt; its beginning is cut off if it leaves no room, as lm-eval asks
            of a model.
        max_length: tokens of context for prompt and completion.
        max_gen_toks: where gen_kwargs do not say.
        is_read_apart: an encoder reads the prompt, which has all of max_length.

    Raises:
        UsageError: gen_kwargs that cannot be done.
    """
    kwargs = dict(normalize_gen_kwargs(gen_kwargs, max_gen_toks))
    eos_id = tokenizer.eos_token_id
    eos = None if eos_id is None else tokenizer.decode(eos_id)
    until = handle_stop_sequences(
        [s for s in kwargs.pop("until") if s is not None], eos=eos
    )
    if "" in until:
        raise UsageError(
            "until holds an empty string, at which each text ends; remove it"
        )
    special = {stop: _special_id(stop, tokenizer) for stop in until}
    max_tokens = kwargs.pop("max_gen_toks")
    room = max_length if is_read_apart else max_length - max_tokens
    if room <= 0:
        raise UsageError(
            f"max_gen_toks is {max_tokens}, which leaves no room for a prompt in max_length, "
            f"{max_length} tokens; lower it in generation_kwargs, or in model_args for tasks "
            "that do not say"
        )
    is_sampled = kwargs.pop("do_sample")
    temperature = kwargs.pop("temperature", 0.0)
    _check_names(kwargs)
    body = {
        "prompt": ids[-room:],
        "max_tokens": max_tokens,
        "temperature": temperature if is_sampled else 0,
        "stop": [stop for stop, token_id in special.items() if token_id is None],
        # Stop strings that are special tokens never stand in a text.
        "stop_token_ids": [
            token_id for token_id in special.values() if token_id is not None
        ],
        "logprobs": 0,  # gives the tokens
    }
    body |= {name: value for name, value in kwargs.items() if name in PASSED_ON}
    return Generation(body, is_cut=len(ids) > room)


def _special_id(stop: str, tokenizer: Any) -> int | None:
    """Return the id of a stop string that is a special token."""
    ids = tokenizer.encode(stop, add_special_tokens=False)
    is_special = len(ids) == 1 and tokenizer.decode(ids, skip_special_tokens=True) == ""
    return ids[0] if is_special else None


def _check_names(kwargs: dict[str, Any]) -> None:
    unknown = {
        name
        for name in kwargs.keys() - PASSED_ON
        if (name, kwargs[name]) != ("num_beams", 1)
    }
    if unknown:
        raise UsageError(
            f"generation_kwargs holds {', '.join(sorted(unknown))}, which fminfer cannot do; it "
            "knows until, do_sample, temperature, max_gen_toks, num_beams 1, "
            f"{', '.join(sorted(PASSED_ON))}"
        )
