"""Encoders, their heads, and encoders with decoders against transformers, in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from fminfer.compute.values.step import Step, make_draws
from fminfer.core.config import make_config
from fminfer.core.errors import CheckpointError
from fminfer.models.checkpoint import open_checkpoint, open_model
from fminfer.models.fingerprint import compute_fingerprint, digest_weight_files
from fminfer.models.model_folder import fetch_model
from fminfer.models.origins import check_tensors
from fminfer.models.quantized_folder import write_quantized_folder
from fminfer.models.sentence_folder import read_sentence_folder
from tests.conftest import IS_ALL, more
from tests.encoder_families import (
    BOTH_WAYS,
    DECODERS,
    ENCODERS,
    PAIRS,
    VOCAB,
    make_decoder,
    make_encoder,
    save,
)
from tests.models.test_elsewhere import Hub
from tests.shard_threads import ShardedRanks, plan_ranks

_DRAWN = torch.Generator().manual_seed(3)
IDENTITY = "torch.nn.modules.linear.Identity"
PROMPTS = [
    torch.randint(3, VOCAB, (length,), generator=_DRAWN).tolist()
    for length in (37, 5, 1, 70, 18)
]
SPLITS = {
    "plain": {"kernels": "off"},
    "kernels": {},
    "stages": {"num_stages": 2},
    "shards": {"num_shards": 2},
    "both": {"num_stages": 2, "num_shards": 2, "kernels": "off"},
}
SOME = SPLITS.values() if IS_ALL else (SPLITS["kernels"], SPLITS["both"])


def ranks_of(
    folder: Path | None, num_shards: int = 1, num_stages: int = 1, **options: Any
) -> ShardedRanks:
    name = None if folder is None else str(folder)
    config = make_config(
        name, **{"dtype": "float32", "block_size": 16, "budget": 640} | options
    )
    plans = plan_ranks(config, open_model(config), num_shards, num_stages)
    return ShardedRanks(plans, 640)


def vectors(
    folder: Path | None,
    types: list[int] | None = None,
    prompts: list[list[int]] = PROMPTS,
    **options: Any,
) -> torch.Tensor:
    """Return one vector a prompt, or the hidden states of all of an encoder with a decoder."""
    lengths = np.array([*map(len, prompts)])
    step = Step(0, lengths=lengths, token_ids=np.concatenate(prompts))
    if types is not None:
        step.token_types = np.array(types, np.int8)
    found = ranks_of(folder, **options).run(step).vectors
    return torch.from_numpy(found).view(torch.float32).view(len(found), -1)


@torch.no_grad()
def oracle(
    model: Any,
    pool: Any,
    types: list[int] | None = None,
    prompts: list[list[int]] = PROMPTS,
) -> torch.Tensor:
    """Return what transformers gives for each prompt alone; `pool` makes it of hidden states."""
    rows = []
    first = 0
    for prompt in prompts:
        given = {"input_ids": torch.tensor([prompt])}
        if types is not None:
            given["token_type_ids"] = torch.tensor([types[first : first + len(prompt)]])
        out = model(**given)
        rows.append(
            out.logits[0] if hasattr(out, "logits") else pool(out.last_hidden_state[0])
        )
        first += len(prompt)
    return torch.stack(rows)


def mean(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.mean(0)


def check(found: torch.Tensor, expected: torch.Tensor, error: float = 1e-5) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= error * expected.abs().max()


@pytest.mark.parametrize("name", ENCODERS)
def test_vectors_and_scores_equal_transformers(name: str, tmp_path: Path) -> None:
    model = make_encoder(name)
    folder = save(model, tmp_path / "model")
    expected = oracle(model, mean)
    for options in SOME:
        check(vectors(folder, **options), expected)


@pytest.mark.parametrize(
    ("name", "kind"),
    [  # each with one of both in turn
        pytest.param(name, kind, marks=[] if place % 2 == turn else [more])
        for place, name in enumerate(DECODERS)
        for turn, kind in enumerate(("Model", "ForSequenceClassification"))
    ],
)
def test_decoders_give_the_last_token_s_vector(
    name: str, kind: str, tmp_path: Path
) -> None:
    model = make_decoder(name, kind)
    folder = save(model, tmp_path / "model")
    expected = oracle(model, lambda hidden: hidden[-1])
    for options in SOME:
        check(vectors(folder, **options), expected)


def with_padding(padding_id: int) -> list[list[int]]:
    """Return prompts with an id in front, inside, at the end, and in all places."""
    pad = padding_id
    return [
        [5, 6, 7, 8],
        [5, 6, pad, 8, 9],
        [pad, pad, 7],
        [5, 9, pad, pad],
        [pad, pad],
        [pad],
    ]


@pytest.mark.parametrize(
    "name",
    ["roberta", "roberta:scores", "xlm-roberta", "camembert", "mpnet", "mpnet:scores"],
)
def test_padding_inside_a_text_has_no_position(name: str, tmp_path: Path) -> None:
    """`<pad>` in a text, or its id, moved the positions of all tokens behind it by one."""
    model = make_encoder(name)
    prompts = with_padding(1 if "mpnet" in name else model.config.pad_token_id)
    folder = save(model, tmp_path / "model")
    expected = oracle(model, mean, prompts=prompts)
    for options in (SPLITS["kernels"], SPLITS["both"]):
        check(vectors(folder, prompts=prompts, **options), expected)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt-bare", "bloom", "mixtral"])
def test_a_judge_looks_at_the_last_token_that_is_no_padding(
    name: str, tmp_path: Path
) -> None:
    """A judge whose padding is EOS scored a text that ends with EOS by that EOS."""
    model = make_decoder(name, "ForSequenceClassification", pad_token_id=4)
    prompts = with_padding(4)
    folder = save(model, tmp_path / "model")
    expected = oracle(model, mean, prompts=prompts)
    for options in (SPLITS["kernels"], SPLITS["both"]):
        check(vectors(folder, prompts=prompts, **options), expected)


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_decoders_whose_tokens_see_both_ways(name: str, tmp_path: Path) -> None:
    """EmbeddingGemma and GTE; `is_causal` was not seen, and a language model with it ran."""
    model = make_decoder(name, "Model", **BOTH_WAYS[name])
    files = sentence_files()
    folder = save(model, tmp_path / "model", files)
    expected = oracle(model, mean)
    for options in (SPLITS["plain"], SPLITS["kernels"], SPLITS["shards"]):
        check(vectors(folder, **options), expected)
    (folder / "modules.json").unlink()
    fields = json.loads((folder / "config.json").read_text()) | {"architectures": None}
    (folder / "config.json").write_text(json.dumps(fields))
    (field,) = BOTH_WAYS[name]
    with pytest.raises(CheckpointError, match=f"config.json sets {field} to"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("name", ["bert", "bert:scores", "nomic_bert"])
def test_types_of_tokens_are_added(name: str, tmp_path: Path) -> None:
    model = make_encoder(name)
    types = [n % 3 % 2 for n in range(sum(map(len, PROMPTS)))]
    expected = oracle(model, mean, types)
    check(vectors(save(model, tmp_path / "model"), types), expected)
    assert not torch.allclose(expected, oracle(model, mean), rtol=0.01)


def sentence_files(
    *more: dict[str, str], pooling: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the files of a folder of sentence-transformers, by name.

    Args:
        more: modules behind pooling.
    """
    old = "sentence_transformers.models"
    modules = [
        {"path": "", "type": f"{old}.Transformer"},
        {"path": "1_Pooling", "type": f"{old}.Pooling"},
        *more,
    ]
    return {
        "modules.json": modules,
        "1_Pooling/config.json": pooling or {"pooling_mode": "mean"},
    }


