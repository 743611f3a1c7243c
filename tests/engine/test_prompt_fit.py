"""Cut prompts keep what the tokenizer puts at either end, as transformers' truncation does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from fminfer.core.config import EngineConfig
from fminfer.core.errors import RequestError
from fminfer.engine.intake import Intake
from fminfer.engine.prompt_fit import RequestLimits
from fminfer.text.tokenizer import Tokenizer

SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "[gMASK]", "<sop>", "en_XX"]
TEXT = "the quick brown fox jumps over the lazy dog, and counts 1 2 3"
TEMPLATES = {
    "GLM": "[gMASK] <sop> $A",
    "mBART": "$A </s> en_XX",
    "mBART-50": "en_XX $A </s>",
    "Llama": "<s> $A",
    "T5": "$A </s>",
    "BERT": "<s> $A </s>",
    "plain": "$A",
}


def make_tokenizer(folder: Path, template: str) -> Any:
    """Save a tokenizer of bytes with a template; return transformers' own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate([*SPECIAL, *alphabet])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.add_special_tokens(SPECIAL)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    pairs = [(name, vocabulary[name]) for name in template.split() if name != "$A"]
    backend.post_processor = processors.TemplateProcessing(
        single=template, pair=f"{template} $B:1", special_tokens=pairs
    )
    hf = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    hf.save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


def cut(tokenizer: Tokenizer, on_too_long: Any = "error", **fields: Any) -> list[int]:
    limits = RequestLimits(40, 300, config=EngineConfig(on_too_long=on_too_long))
    intake = Intake(tokenizer, limits)
    request = {"prompt": TEXT, "max_tokens": 4} | fields
    (prompt,) = intake.prepare(intake.parse(request)).prompts
    return prompt.ids


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_of_no_text_stay_at_both_ends(
    name: str, side: str, tmp_path: Path
) -> None:
    """Cuts kept one BOS in front, and one EOS behind what an encoder reads, and nothing else."""
    hf = make_tokenizer(tmp_path, TEMPLATES[name])
    hf.truncation_side = side
    tokenizer = Tokenizer.load(tmp_path)

    for size in (3, 10, 36):
        expected = hf(TEXT, truncation=True, max_length=size).input_ids
        fields = {"truncate_prompt_tokens": size, "truncation_side": side}
        assert cut(tokenizer, **fields) == expected
    assert cut(tokenizer, f"truncate-{side}") == expected, "of 40 tokens, 4 are drawn"
    both = {"truncate_prompt_tokens": 38, "truncation_side": side}
    assert cut(tokenizer, f"truncate-{side}", **both) == expected, "cut twice"

    bare = hf(TEXT, truncation=True, max_length=9, add_special_tokens=False).input_ids
    fields = {
        "truncate_prompt_tokens": 9,
        "truncation_side": side,
        "add_special_tokens": False,
    }
    assert cut(tokenizer, **fields) == bare


def test_a_template_s_tokens_stay_where_a_chat_spells_them(tmp_path: Path) -> None:
    """A chat's template writes `[gMASK]<sop>` itself; --on-too-long cut it off."""
    hf = make_tokenizer(tmp_path, TEMPLATES["GLM"])
    tokenizer = Tokenizer.load(tmp_path)
    spelled = {"prompt": f"[gMASK]<sop>{TEXT}", "add_special_tokens": False}
    expected = hf(TEXT).input_ids
    assert cut(tokenizer, "truncate-left", **spelled) == expected[:2] + expected[-34:]


def test_a_cut_to_fewer_tokens_than_a_template_has_leaves_text(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, TEMPLATES["BERT"])
    tokenizer = Tokenizer.load(tmp_path)
    whole = tokenizer.encode(TEXT).ids
    assert cut(tokenizer, truncate_prompt_tokens=2) == whole[-3:-1]
    fields = {"truncate_prompt_tokens": 1, "truncation_side": "right"}
    assert cut(tokenizer, **fields) == whole[1:2]


def test_offsets_of_a_cut_prompt_count_in_its_text(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, TEMPLATES["mBART-50"])
    tokenizer = Tokenizer.load(tmp_path)
    intake = Intake(tokenizer, RequestLimits(40, 300))
    fields = {"truncate_prompt_tokens": 8, "echo": True, "logprobs": 1, "max_tokens": 1}
    (prompt,) = intake.prepare(intake.parse({"prompt": TEXT} | fields)).prompts
    assert prompt.text == TEXT[-6:]
    assert prompt.offsets == [0, 0, 1, 2, 3, 4, 5, 6]


def test_the_remedy_of_a_long_prompt_is_a_value_of_the_flag(tmp_path: Path) -> None:
    """It said to let --on-too-long cut prompts, which is none of its values."""
    make_tokenizer(tmp_path, "$A")
    with pytest.raises(RequestError, match="cut by --on-too-long truncate-left"):
        cut(Tokenizer.load(tmp_path), prompt=[1] * 60)
