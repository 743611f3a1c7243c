"""Tags of thoughts as tokens: special ones, added ones, and tokens that hold more than a tag."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer

from fminfer.text.tokenizer import Tokenizer, _make_byte_alphabet
from tests.engine.thinking_bench import OPENING, TEMPLATE, ThinkingBench

# The bench says that each token is as likely: the shortest label is the likeliest.
CHOICE: dict[str, Any] = {"structured_outputs": {"choice": ["Yes", "Never"]}}
LABELS: dict[str, Any] = {
    "structured_outputs": {"choice": ["Yes", "Never"], "probabilities": True}
}
# Ids of control characters, which are these tokens instead.
TAGS = {1: "<think>", 2: "</think>"}
WIDE = {3: "</think>\n\nYes", 4: "nk>\n\nYes", 5: "</think>\n\n", 6: "k>Yes", 7: ">\n"}
WIDE |= {8: " Yes"}
# How the tags are tokens.
KINDS = ("special", "added")


def make_tokenizer(kind: str) -> Tokenizer:
    """Return a tokenizer of bytes, of which some ids are other tokens."""
    spellings = {byte[0]: sign for sign, byte in _make_byte_alphabet().items()}
    signs = {byte: sign for sign, byte in _make_byte_alphabet().items()}
    for token_id, text in WIDE.items():
        spellings[token_id] = "".join(signs[bytes([byte])] for byte in text.encode())
    if kind != "plain":
        spellings |= TAGS
    vocabulary = {sign: token_id for token_id, sign in spellings.items()}
    backend = BackendTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    backend.decoder = decoders.ByteLevel()
    if kind == "special":
        backend.add_special_tokens([*TAGS.values()])
    elif kind == "added":
        backend.add_tokens([AddedToken(tag, special=False) for tag in TAGS.values()])
    return Tokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=backend))


class TokenBench(ThinkingBench):
    """A scripted chat whose tags are tokens of a kind."""

    def __init__(self, kind: str, script: bytes, template: str = OPENING) -> None:
        self.kind = kind
        super().__init__(script, template, context=400)

    def make_tokenizer(self) -> Tokenizer:
        return make_tokenizer(self.kind)


@pytest.mark.parametrize("kind", KINDS)
def test_the_bench_has_tags_that_are_tokens(kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    assert tokenizer.encode("><think>").ids == [62, 1]
    assert tokenizer.special_ids == ({1, 2} if kind == "special" else set())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skips", [{}, {"skip_special_tokens": True}])
def test_tags_that_are_tokens_split_the_text(kind: str, skips: dict[str, Any]) -> None:
    """Texts leave special tokens out, so that the tags would not be seen."""
    whole = TokenBench(kind, b"\x01So.\x02\n\nYes\0", TEMPLATE)
    assert whole.message(**skips) == ("So.", "Yes", "stop")
    opened = TokenBench(kind, b"So.\x02\n\nYes\0")
    for fields in ({}, CHOICE, LABELS, {"logprobs": True}):
        assert opened.message(**skips, **fields) == ("So.", "Yes", "stop")
        opened.stream_events(**skips, **fields)
    assert opened.usage(**skips)["completion_tokens_details"] == {"reasoning_tokens": 6}
    assert TokenBench(kind, b"So.\0").message(**skips) == ("So.", None, "stop")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fields", [{}, CHOICE, LABELS])
def test_a_budget_forces_tags_that_are_tokens(
    kind: str, fields: dict[str, Any]
) -> None:
    bench = TokenBench(kind, b"aaaaaaYes\0")
    (choice,) = bench.choices(thinking_token_budget=3, **fields)
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("aaa", "Yes")
    assert choice["reasoning_truncated"] is True
    usage = bench.usage(thinking_token_budget=3, **fields)
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 3 + 1 + 2}
    bench.stream_events(thinking_token_budget=3, **fields)
    whole = TokenBench(kind, b"aaa\x02Yes\0")
    (choice,) = whole.choices(thinking_token_budget=4, **fields)
    assert "reasoning_truncated" not in choice
    assert whole.error(thinking_token_budget=3, max_tokens=5).code == "out_of_range"


@pytest.mark.parametrize("kind", [*KINDS, "plain"])
@pytest.mark.parametrize(
    "script", [b"So.\x03!\0", b"So.</thi\x04!\0", b"So.\x05Yes!\0", b"So.</thin\x06!\0"]
)
def test_a_token_ends_the_tag_and_begins_the_answer(kind: str, script: bytes) -> None:
    bench = TokenBench(kind, script)
    assert bench.message() == ("So.", "Yes!", "stop")
    bench.stream_events(logprobs=True)
    assert bench.message(stop="es") == ("So.", "Y", "stop")
    (choice,) = bench.choices(logprobs=True)
    assert len(choice["logprobs"]["content"]) == script.index(b"\0")


@pytest.mark.parametrize("kind", [*KINDS, "plain"])
@pytest.mark.parametrize("fields", [CHOICE, LABELS, CHOICE | {"logprobs": True}])
@pytest.mark.parametrize("begun", [b"", b"</thi", b"</thin"])
def test_no_such_token_begins_a_constrained_answer(
    kind: str, fields: dict[str, Any], begun: bytes
) -> None:
    """A constraint cannot hold the part of a token; the thought goes on without it."""
    bridge = {b"": b"\x03", b"</thi": b"\x04", b"</thin": b"\x06"}[begun]
    bench = TokenBench(kind, b"So." + begun + bridge + b"</think>Yes\0")
    reasoning, content, _ = bench.message(**fields)
    # the bench draws a piece of a character in its place
    assert reasoning == f"So.{begun.decode()}\ufffd"
    assert content == "Yes"
    bench.stream_events(**fields)


@pytest.mark.parametrize("kind", [*KINDS, "plain"])
@pytest.mark.parametrize("fields", [CHOICE, LABELS])
def test_a_token_may_end_the_tag_with_white_space(
    kind: str, fields: dict[str, Any]
) -> None:
    for script in (b"So.\x05Yes\0", b"So.</think\x07Yes\0", b"So.\x05\n\nYes\0"):
        bench = TokenBench(kind, script)
        assert bench.message(**fields) == ("So.", "Yes", "stop")
        bench.stream_events(**fields)


@pytest.mark.parametrize("pattern", [" ?Yes!", " Yes!", "(.|\n)*Yes!"])
def test_a_token_of_white_space_and_text_begins_the_answer(pattern: str) -> None:
    for script in (b"So.\x02\x08!\0", b"So.\x02\n\x08!\0"):
        bench = TokenBench("special", script)
        assert bench.message(guided_regex=pattern) == ("So.", " Yes!", "stop")
        assert bench.message() == ("So.", "Yes!", "stop")
        bench.stream_events(guided_regex=pattern)