DENSE = {"path": "2_Dense", "type": "sentence_transformers.base.modules.dense.Dense"}
NORMALIZE = {"path": "3_Normalize", "type": "sentence_transformers.models.Normalize"}


def last(hidden: torch.Tensor) -> torch.Tensor:
    return hidden[-1]


def weighted(hidden: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(1.0, len(hidden) + 1)[:, None]
    return (hidden * weights).sum(0) / weights.sum()


MODES: dict[str, tuple[dict[str, Any], Any]] = {
    "cls": (
        {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
        lambda h: h[0],
    ),
    "last": ({"pooling_mode": "lasttoken"}, last),
    "max": ({"pooling_mode": ["max"]}, lambda h: h.amax(0)),
    "root": (
        {"pooling_mode_mean_sqrt_len_tokens": True},
        lambda h: h.sum(0) / len(h) ** 0.5,
    ),
    "weighted": ({"pooling_mode_weightedmean_tokens": True}, weighted),
}


@pytest.mark.parametrize("mode", MODES)
def test_the_poolings_of_sentence_transformers(mode: str, tmp_path: Path) -> None:
    """The first token's vector of a BERT, which has no tensor behind its layers, was of all."""
    fields, pool = MODES[mode]
    model = make_encoder("bert")
    folder = save(model, tmp_path / "model", sentence_files(NORMALIZE, pooling=fields))
    expected = nn.functional.normalize(oracle(model, pool))
    for options in (SPLITS["kernels"], SPLITS["stages"]):
        check(vectors(folder, **options), expected)


def dense_folder(model: Any, folder: Path, **fields: Any) -> nn.Linear:
    """Save a model with a dense layer and Normalize behind mean pooling."""
    kept = {"in_features": 64, "out_features": 24, "bias": True} | fields
    files = sentence_files(DENSE, NORMALIZE) | {
        "2_Dense/config.json": kept,
        "sentence_bert_config.json": {"max_seq_length": 40, "do_lower_case": True},
        "config_sentence_transformers.json": {
            "prompts": {"query": "query: ", "document": ""},
            "default_prompt_name": "query",
            "activation_fn": IDENTITY,
        },
    }
    save(model, folder, files)
    dense = nn.Linear(64, 24, bias=kept["bias"])
    stored = {f"linear.{name}": value for name, value in dense.state_dict().items()}
    torch.save(stored, folder / "2_Dense/pytorch_model.bin")
    return dense


def read_by(
    dense: nn.Linear, vectors: torch.Tensor, activation: Any = torch.tanh
) -> torch.Tensor:
    with torch.no_grad():
        return nn.functional.normalize(activation(dense(vectors)))


def test_dense_layers_lie_in_folders_of_their_own(tmp_path: Path) -> None:
    model = make_encoder("mpnet")
    dense = dense_folder(model, tmp_path / "model")
    expected = read_by(dense, oracle(model, mean))
    for options in (SPLITS["kernels"], SPLITS["both"]):
        check(vectors(tmp_path / "model", **options), expected)
    found = open_checkpoint(str(tmp_path / "model")).sentence
    assert found is not None
    assert (found.max_length, found.is_lowercased, found.activation) == (
        40,
        True,
        IDENTITY,
    )
    assert (
        found.prompts == {"query": "query: ", "document": ""}
        and found.default_prompt == "query"
    )
    (tmp_path / "model/2_Dense/pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match="2_Dense holds no"):
        check_tensors(open_checkpoint(str(tmp_path / "model")))


def test_the_hub_gives_dense_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their weights lie where modules.json says; those of a folder `head` were not fetched."""
    small = [f"{name}/config.json" for name in ("1_Pooling", "head")]
    names = [
        "config.json",
        "modules.json",
        *small,
        "model.safetensors",
        "pytorch_model.bin",
    ]
    weights = ["head/model.safetensors", "head/pytorch_model.bin", "onnx/model.onnx"]
    (tmp_path / "files").mkdir()
    modules = sentence_files(DENSE | {"path": "head"})["modules.json"]
    (tmp_path / "files/modules.json").write_text(json.dumps(modules))
    hub = Hub(tmp_path, tmp_path / "files", names + weights)
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot_download)
    monkeypatch.setattr(
        "huggingface_hub.HfApi.model_info",
        lambda self, n, revision: hub.model_info(n, revision),
    )
    found = {
        str(f.relative_to(hub.folder)) for f in fetch_model("some/model").rglob("*.*")
    }
    assert found == {*names, *weights} - {"pytorch_model.bin", "onnx/model.onnx"}


def move_modules(folder: Path, **places: str) -> None:
    """Give modules' folders other names, by their kinds, in modules.json and on the disk."""
    modules = json.loads((folder / "modules.json").read_text())
    for module in modules:
        place = places.get(module["type"].rpartition(".")[2])
        if place is not None:
            (folder / place).parent.mkdir(exist_ok=True)
            (folder / module["path"]).rename(folder / place)
            module["path"] = place
    (folder / "modules.json").write_text(json.dumps(modules))


@pytest.mark.parametrize(
    ("pooling", "dense"), [("Pooling", "head"), ("parts/mean", "parts/out")]
)
def test_modules_lie_where_modules_json_says(
    pooling: str, dense: str, tmp_path: Path
) -> None:
    """Names such as 1_Pooling were guessed: another pooling was no other model for a run's rows.

    `fminfer quantize` left the files out, and its folder did not run.
    """
    model = make_encoder("bert")
    folder = tmp_path / "model"
    expected = read_by(dense_folder(model, folder), oracle(model, mean))
    move_modules(folder, Pooling=pooling, Dense=dense)
    check(vectors(folder), expected)

    (tmp_path / "small").mkdir()
    write_quantized_folder(
        open_checkpoint(str(folder)),
        tmp_path / "small",
        "int8",
        seed=0,
        on_progress=lambda *_: None,
    )
    check(vectors(tmp_path / "small"), vectors(folder, quantize="int8"))

    before = model_digest(folder)
    (folder / pooling / "config.json").write_text('{"pooling_mode": "max"}')
    assert model_digest(folder) != before


@pytest.mark.parametrize("path", ["../model/1_Pooling", "/elsewhere"])
def test_modules_outside_of_their_folder_are_refused(path: str, tmp_path: Path) -> None:
    modules = sentence_files()
    modules["modules.json"][1]["path"] = path
    folder = save(make_encoder("bert"), tmp_path / "model", modules)
    with pytest.raises(CheckpointError, match="which is not in its folder"):
        read_sentence_folder(folder)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"default_prompt_name": "passage", "prompts": {"query": "q: "}},
            "prompts are: query. Add",
        ),
        ({"default_prompt_name": "passage"}, "names 'passage' as default_prompt_name"),
        (
            {"similarity_fn_name": "jaccard"},
            "these run: cosine, dot, euclidean, manhattan",
        ),
    ],
)
def test_settings_that_name_nothing_are_refused(
    settings: dict[str, Any], says: str, tmp_path: Path
) -> None:
    """A default prompt that is not there was none, and every similarity was the cosine."""
    files = sentence_files() | {"config_sentence_transformers.json": settings}
    folder = save(make_encoder("bert"), tmp_path / "model", files)
    with pytest.raises(CheckpointError, match=says):
        read_sentence_folder(folder)


