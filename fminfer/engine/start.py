"""Makes the state of a request: its prompts, and a sequence for each candidate."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from fminfer.contract.request import RequestParams
from fminfer.core.messages import make_mask, pack_token_ids
from fminfer.engine.label_walk import LabelWalk
from fminfer.engine.logit_edits import Bans, LogitEdits
from fminfer.engine.noise import make_draw_key, make_noise_key
from fminfer.engine.sequence import (
    PreparedRequest,
    PromptState,
    RequestState,
    Sequence,
)
from fminfer.engine.thinking import ThoughtMatcher
from fminfer.text.detokenizer import Detokenizer
from fminfer.text.grammars import find_grammars
from fminfer.text.tokenizer import Tokenizer


@dataclass(slots=True, frozen=True)
class RequestStarter:
    """Starts requests; `seed` is for those without one of their own."""

    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    seed: int
    vocab_size: int = 0

    def start_request(self, request_id: int, prepared: PreparedRequest) -> RequestState:
        """Return the state of a request of which nothing is computed yet.

        Raises:
            RequestError: its constraint does not compile, or leaves nothing to draw.
        """
        state = RequestState(request_id, prepared, added_s=time.perf_counter())
        params = prepared.params
        seed = self.seed if params.seed is None else params.seed
        ids = [encoded.ids for encoded in prepared.prompts]
        if prepared.sources:
            ids = [
                source.ids + prompt_ids
                for source, prompt_ids in zip(prepared.sources, ids, strict=True)
            ]
        key = b""
        if not params.is_greedy:
            key = make_draw_key(ids, params, seed, prepared.repeat, prepared.meaning)
        bans = make_bans(params, self.tokenizer, self.eos_ids)
        stops = find_stop_tokens(params, self.tokenizer)
        end_ids = frozenset(stops) if params.ignore_eos else self.eos_ids.union(stops)
        ends = {"end_ids": end_ids, "stop_reasons": stops, "bans": bans}
        state.prompts = [
            self._start_prompt(state, index, key, ends) for index in range(len(ids))
        ]
        return state

    def _start_prompt(
        self, state: RequestState, index: int, key: bytes, ends: Mapping[str, Any]
    ) -> PromptState:
        prepared = state.prepared
        params = prepared.params
        encoded = prepared.prompts[index]
        if prepared.is_pooled:
            return PromptState(state, index, encoded)
        prompt = PromptState(state, index, encoded, **ends)
        if prepared.sources:
            prompt.source = prepared.sources[index]
        grammar = None
        labels = None
        grammars = find_grammars(self.tokenizer, self.vocab_size, self.eos_ids)
        if params.constraint is not None:
            if params.constraint.kind == "labels":
                labels = grammars.find_labels(params.constraint)
                if params.thought is None:
                    prompt.walk = LabelWalk(prompt, labels)
            else:
                grammar = grammars.find(params.constraint)
            if prepared.observation is not None and index == 0:
                prompt.observed_masks = [grammar.first_node.mask] if grammar else []
                prompt.observed_masks += [
                    make_mask(pack_token_ids(each.first_ids, grammars.num_mask_bytes))
                    for each in prepared.observation.spellings
                ]
        for candidate in range(params.num_candidates):
            sequence = Sequence(
                prompt, make_noise_key(key, index, candidate) if key else b"", None
            )
            if params.max_tokens > 0:
                sequence.detokenizer = Detokenizer(
                    self.tokenizer,
                    encoded.ids,
                    is_whole_text=encoded.is_whole_text,
                    skip_special_tokens=params.skip_special_tokens,
                )
            if params.logit_bias or params.has_penalties:
                sequence.edits = LogitEdits(params, encoded.ids)
            if params.thought is not None:
                sequence.thought = ThoughtMatcher(
                    params.thought, self.tokenizer, grammars, grammar, labels
                )
                sequence.matcher = sequence.thought
            elif grammar is not None:
                sequence.matcher = grammar.make_matcher()
            if sequence.matcher is not None:
                sequence.update_mask()
            prompt.sequences.append(sequence)
        return prompt


def find_stop_tokens(
    params: RequestParams, tokenizer: Tokenizer
) -> dict[int, str | int]:
    """Return the tokens that stop a request's sequences, with the reason in the answer.

    Texts leave special tokens out, so that a stop string which spells one is found by its id.
    """
    strings = params.stop if params.skip_special_tokens else ()
    ids = {tokenizer.find_special_id(stop): stop for stop in strings}
    spelled = {token_id: stop for token_id, stop in ids.items() if token_id is not None}
    return spelled | {token_id: token_id for token_id in params.stop_token_ids}


def make_bans(
    params: RequestParams, tokenizer: Tokenizer, eos_ids: frozenset[int]
) -> Bans | None:
    """Make the bans of a request's sequences, EOS also under `ignore_eos`; None: no bans."""
    may_hold_eos = params.thought is not None and params.constraint is not None
    has_bans = params.min_tokens or params.allowed_token_ids or params.bad_words
    if not (has_bans or may_hold_eos):
        return None
    words = [*chain(*tokenizer.spell_words(params.bad_words))]
    return Bans(params, eos_ids, words, frozenset(find_stop_tokens(params, tokenizer)))
