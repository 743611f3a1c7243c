"""Whether the KV cache could ever hold a request."""

from __future__ import annotations

from dataclasses import dataclass

from fminfer.core.errors import RequestError
from fminfer.core.quantities import counted
from fminfer.engine.scheduler import Scheduler
from fminfer.engine.sequence import RequestState


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
        if prompt.num_to_feed > 0 and not scheduler.fits(prompt):
            raise RequestError(
                "out_of_memory",
                f"the prompt needs the KV cache of {counted(prompt.num_kv_tokens, 'token')} for "
                f"each of its {counted(len(prompt.sequences), 'candidate')} at once; the budget is "
                f"{num_kv_tokens} tokens. Raise --budget, or lower {lower}",
                "max_tokens",
            )