@pytest.mark.parametrize("name", ["query", "document", None, ""])
def test_settings_that_ask_for_nothing_pass(name: str | None, tmp_path: Path) -> None:
    """sentence-transformers gives models of vectors an empty prompt of these two names."""
    settings = {"default_prompt_name": name, "similarity_fn_name": None}
    files = sentence_files() | {"config_sentence_transformers.json": settings}
    found = read_sentence_folder(save(make_encoder("bert"), tmp_path / "model", files))
    assert found is not None and found.similarity == "cosine"
    assert found.prompts.get(found.default_prompt, "") == ""


def test_a_causal_language_model_in_such_a_folder_gives_vectors(tmp_path: Path) -> None:
    """Qwen3-Embedding and E5-Mistral: its head is left out."""
    model = make_decoder("qwen3", "ForCausalLM")
    folder = save(
        model,
        tmp_path / "model",
        sentence_files(NORMALIZE, pooling={"pooling_mode": "lasttoken"}),
    )
    check(vectors(folder), nn.functional.normalize(oracle(model.model, last)))


def test_a_masked_language_model_in_such_a_folder_gives_vectors(tmp_path: Path) -> None:
    for name in ("BertForMaskedLM", "ModernBertForMaskedLM", "DistilBertForMaskedLM"):
        model = make_encoder(
            {"B": "bert", "M": "modernbert", "D": "distilbert"}[name[0]], name
        )
        folder = save(model, tmp_path / name, sentence_files())
        check(vectors(folder), oracle(model.base_model, mean))


