"""A chat model that says what a test has written: real tokens, streams and logprobs.

Each token is followed by one certain other. The chat template ends a prompt with the token that
begins a text.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, pre_tokenizers

END = "<|end|>"
PIECE_CHARS = 5  # of a text that one token holds
CERTAINTY = 30.0  # the logit of the token that follows; those of all others are 0
CONTEXT = 8192


def save_reciting(folder: Path, texts: dict[str, str], template: str) -> Path:
    """Save a llama that recites texts, with its tokenizer and its chat template.

    Args:
        texts: by their names; the token `<|name|>` begins one.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = _cut_all(texts, taken=set(alphabet))
    spelled = [_spell(piece) for each in pieces.values() for piece in each]
    vocab = {spelling: place for place, spelling in enumerate([*alphabet, *spelled])}
    backend = BackendTokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END, *(f"<|{name}|>" for name in texts)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    follows: dict[int, int] = {}
    for name, each in pieces.items():
        chain = [f"<|{name}|>", *map(_spell, each), END]
        ids = [backend.token_to_id(token) for token in chain]
        follows |= dict(pairwise(ids))
    _make_model(
        backend.get_vocab_size(), follows, backend.token_to_id(END)
    ).save_pretrained(folder)
    return folder


def _cut_all(texts: dict[str, str], taken: set[str]) -> dict[str, list[str]]:
    """Cut texts into pieces of which no two are equal."""
    return {name: _cut(text, taken) for name, text in texts.items()}


def _cut(text: str, taken: set[str]) -> list[str]:
    pieces: list[str] = []
    while text:
        size = PIECE_CHARS
        while text[:size] in taken and size < len(text):
            size += 1
        piece = text[:size]
        text = text[size:]
        if piece in taken:  # the end, which then stands with what comes before it
            piece = pieces.pop() + piece
            assert piece not in taken, "the texts end alike; change one"
        pieces.append(piece)
        taken.add(piece)
    return pieces


def _spell(piece: str) -> str:
    """Return a piece in the alphabet of byte-level tokenizers."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ((spelling, _),) = splitter.pre_tokenize_str(piece)
    return spelling


def _make_model(
    vocab_size: int, follows: dict[int, int], end_id: int
) -> torch.nn.Module:
    """Make a llama whose hidden states are its tokens, one dimension each."""
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=vocab_size,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end_id,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(vocab_size))
        layer = model.model.layers[0]
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight.zero_()
        model.lm_head.weight.zero_()
        # a norm makes of a 1 the root of the width
        for token_id, next_id in follows.items():
            model.lm_head.weight[next_id, token_id] = CERTAINTY / vocab_size**0.5
    return model
