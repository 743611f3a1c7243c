"""lm-eval's generation_kwargs as a completions request, and its answer as lm-eval's `hf` has it.

It knows tokenizers of transformers, and nothing of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

from fminfer.contract.constraint import CONSTRAINTS
from fminfer.contract.field_table import COLUMNS
from fminfer.core.errors import UsageError

# generation_kwargs that are fields of a completions request, by the same name
PASSED_ON = frozenset(
    {
        *(COLUMNS.keys() - {"temperature"}),
        *("seed", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        *CONSTRAINTS,
    }
)


@dataclass(slots=True, frozen=True)
class Generation:
    """One text to generate."""

    body: dict[str, Any]  # the completions request
    is_cut: bool  # the prompt lost its beginning

    def text(self, choice: dict[str, Any], tokenizer: Any) -> str:
        """Return the completion's text up to its end.

        `hf` detokenizes the completion without its prompt; sentencepiece then drops a first space.
        """
        ids = tokenizer.convert_tokens_to_ids(choice["logprobs"]["tokens"])
        # Ids beyond the tokenizer's vocabulary, which checkpoints pad, have no text.
        known = [token_id for token_id in ids if token_id is not None]
        alone = str(tokenizer.decode(known, skip_special_tokens=True))
        text = str(choice["text"])
        return text if alone.startswith(text) else text.removeprefix(" ")


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
        ids: the prompt; its beginning is cut off if it leaves no room, as lm-eval asks of a model.
        max_length: tokens of context for prompt and completion.
        max_gen_toks: where gen_kwargs do not say.
        is_read_apart: an encoder reads the prompt, which has all of max_length.

    Raises:
        UsageError: gen_kwargs that cannot be done.
    """
    kwargs = dict(normalize_gen_kwargs(gen_kwargs, max_gen_toks))
    eos_id = tokenizer.eos_token_id
    eos = None if eos_id is None else tokenizer.decode(eos_id)
    until = handle_stop_sequences([s for s in kwargs.pop("until") if s is not None], eos=eos)
    if "" in until:
        raise UsageError("until holds an empty string, at which each text ends; remove it")
    special = {stop: _special_id(stop, tokenizer) for stop in until}
    max_tokens = kwargs.pop("max_gen_toks")
    room = max_length if is_read_apart else _room(max_tokens, max_length)
    is_sampled = kwargs.pop("do_sample")
    temperature = kwargs.pop("temperature", 0.0)
    _check_names(kwargs)
    body = {
        "prompt": ids[-room:],
        "max_tokens": max_tokens,
        "temperature": temperature if is_sampled else 0,
        "stop": [stop for stop, token_id in special.items() if token_id is None],
        # Stop strings that are special tokens never stand in a text.
        "stop_token_ids": [token_id for token_id in special.values() if token_id is not None],
        "logprobs": 0,  # gives the tokens
    }
    body |= {name: value for name, value in kwargs.items() if name in PASSED_ON}
    return Generation(body, is_cut=len(ids) > room)


def _special_id(stop: str, tokenizer: Any) -> int | None:
    """Return the id of a stop string that is a special token."""
    ids = tokenizer.encode(stop, add_special_tokens=False)
    is_special = len(ids) == 1 and tokenizer.decode(ids, skip_special_tokens=True) == ""
    return ids[0] if is_special else None


def _room(max_tokens: int, max_length: int) -> int:
    if max_tokens >= max_length:
        raise UsageError(
            f"max_gen_toks is {max_tokens}, which leaves no room for a prompt in max_length, "
            f"{max_length} tokens; lower it in generation_kwargs, or in model_args for tasks "
            "that do not say"
        )
    return max_length - max_tokens


def _check_names(kwargs: dict[str, Any]) -> None:
    unknown = {
        name for name in kwargs.keys() - PASSED_ON if (name, kwargs[name]) != ("num_beams", 1)
    }
    if unknown:
        raise UsageError(
            f"generation_kwargs holds {', '.join(sorted(unknown))}, which fminfer cannot do; it "
            "knows until, do_sample, temperature, max_gen_toks, num_beams 1, "
            f"{', '.join(sorted(PASSED_ON))}"
        )