@pytest.mark.parametrize("name", ["t5", "t5:untied", "umt5"])
def test_the_encoder_of_t5_gives_vectors(name: str, tmp_path: Path) -> None:
    """Sentence-T5 and GTR, saved with the decoder or without it."""
    pair = make_encoder(name)
    alone = {"t5": transformers.T5EncoderModel, "umt5": transformers.UMT5EncoderModel}
    model = alone[name.partition(":")[0]](pair.config)
    model.load_state_dict(pair.state_dict(), strict=False)
    dense = dense_folder(
        model.eval(),
        tmp_path / "alone",
        bias=False,
        activation_function=IDENTITY,
    )
    expected = read_by(dense, oracle(model, mean), lambda x: x)
    check(vectors(tmp_path / "alone"), expected)
    check(vectors(tmp_path / "alone", **SPLITS["both"]), expected)
    check(vectors(save(model, tmp_path / "bare")), oracle(model, mean))
    check(vectors(save(pair, tmp_path / "pair", sentence_files())), oracle(model, mean))


REFUSED = {
    "BertForMaskedLM": "which fills gaps in texts. Name 'BertModel'",
    "BertForTokenClassification": "whose head does not run",
    "RobertaForQuestionAnswering": "whose head does not run",
    "BartForSequenceClassification": "a head for classes behind a decoder, which does not run",
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_heads_are_refused_by_name(name: str, tmp_path: Path) -> None:
    kind = {"Be": "bert", "Ro": "roberta", "Ba": "bart"}[name[:2]]
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": kind, "architectures": [name]})
    )
    with pytest.raises(CheckpointError, match=f"{name}.*{REFUSED[name]}"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (sentence_files({"path": "2", "type": "x.LSTM"}), "the module LSTM"),
        (
            sentence_files(NORMALIZE, DENSE),
            "modules Transformer Pooling Normalize Dense in this",
        ),
        (sentence_files(pooling={"pooling_mode": ["cls", "mean"]}), "but cls, mean"),
        (
            {k: v for k, v in sentence_files(NORMALIZE).items() if "Pooling" not in k},
            "names 1_Pooling, and .* is missing",
        ),
        (sentence_files(pooling={"include_prompt": False}), "include_prompt false"),
        (sentence_files(DENSE) | {"2_Dense/config.json": {}}, "no out_features"),
        (
            sentence_files(DENSE)
            | {"2_Dense/config.json": {"activation_function": "torch.nn.CELU"}},
            "the activation CELU",
        ),
    ],
)
def test_modules_that_do_not_run_are_refused_by_name(
    files: dict[str, Any], says: str, tmp_path: Path
) -> None:
    save(make_encoder("bert"), tmp_path / "model", files)
    with pytest.raises(CheckpointError, match=says):
        read_sentence_folder(tmp_path / "model")


