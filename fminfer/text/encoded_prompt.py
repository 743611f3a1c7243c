"""A prompt in token ids."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, frozen=True)
class EncodedPrompt:
    """A prompt in ids. `offsets[i]` is the code point of `text` at which id i starts."""

    ids: list[int]
    text: str
    offsets: list[int]  # empty unless asked for
    num_cut: int = 0  # tokens that were taken away to make it fit
    is_whole_text: bool = False  # it was given as text, all of it
    # token types, for encoders; none: all are 0
    types: list[int] = field(default_factory=list)
