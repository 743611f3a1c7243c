"""The three kinds of tokenizers that GGUF files hold, as those of the tokenizers package.

Each function returns a tokenizer, and the fields of its model in tokenizer.json that hold pieces
and merges. The package's own classes would not keep ids free that have no spelling.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer

from fminfer.models.gguf.pre_tokenizers import Cuts
from fminfer.models.gguf.vocabulary import Json, StoredVocabulary

SPACE = "▁"  # sentencepiece's sign for one


def byte_level(vocabulary: StoredVocabulary, cuts: Cuts) -> tuple[BackendTokenizer, Json]:
    """Make GPT-2's kind: pieces of bytes, merged in an order that the file has."""
    ids = vocabulary.ids
    merges = [
        [left, right]
        for left, _, right in (str(each).partition(" ") for each in vocabulary.find("merges", []))
        if left in ids and right in ids and left + right in ids
    ]
    backend = BackendTokenizer(models.BPE(ignore_merges=cuts.ignores_merges))
    backend.normalizer = cuts.normalizer
    backend.pre_tokenizer = cuts.pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    return backend, {"vocab": ids, "merges": merges}


def scored_merges(vocabulary: StoredVocabulary) -> tuple[BackendTokenizer, Json]:
    """Make sentencepiece's BPE: of all neighbours those merge first whose piece scores best.

    As in Llama 2's tokenizer.json, each stretch of text between special tokens gets a space.
    """
    ids, leads = vocabulary.ids, vocabulary.leads_with_space
    merges = derive_merges({piece: vocabulary.scores[i] for piece, i in ids.items()})
    unknown, has_bytes = vocabulary.special("unknown"), vocabulary.has_bytes
    backend = BackendTokenizer(
        models.BPE(unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes)
    )
    backend.normalizer = _spaces(leads=leads)
    strips = [decoders.Strip(" ", left=1)] if leads else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strips]
    )
    return backend, {"vocab": ids, "merges": merges}


def unigram(vocabulary: StoredVocabulary) -> tuple[BackendTokenizer, Json]:
    """Make sentencepiece's Unigram, T5's kind: the pieces with the best sum of scores."""
    named = (piece or f"[PAD{i}]" for i, piece in enumerate(vocabulary.pieces))
    scored = list(zip(named, vocabulary.scores, strict=False))
    unknown, has_bytes = vocabulary.special_id("unknown"), vocabulary.has_bytes
    backend = BackendTokenizer(models.Unigram(scored, unknown, has_bytes))
    leads = vocabulary.leads_with_space
    scheme = "always" if leads else "never"
    steps: list[normalizers.Normalizer] = []
    if charsmap := vocabulary.find("precompiled_charsmap"):
        stored = np.asarray(charsmap, np.int64).astype(np.uint8).tobytes()
        steps.append(normalizers.Precompiled(stored))
    drops_spaces = bool(vocabulary.find("remove_extra_whitespaces"))
    if drops_spaces and leads:  # in words, as T5's tokenizer.json
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(SPACE, scheme)]
        )
    else:
        if drops_spaces:
            steps.append(normalizers.Replace(Regex(r"\A +| +\z| +(?= )"), ""))
        steps.append(_spaces(leads=leads))
    backend.normalizer = normalizers.Sequence(steps)
    fallback = [decoders.ByteFallback()] if has_bytes else []
    backend.decoder = decoders.Sequence([*fallback, decoders.Metaspace(SPACE, scheme)])
    return backend, {}


def derive_merges(scores: Mapping[str, float]) -> list[list[str]]:
    """Return the merges of pieces, best first, in the order of transformers' converter.

    Of a piece's own merges that with the longer left half comes first.
    """
    found = [
        (-score, -len(left), -len(right), left, right)
        for piece, score in scores.items()
        for left, right in ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        if left in scores and right in scores
    ]
    found.sort(key=lambda merge: merge[:3])
    return [[left, right] for _, _, _, left, right in found]


def _spaces(*, leads: bool) -> normalizers.Normalizer:
    """Write spaces by their sign, and `leads`: one more before the text."""
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(SPACE)] if leads else []
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
