"""Whether the KV cache could ever hold a request."""

from __future__ import annotations

from fminfer.core.errors import RequestError
from fminfer.engine.scheduler import Scheduler
from fminfer.engine.sequence import RequestState


def check_room(state: RequestState, scheduler: Scheduler, num_kv_tokens: int) -> None:
    """Check that the KV cache could hold each prompt of a request alone.

    Args:
        num_kv_tokens: the size of the cache.

    Raises:
        RequestError: it could not.
    """
    for prompt in state.prompts:
        if len(prompt.sequences) > scheduler.max_rows:
            raise RequestError(
                "out_of_memory",
                f"the prompt has {len(prompt.sequences)} candidates, which run together; "
                f"--max-rows allows {scheduler.max_rows} sequences at once. Raise it, or "
                "lower n or best_of",
                "best_of",
            )
        if prompt.num_to_feed > 0 and not scheduler.fits(prompt):
            raise RequestError(
                "out_of_memory",
                f"the prompt needs the KV cache of {prompt.num_kv_tokens} tokens for each of "
                f"its {len(prompt.sequences)} candidates at once; the budget is "
                f"{num_kv_tokens} tokens. Raise --budget, or lower max_tokens, n or best_of",
                "max_tokens",
            )
