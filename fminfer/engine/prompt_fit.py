"""Whether a prompt and what is to be drawn fit the model's context, and prompts cut to fit it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fminfer.contract.prompts import MAX_ENTRIES
from fminfer.contract.request import DEFAULTS, SamplingParams
from fminfer.core.config import OnTooLong
from fminfer.core.errors import RequestError
from fminfer.core.quantities import counted
from fminfer.engine.scheduler import Scheduler
from fminfer.engine.sequence import RequestState
from fminfer.text.encoded_prompt import EncodedPrompt
from fminfer.text.tokenizer import Tokenizer

MAX_COUNTED_CHARS = 2**16  # a prompt up to this length is tokenized whatever the context
MAX_CUT_CHARS = 2**22  # longest prompt that --on-too-long cuts; its tokens take about a gigabyte
MAX_OWN_CUT_CHARS = 2**20  # that a request cuts itself: any client of a server may ask for it


@dataclass(slots=True, frozen=True)
class PromptFit:
    """Fits the prompts of one request.

    Args:
        fills_context: `max_tokens` of the params is an upper bound, lowered to what is left.
        source: the field that the prompts are from; errors name it.
    """

    tokenizer: Tokenizer
    context_length: int
    on_too_long: OnTooLong
    params: SamplingParams
    fills_context: bool = False
    source: str = "prompt"
    is_source: bool = False  # an encoder reads them, and a decoder has a context of its own

    def refuse_giant(self, prompt: str) -> None:
        """Refuse what cannot fit before it is tokenized, which takes 300 times its size.

        Raises:
            RequestError: it is too long.
        """
        if len(prompt) <= MAX_COUNTED_CHARS:  # the error then has the exact number
            return
        least = self.tokenizer.least_tokens(prompt)
        if least <= self._room:
            return
        if self.on_too_long == "error" and self.params.truncate_prompt_tokens is None:
            raise self._too_long(least, about="at least ")
        most = MAX_OWN_CUT_CHARS if self.on_too_long == "error" else MAX_CUT_CHARS
        if len(prompt) > most:
            raise RequestError(
                "context_length_exceeded",
                f"the prompt has {len(prompt):,} characters; prompts are cut that have at most "
                f"{most:,}, because all of them must be tokenized. Shorten the prompt",
                self.source,
            )

    def truncate(self, encoded: EncodedPrompt) -> EncodedPrompt:
        """Return the prompt as `truncate_prompt_tokens` wishes it.

        As in vLLM, a BOS in front stays if the tokenizer has put it there.
        """
        wished, num_tokens = self.params.truncate_prompt_tokens, len(encoded.ids)
        if wished == -1:
            wished = self._room if num_tokens <= self._room else self._room_of_cut
        if wished is None or not 0 < wished < num_tokens:
            return encoded
        has_bos = encoded.is_whole_text and self.params.add_special_tokens
        return self._cut(encoded, wished, self.params.truncation_side, keeps_bos=has_bos)

    def fit(self, encoded: EncodedPrompt) -> EncodedPrompt:
        """Return the prompt if it fits the context, or cut it if that is allowed.

        Raises:
            RequestError: it is too long.
        """
        if len(encoded.ids) <= self._room:
            return encoded
        room = self._room_of_cut
        if self.on_too_long == "error" or room < 1:
            raise self._too_long(len(encoded.ids))
        return self._cut(encoded, room, self.on_too_long.removeprefix("truncate-"))

    def describe(self, ids: list[int]) -> EncodedPrompt:
        """Give a prompt of ids its text and offsets."""
        return self.tokenizer.describe_ids(
            ids,
            with_offsets=self.params.echo and self.params.logprobs is not None,
            skip_special_tokens=self.params.skip_special_tokens,
        )

    def settle(self, num_prompt_tokens: int, kv: KvSize | None) -> SamplingParams:
        """Return the params with the `max_tokens` that the context leaves.

        Without it no default may make a request impossible: what the KV cache cannot hold, or
        more logprobs than a line may have.
        """
        params = self.params
        if not self.fills_context:
            return params
        num_choices = max(params.n, params.num_candidates)
        most = self.most_wished(num_prompt_tokens)
        if kv is not None:
            most = min(most, kv.most_draws(num_prompt_tokens, params.num_candidates))
        if params.logprobs is not None:
            most = min(most, MAX_ENTRIES // (num_choices * (1 + params.logprobs)))
        return replace(params, max_tokens=max(1, params.min_tokens, most))

    def most_wished(self, num_prompt_tokens: int) -> int:
        """Return the most tokens that a prompt's answer has in an unlimited KV cache."""
        return min(self.params.max_tokens, self.context_length - num_prompt_tokens)

    @property
    def _room(self) -> int:
        """How many tokens a prompt may have."""
        if self.fills_context:
            return self.context_length - max(1, self.params.min_tokens)
        # A last token that is scored and never fed needs no place.
        is_scored_only = not self.is_source and self.params.max_tokens == 0 and self.params.echo
        return self.context_length + is_scored_only - self.params.max_tokens

    @property
    def _room_of_cut(self) -> int:
        """How many a cut prompt may have: beside what completions draw, if a chat does not say."""
        least = max(DEFAULTS.max_tokens, self.params.min_tokens) if self.fills_context else 0
        return self.context_length - min(least, self.params.max_tokens) if least else self._room

    def _too_long(self, num_prompt: int, about: str = "") -> RequestError:
        context, max_tokens = self.context_length, self.params.max_tokens
        if self.is_source:
            return RequestError(
                "context_length_exceeded",
                f"the prompt has {about}{counted(num_prompt, 'token')}; this model's encoder reads "
                f"at most {context} tokens. Shorten the prompt, or let --on-too-long cut prompts",
                self.source,
            )
        asked = f" and max_tokens is {max_tokens}, {about}{num_prompt + max_tokens:,} in all"
        if self.fills_context:
            least = self.params.min_tokens
            asked = f" and min_tokens is {least}" if least > 1 else ", and one more is to be drawn"
        remedy = "Shorten the prompt or lower max_tokens, or let --on-too-long cut prompts"
        if self._room < 1:  # for any prompt
            name = "min_tokens" if self.fills_context else "max_tokens"
            remedy = f"Lower {name}, which leaves no place for a prompt"
        return RequestError(
            "context_length_exceeded",
            f"the prompt has {about}{counted(num_prompt, 'token')}{asked}; this model's maximum "
            f"context length is {context} tokens. {remedy}",
            "max_tokens" if num_prompt < context else self.source,
        )

    def _cut(
        self, encoded: EncodedPrompt, room: int, side: str, *, keeps_bos: bool = True
    ) -> EncodedPrompt:
        """Cut a prompt to `room` tokens.

        A BOS in front may stay when the left is cut, and EOS that ends what an encoder reads.
        """
        ids, num_cut = encoded.ids, len(encoded.ids) - room
        if side == "right":
            has_end = self.is_source and encoded.is_whole_text and ids[-1] == self.tokenizer.eos_id
            ids = ids[: room - has_end] + ids[len(ids) - has_end :]
        else:
            num_kept = int(keeps_bos and ids[0] == self.tokenizer.bos_id and room > 1)
            ids = ids[:num_kept] + ids[num_kept + num_cut :]
        return replace(self.describe(ids), num_cut=encoded.num_cut + num_cut)


