"""Counts requests and prompts in an engine's statistics."""

from __future__ import annotations

from fminfer.engine.prefix import SharedTokens
from fminfer.engine.sequence import Prepared, PromptState
from fminfer.engine.stats import EngineStats


def count_request(stats: EngineStats, prepared: Prepared) -> None:
    """Count what a request asks for."""
    params = prepared.params
    for place, prompt in enumerate(prepared.prompts):
        num_tokens = len(prompt.ids)
        num_to_feed = num_tokens if prepared.is_pooled else params.num_to_feed(num_tokens)
        if num_to_feed and prepared.sources:
            num_to_feed += len(prepared.sources[place].ids)
        if num_to_feed:
            stats.read.add(num_to_feed, params.num_candidates, params.max_tokens)


def count_shareable(stats: EngineStats, prompt: PromptState, shared: SharedTokens) -> None:
    """Count what the best possible prefix cache would save of a prompt."""
    if not shared.is_full:
        prompt.is_counted = True
        num_shared = shared.add(prompt.ids[: prompt.num_to_feed])
        stats.num_counted_tokens += prompt.num_to_feed
        stats.num_counted_shareable += min(num_shared, prompt.num_to_feed - 1)


def count_admitted(stats: EngineStats, prompt: PromptState) -> None:
    """Count a prompt that is to be fed, perhaps once more."""
    if prompt.again or prompt.is_apart:
        stats.num_put_back += not prompt.is_apart
        stats.num_apart += prompt.is_apart
        stats.num_again_tokens += prompt.num_to_feed - prompt.num_fed
    else:
        stats.num_cached_tokens += prompt.num_cached
        stats.num_counted_cached += prompt.num_cached * prompt.is_counted
