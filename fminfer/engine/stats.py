"""What the engine counts while it runs; the progress bar and the summary read it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class EngineStats:
    """Counts since the engine started. Tokens are those the model computed or drew."""

    num_steps: int = 0
    num_prompt_tokens: int = 0  # fed to the model
    num_cached_tokens: int = 0  # prompt tokens not fed, because the prefix cache had them
    # Of the prompts for which the best possible cache (a trie over them) was counted:
    num_counted_tokens: int = 0
    num_counted_cached: int = 0  # of them, not fed
    num_counted_shareable: int = 0  # of them, those that the best possible cache would not feed
    num_generated_tokens: int = 0
    stage_busy_s: float = 0.0
    max_rows_running: int = 0
    num_kv_tokens: int = 0  # the size of the KV cache