@dataclass(slots=True, frozen=True)
class KvSize:
    """The size of the KV cache."""

    num_blocks: int
    block_size: int  # tokens

    def most_draws(self, num_prompt_tokens: int, num_sequences: int) -> int:
        """Return how many tokens each sequence of a prompt can draw; below 1 if none."""
        num_common = num_prompt_tokens // self.block_size  # full blocks that they share
        num_blocks = self.num_blocks + (num_sequences - 1) * num_common
        # The last token drawn is never fed.
        return num_blocks // num_sequences * self.block_size - num_prompt_tokens + 1


def check_room(state: RequestState, scheduler: Scheduler, num_kv_tokens: int) -> None:
    """Check that the KV cache could hold each prompt of a request alone.

    Args:
        num_kv_tokens: the size of the cache.

    Raises:
        RequestError: it could not.
    """
    params = state.prepared.params
    name, num = ("best_of", params.best_of) if params.best_of > params.n else ("n", params.n)
    lower = f"max_tokens or {name}" if num > 1 else "max_tokens"
    for prompt in state.prompts:
        if len(prompt.sequences) > scheduler.max_rows:
            raise RequestError(
                "out_of_memory",
                f"{name} is {num}, and these {len(prompt.sequences)} candidates run together; "
                f"--max-rows allows {counted(scheduler.max_rows, 'sequence')} at once. Raise it, "
                f"or lower {name}",
                name,
            )
        if len(prompt.ids_to_read) > scheduler.most_read:
            raise RequestError(
                "out_of_memory",
                f"the prompt has {counted(len(prompt.ids_to_read), 'token')}, which an encoder "
                f"reads at once; there is memory for {scheduler.most_read:,}. Shorten it, or run "
                "on a machine with more memory",
                "prompt",
            )
        if prompt.num_to_feed > 0 and not scheduler.fits(prompt):
            num_read = len(prompt.ids_to_read)
            beside = f" beside {counted(num_read, 'token')} for its encoder" if num_read else ""
            raise RequestError(
                "out_of_memory",
                f"the prompt needs the KV cache of {counted(prompt.num_kv_tokens, 'token')} for "
                f"each of its {counted(len(prompt.sequences), 'candidate')} at once{beside}; the "
                f"budget is {num_kv_tokens} tokens. Raise --budget, lower {lower}, or shorten the "
                "prompt",
                "max_tokens",
            )
