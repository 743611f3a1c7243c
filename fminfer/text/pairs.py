"""Texts and pairs of texts for an encoder, cut between their special tokens."""

from __future__ import annotations

from typing import Any

from tokenizers import normalizers

from fminfer.text.encoded_prompt import EncodedPrompt


def lower_texts(backend: Any) -> None:
    """Make a tokenizer lower texts but not special tokens, as sentence-transformers 6 does."""
    parts = [normalizers.Lowercase(), backend.normalizer]
    backend.normalizer = normalizers.Sequence(
        [part for part in parts if part is not None]
    )


def make_text_prompt(encoding: Any, *, has_types: bool) -> EncodedPrompt:
    """Return an encoding as a prompt; has_types: for a model that reads token types."""
    types = encoding.type_ids if has_types and any(encoding.type_ids) else []
    return EncodedPrompt(encoding.ids, "", [], is_whole_text=True, types=types)


def cut_encoding(
    encoding: Any, room: int, side: str, *, has_types: bool
) -> EncodedPrompt:
    """Return an encoding cut to so many tokens as transformers' truncation "longest_first" does.

    Args:
        side: on which each text is cut.
    """
    whole = make_text_prompt(encoding, has_types=has_types)
    text_numbers = encoding.sequence_ids
    places = [
        [i for i, text in enumerate(text_numbers) if text == number]
        for number in (0, 1)
    ]
    target = max(0, room - text_numbers.count(None))
    short, long = sorted(map(len, places))
    long = short if short > target else max(short, target - short)
    if short + long > target:
        short = target // 2
        long = target - target // 2
    sizes = (long, short) if len(places[0]) > len(places[1]) else (short, long)
    kept = {i for i, text in enumerate(text_numbers) if text is None}
    for places_of_text, size in zip(places, sizes, strict=True):
        start = 0 if side == "right" else len(places_of_text) - size
        kept.update(places_of_text[start : start + size])
    order = sorted(kept)
    types = [whole.types[i] for i in order] if whole.types else []
    ids = [whole.ids[i] for i in order]
    return EncodedPrompt(ids, "", [], num_cut=len(whole.ids) - len(ids), types=types)
