"""Encoders with decoders beside transformers: embeddings, first tokens, biases by distance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import fminfer
from fminfer.core.errors import CheckpointError
from fminfer.models.checkpoint import open_checkpoint
from fminfer.runtime.load.assembly import find_start_ids
from tests.encoder_families import make_encoder, save

SOURCE = [*range(5, 25)]
DECODED = [*range(30, 40)]


def read_back(folder: Path) -> Any:
    return transformers.AutoModelForSeq2SeqLM.from_pretrained(
        folder, dtype=torch.float32
    ).eval()


@torch.no_grad()
def expected_logprobs(model: Any, source: list[int], decoded: list[int]) -> list[float]:
    """Return the logprob of each token of a decoder's text, which begins with token 0."""
    inputs = torch.tensor([source])
    decoder_inputs = torch.tensor([[0, *decoded[:-1]]])
    logits = model(input_ids=inputs, decoder_input_ids=decoder_inputs).logits[0]
    found: list[float] = logits.log_softmax(-1)[range(len(decoded)), decoded].tolist()
    return found


def score(
    folder: Path, *rows: tuple[list[int], list[int]], **options: Any
) -> list[Any]:
    """Return the logprobs of decoders' texts, or errors."""
    requests = [
        {
            "prompt": source,
            "decoder_prompt": decoded,
            "max_tokens": 0,
            "echo": True,
            "logprobs": 1,
        }
        for source, decoded in rows
    ]
    options = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "kernels": "off",
    } | options
    with fminfer.Engine(str(folder), **options) as engine:
        records = sorted(engine.run(requests), key=lambda record: record.line.number)
    return [
        record.error or record.result["choices"][0]["logprobs"]["token_logprobs"]
        for record in records
        if record.error or record.result
    ]