@pytest.mark.parametrize(
    "name", ["bert", "roberta", "distilbert", "mpnet", "modernbert", "t5"]
)
def test_tensors_of_heads_are_left_out_where_the_config_names_the_model(
    name: str, tmp_path: Path
) -> None:
    own = ENCODERS.get(name, ("T5EncoderModel",))[0]
    maker = (
        "AutoModelForSeq2SeqLM" if name == "t5" else own.replace("Model", "ForMaskedLM")
    )
    model = make_encoder(name, maker)
    folder = save(model, tmp_path / "model")
    fields = json.loads((folder / "config.json").read_text()) | {"architectures": [own]}
    (folder / "config.json").write_text(json.dumps(fields))
    check(
        vectors(folder),
        oracle(model.encoder if name == "t5" else model.base_model, mean),
    )


def test_the_length_limit_of_a_folder_of_today(tmp_path: Path) -> None:
    """sentence-transformers 6 writes it into the tokenizer's file alone."""
    files = sentence_files() | {"tokenizer_config.json": {"model_max_length": 10}}
    folder = save(make_encoder("bert"), tmp_path / "model", files)
    assert open_checkpoint(str(folder)).context_length == 10


def model_digest(folder: Path) -> str:
    config = make_config(str(folder))
    return compute_fingerprint(
        config, open_model(config), torch.float32, torch.float32
    )["the model"]


def test_a_fingerprint_covers_how_vectors_are_made(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    dense_folder(make_encoder("bert"), folder)
    seen = {model_digest(folder)}
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode": "max"}')
    seen.add(model_digest(folder))
    torch.save(
        {"linear.weight": torch.ones(24, 64)}, folder / "2_Dense/pytorch_model.bin"
    )
    seen.add(model_digest(folder))
    settings = folder / "config_sentence_transformers.json"
    settings.write_text('{"similarity_fn_name": "dot"}')
    seen.add(model_digest(folder))
    assert len(seen) == 4
    assert "reading_0.pytorch_model.bin" in digest_weight_files(
        open_checkpoint(str(folder))
    )


@pytest.mark.parametrize("quantized", ["int8", "int4"])
def test_quantized_encoders(quantized: str, tmp_path: Path) -> None:
    """Quantized as they are loaded, or before, they give the same vectors, near the
    exact ones."""
    model = make_encoder("bert")
    folder = tmp_path / "model"
    exact = read_by(dense_folder(model, folder), oracle(model, mean))
    loaded = vectors(folder, quantize=quantized)
    nearness = nn.functional.cosine_similarity(loaded, exact)
    assert nearness.min() > 0.9 and nearness.max() < 1 - 1e-7
    told = open_checkpoint(str(folder))
    (tmp_path / "small").mkdir()
    write_quantized_folder(
        told, tmp_path / "small", quantized, seed=0, on_progress=lambda *_: None
    )
    check(vectors(tmp_path / "small"), loaded)
    check(vectors(tmp_path / "small", num_shards=2, num_stages=2), loaded, 0.02)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["bert", "modernbert:scores", "mpnet"])
def test_encoders_in_16_bits(name: str, dtype: str, tmp_path: Path) -> None:
    model = make_encoder(name)
    folder = save(model, tmp_path / "model")
    expected = oracle(model, mean)
    check(
        vectors(folder, dtype=dtype),
        expected,
        {"bfloat16": 0.05, "float16": 0.01}[dtype],
    )
    check(
        vectors(folder, dtype=dtype, kernels="off"),
        expected,
        {"bfloat16": 0.05, "float16": 0.01}[dtype],
    )


DECODED = [
    torch.randint(3, VOCAB, (length,), generator=_DRAWN).tolist()
    for length in (1, 6, 3, 20, 2)
]


@pytest.mark.parametrize(
    ("name", "split"),
    [  # each with two of them in turn
        pytest.param(name, split, marks=[] if (place - turn) % 5 in (0, 2) else [more])
        for place, name in enumerate(PAIRS)
        for turn, split in enumerate(SPLITS)
    ],
)
@torch.no_grad()
def test_encoders_with_decoders(name: str, split: str, tmp_path: Path) -> None:
    """What the encoder gives, and the logprobs of a prefill and of a step of one token each."""
    model = make_encoder(name)
    ranks = ranks_of(save(model, tmp_path / "model"), **SPLITS[split])
    lengths = np.array([*map(len, PROMPTS)])
    num = len(PROMPTS)
    whole = Step(0, lengths=lengths, token_ids=np.concatenate(PROMPTS))
    memory = ranks.run(whole).vectors
    found = (
        torch.from_numpy(memory)
        .view(torch.float32)
        .view(-1, 64)
        .split(lengths.tolist())
    )
    for prompt, own in zip(PROMPTS, found, strict=True):
        check(
            own,
            model.get_encoder()(input_ids=torch.tensor([prompt])).last_hidden_state[0],
        )
    needs = [-(-(len(ids) + 1) // 16) for ids in DECODED] + [*(-(-lengths // 16))]
    places = [(slot, at) for slot, need in enumerate(needs) for at in range(need)]
    own = np.array([*map(len, DECODED)])
    each = np.arange(num, dtype=np.int32)
    cross: Any = {"slots": each, "cross_slots": each + num, "cross_lengths": lengths}
    first = Step(
        1,
        positions=0 * own,
        lengths=own,
        token_ids=np.concatenate(DECODED),
        new_blocks=np.array(
            [(*place, block) for block, place in enumerate(places)], np.int32
        ),
        encoder_output_lengths=lengths,
        encoder_output=memory.reshape(-1),
        draws=make_draws(
            (own.cumsum() - 1).tolist(), num_top=[5] * num, temperature=[0] * num
        ),
        **cross,
    )
    drawn = [ranks.run(first).logprobs_of("tokens")]
    second = Step(
        2,
        positions=own,
        lengths=0 * own + 1,
        token_ids=drawn[0].ids,
        encoder_output_lengths=0 * own,
        draws=make_draws([*range(num)], num_top=[5] * num, temperature=[0] * num),
        **cross,
    )
    drawn.append(ranks.run(second).logprobs_of("tokens"))
    for row, (prompt, ids) in enumerate(zip(PROMPTS, DECODED, strict=True)):
        given = torch.tensor([[*ids, int(drawn[0].ids[row])]])
        logits = model(
            input_ids=torch.tensor([prompt]), decoder_input_ids=given
        ).logits[0]
        for expected, of_step in zip(logits[-2:].log_softmax(-1), drawn, strict=True):
            check(torch.from_numpy(of_step.top_logprobs[row]), expected.topk(5).values)