LAYOUTS: dict[str, tuple[str, list[str], list[str]]] = {
    # A family, the tables that are written anew, and those that are taken away.
    "MADLAD's: the decoder's alone": ("t5:untied", ["decoder"], ["shared"]),
    "the encoder's alone": ("t5:untied", ["encoder"], ["shared"]),
    "one of each": ("t5:untied", ["encoder", "decoder"], ["shared"]),
    "one of each, and no head": ("t5", ["encoder", "decoder"], ["shared"]),
    "the encoder's beside the shared one": ("umt5", ["encoder"], []),
    "the decoder's beside the shared one": ("t5", ["decoder"], []),
    "of a tied BART, the encoder's beside the shared one": ("bart", ["encoder"], []),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_side_reads_the_embedding_that_is_stored_for_it(
    layout: str, tmp_path: Path
) -> None:
    """Tables beside `shared` were left out: logprobs were off, or `shared` was missing."""
    name, added, removed = LAYOUTS[layout]
    save(make_encoder(name), tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    base = "model." if "model.shared.weight" in weights else ""
    shared = weights[f"{base}shared.weight"]
    torch.manual_seed(1)
    for side in added:
        table = torch.empty_like(shared).normal_(0, 0.1)
        weights[f"{base}{side}.embed_tokens.weight"] = table
    for table_name in removed:
        del weights[f"{base}{table_name}.weight"]
    save_file(weights, file, {"format": "pt"})
    make_start_zero(tmp_path)

    expected = expected_logprobs(read_back(tmp_path), SOURCE, DECODED)
    assert score(tmp_path, (SOURCE, DECODED)) == [pytest.approx(expected, abs=1e-4)]
    if layout == "one of each":
        two_ranks = score(tmp_path, (SOURCE, DECODED), world_size=2)
        assert two_ranks == [pytest.approx(expected, abs=1e-4)]


def test_equal_embeddings_are_held_once(tmp_path: Path) -> None:
    """A .bin file of T5 stores one table under four names."""
    model = make_encoder("t5")
    save(model, tmp_path)
    make_start_zero(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")

    expected = expected_logprobs(model, SOURCE, DECODED)
    assert score(tmp_path, (SOURCE, DECODED)) == [pytest.approx(expected, abs=1e-4)]


def make_start_zero(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"decoder_start_token_id": 0}')


def test_a_missing_embedding_of_an_untied_bart_is_refused_by_name(
    tmp_path: Path,
) -> None:
    """transformers fills it with random numbers."""
    save(make_encoder("bart:untied"), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.encoder.embed_tokens.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"lacks .*'model\.encoder\.embed_tokens\.weight'"
    ):
        score(tmp_path, (SOURCE, DECODED))


STARTS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    # Of config.json, and of generation_config.json (None: there is none).
    "in the config": ({"decoder_start_token_id": 7}, None),
    "BOS of the config": ({"bos_token_id": 5}, None),
    "nothing": ({"bos_token_id": None}, None),
    "a forced BOS": ({"decoder_start_token_id": 7, "forced_bos_token_id": 9}, None),
    "in the generation config": (
        {"decoder_start_token_id": 7},
        {"decoder_start_token_id": 4},
    ),
    "BOS of the generation config": (
        {"decoder_start_token_id": 7},
        {"bos_token_id": 6},
    ),
    "not in the generation config": (
        {"decoder_start_token_id": 7},
        {"eos_token_id": 2},
    ),
    "a list of one": ({"decoder_start_token_id": 7}, {"decoder_start_token_id": [4]}),
    "a list of two": (
        {"decoder_start_token_id": 7},
        {"decoder_start_token_id": [4, 5]},
    ),
}


@pytest.mark.parametrize("name", ["bart", "mbart", "t5", "mt5"])
@pytest.mark.parametrize("stated", STARTS)
def test_a_decoder_begins_as_in_transformers(
    name: str, stated: str, tmp_path: Path
) -> None:
    """A decoder began with the padding, or with the default of the config's class.

    Where transformers finds no token to begin with, the model is refused.
    """
    save(make_encoder(name), tmp_path)
    of_config, of_generation = STARTS[stated]
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    fields.pop("decoder_start_token_id", None)
    file.write_text(json.dumps(fields | of_config))
    generation = tmp_path / "generation_config.json"
    generation.unlink()
    if of_generation is not None:
        generation.write_text(json.dumps(of_generation))
    model = read_back(tmp_path)
    model.generation_config.forced_eos_token_id = None

    try:
        drawn = model.generate(
            torch.tensor([SOURCE]), max_new_tokens=1, do_sample=False
        )
    except ValueError:
        with pytest.raises(CheckpointError, match="decoder_start_token_id"):
            find_start_ids(open_checkpoint(str(tmp_path)))
        return
    num = 1 if model.generation_config.forced_bos_token_id is None else 2
    found = find_start_ids(open_checkpoint(str(tmp_path)))
    assert found is not None and [*found] == drawn[0, :num].tolist()


def test_biases_by_distance_end_where_transformers_fails(tmp_path: Path) -> None:
    """64 buckets over 20 distances: keys farther than 20 had a wrong bias."""
    config = transformers.T5Config(
        vocab_size=300,
        d_model=32,
        d_kv=16,
        d_ff=48,
        num_layers=2,
        num_heads=2,
        relative_attention_num_buckets=64,
        relative_attention_max_distance=20,
    )
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.2)
    save(model, tmp_path)
    make_start_zero(tmp_path)
    source = [*range(5, 105)]
    decoded = [*range(60, 112)]
    fitting, long = score(tmp_path, (source, decoded), (source, [*decoded, 1]))
    assert fitting == pytest.approx(expected_logprobs(model, source, decoded), abs=1e-4)
    assert "maximum context length is 52 tokens" in long.message
    with pytest.raises(IndexError):
        expected_logprobs(model, source, [*decoded, 1, 2])


@pytest.mark.parametrize(("buckets", "most"), [(3, 128), (32, 0)])
def test_biases_by_distance_without_steps_are_refused(
    buckets: int, most: int, tmp_path: Path
) -> None:
    config = transformers.T5Config(
        relative_attention_num_buckets=buckets, relative_attention_max_distance=most
    )
    config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="relative_attention_num_buckets"):
        open_checkpoint(str(tmp_path))
