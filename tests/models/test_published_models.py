"""Whole published checkpoints beside transformers in float32 with the dequantized weights."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import fminfer
from fminfer.compute.formats.dense import Dense
from fminfer.core.config import EngineConfig
from fminfer.core.errors import CheckpointError
from fminfer.core.partition import split_layers
from fminfer.models.checkpoint import open_checkpoint
from fminfer.models.holding import Holding
from fminfer.models.layer_source import open_weights
from fminfer.models.origins import check_tensors
from fminfer.models.quantized_folder import write_quantized_folder
from fminfer.plan.planning import plan_ahead
from tests import conftest
from tests.conftest import FIELDS, make_model, more, save_byte_tokenizer
from tests.forward.test_transformer import error_of, logits_of, one_stage
from tests.models.test_quantized import widened
from tests.published_building import (
    CASES,
    GPTQ_4,
    W8,
    Choose,
    Read,
    Store,
    compressed,
    list_stored_formats,
    load_floats,
    publish,
    read_bytes,
    read_gptq,
    read_packed,
    store_bytes,
    store_gptq,
    store_mxfp4,
    store_packed,
    with_each,
    write_quantization,
)

MAX_ERROR = 1e-4
CPU = torch.device("cpu")
DENSE = ("llama", "qwen2")  # without and with biases
MIXTURES = ("qwen3_moe", "deepseek_v3")
# Of mixtures, one of each way to read: by words, in an order, as bytes, by tiles, as floats.
FEW = ("gptq", "packed in act-order", "int8 with zeros", "fp8", "nvfp4")
PROMPTS = [[3 + (7 * i + n) % 200 for i in range(9 + 3 * n)] for n in range(4)]


def publish_wide(
    name: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: tuple[Any, Choose],
    extra: Any = None,
) -> tuple[Path, Any]:
    """Publish a model whose rows are whole blocks."""
    monkeypatch.setitem(conftest.FIELDS, name, widened(FIELDS[name]))
    return publish(name, folder, *case, extra)


def check_logits(folder: Path, model: Any) -> None:
    """By one stage and by two, in plain torch."""
    assert error_of(logits_of(folder, one_stage()), model) < MAX_ERROR
    in_two = logits_of(folder, split_layers(3, 2, head_cost=0.0))
    assert error_of(in_two, model) < MAX_ERROR


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", [*DENSE, *MIXTURES])
def test_logits_are_those_of_the_dequantized_weights(
    name: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in MIXTURES and case not in FEW and not conftest.IS_ALL:
        pytest.skip("more of the same; scripts/test --all")
    check_logits(*publish_wide(name, tmp_path, monkeypatch, CASES[case]))


@pytest.mark.parametrize("case", ["gptq in act-order", "packed", "fp8", "nvfp4"])
def test_rows_that_are_no_whole_blocks_become_floats(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 48 inputs: the last group is short, or a tile has no 32."""
    fields = FIELDS["qwen3_moe"]
    assert fields["moe_intermediate_size"] == 48
    check_logits(*publish("qwen3_moe", tmp_path, *CASES[case]))


def save_gpt_oss(folder: Path) -> tuple[Path, Any]:
    """Save gpt-oss with experts in MXFP4, as it was published."""
    model = make_model("gpt_oss")
    mine = folder / "published"
    theirs = folder / "floats"
    for each in (mine, theirs):
        model.save_pretrained(each)
    save_byte_tokenizer(mine)
    tensors = load_file(theirs / "model.safetensors")
    published = {}
    for name, tensor in tensors.items():
        if tensor.dim() < 3:
            published[name] = tensor
            continue
        parts = store_mxfp4(tensor.mT.contiguous())
        published |= {f"{name}_{leaf}": part for leaf, part in parts.items()}
        tensors[name] = convert_moe_packed_tensors(
            parts["blocks"], parts["scales"], dtype=torch.float32
        ).contiguous()
    save_file(published, mine / "model.safetensors")
    save_file(tensors, theirs / "model.safetensors", metadata={"format": "pt"})
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    write_quantization(mine, {"quant_method": "mxfp4", "modules_to_not_convert": kept})
    return mine, load_floats(theirs, model)


def test_gpt_oss_has_experts_in_mxfp4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts are stored outputs first, unlike floats; rows of gate and up take turns."""
    monkeypatch.setitem(conftest.FIELDS, "gpt_oss", widened(FIELDS["gpt_oss"]))
    folder, model = save_gpt_oss(tmp_path)
    check_logits(folder, model)
    check_run(folder, model)
    check_run(folder, model, tensor_parallel_size=2)


def test_a_tied_embedding_stays_in_floats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = publish_wide("llama-biases", tmp_path, monkeypatch, CASES["awq"])
    assert model.config.tie_word_embeddings
    check_logits(folder, model)


def test_a_head_may_be_quantized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(name: str) -> tuple[Store, Read] | None:
        return None if "norm" in name or "embed" in name else (store_gptq, read_gptq)

    case = (GPTQ_4 | {"lm_head": True}, choose)
    folder, model = publish_wide("llama", tmp_path, monkeypatch, case)
    check_logits(folder, model)
    ((head, _),) = list_stored_formats(open_checkpoint(str(folder)))["head.weight"]
    assert head.name == "whole4-32"


def choose_mixed(name: str) -> tuple[Store, Read] | None:
    """Values have 8 bits, which are joined to queries of 4, and one layer has floats."""
    if ".layers.1." in name or "layers" not in name or "norm" in name:
        return None
    if "v_proj" in name:
        return partial(store_gptq, bits=8, group=64), partial(read_gptq, bits=8)
    return store_gptq, read_gptq


def choose_mixed_packed(name: str) -> tuple[Store, Read] | None:
    if ".layers.1." in name or "layers" not in name or "norm" in name:
        return None
    return (
        (store_bytes, read_bytes) if "v_proj" in name else (store_packed, read_packed)
    )


def mixed_groups() -> dict[str, Any]:
    """Return a config of compressed-tensors whose values have 8 bits."""
    config = compressed(
        "mixed-precision", **W8, type="int", strategy="channel", actorder="static"
    )
    bytes_of_values = config["config_groups"]["group_0"]
    bytes_of_values |= {"targets": ["re:.*v_proj$"], "format": "int-quantized"}
    bytes_of_values["input_activations"] = {"num_bits": 8, "dynamic": True}
    others = compressed(
        "pack-quantized",
        num_bits=4,
        type="int",
        symmetric=False,
        strategy="group",
        group_size=32,
    )["config_groups"]["group_0"]
    config["config_groups"] = {
        "group_1": others | {"format": "pack-quantized"},
        "group_0": bytes_of_values,
    }
    config["ignore"] = ["lm_head", r"re:.*\.layers\.1\..*"]
    return config


@pytest.mark.parametrize(
    "case",
    [
        (
            GPTQ_4
            | {
                "dynamic": {
                    r"-:.*\.layers\.1\.": {},
                    r"+:.*v_proj": {"bits": 8, "group_size": 64},
                }
            },
            choose_mixed,
        ),
        (mixed_groups(), choose_mixed_packed),
    ],
    ids=["gptq", "compressed"],
)
def test_modules_of_several_kinds_are_one_model(
    case: tuple[Any, Choose], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = publish_wide("llama", tmp_path, monkeypatch, case)
    check_logits(folder, model)
    parts = list_stored_formats(open_checkpoint(str(folder)))
    values = "whole8-64" if case[0]["quant_method"] == "gptq" else "whole8-row"
    names = [each.name for each, _ in parts["0.qkv.weight"]]
    assert names == ["whole4-32", "whole4-32", values]
    assert {each.name for each, _ in parts["1.qkv.weight"]} == {"float32"}
    check_run(folder, model)


def choose_ordered(name: str) -> tuple[Store, Read] | None:
    """Store each matrix in an order of its own."""
    if "layers" not in name or "norm" in name or "gate.weight" in name:
        return None
    return partial(store_gptq, seed=crc32(name.encode())), read_gptq


ACT_ORDER = GPTQ_4 | {"desc_act": True}
RUNS: list[dict[str, Any]] = [
    {},
    {"kernels": "off"},
    {"world_size": 2},
    {"tensor_parallel_size": 2},
    {"offload": "disk"},
]


def check_run(
    folder: Path, model: Any, error: float = MAX_ERROR, **options: Any
) -> None:
    """Compare the logprobs of a run with those that transformers gives to its tokens."""
    engine = fminfer.Engine(
        str(folder), **({"dtype": "float32", "budget": 1024} | options)
    )
    line = {"max_tokens": 5, "temperature": 0, "logprobs": 0, "ignore_eos": True}
    line["return_token_ids"] = True
    records = sorted(
        engine.run([{"prompt": ids} | line for ids in PROMPTS]),
        key=lambda record: record.line.number,
    )
    engine.close()
    for ids, record in zip(PROMPTS, records, strict=True):
        (choice,) = record.to_dict()["result"]["choices"]
        tokens = choice["token_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])
        found = torch.tensor(choice["logprobs"]["token_logprobs"])
        torch.testing.assert_close(found, expected[:, 0], atol=error, rtol=0)


@pytest.mark.parametrize("options", RUNS, ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3"])
def test_each_matrix_may_have_an_order_of_its_own(
    name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries, keys and values are joined, and experts stacked. Ranks cut inputs."""
    if name != "llama" and options and not conftest.IS_ALL:
        pytest.skip("more of the same; scripts/test --all")
    case = (ACT_ORDER, choose_ordered)
    check_run(*publish_wide(name, tmp_path, monkeypatch, case), **options)


@pytest.mark.parametrize("options", RUNS, ids=str)
@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("llama", "gptq"),
        ("qwen3_moe", "fp8 of channels"),
        *(
            pytest.param(name, case, marks=more)
            for name in ("qwen2", *MIXTURES)
            for case in ("awq", "packed 8 bits", "fp8 of tensors")
        ),
    ],
)
def test_runs_answer_with_them(
    name: str,
    case: str,
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By kernels and without, by two stages, by two ranks of one, and with streamed layers."""
    if name == "deepseek_v3" and "tensor_parallel_size" in options:
        pytest.skip("its experts have 32 inputs, which no cut divides")
    folder, model = publish_wide(name, tmp_path, monkeypatch, CASES[case])
    check_run(folder, model, **options)


@pytest.mark.parametrize("case", ["gptq", "gptq in act-order", "fp8 of channels"])
def test_activations_may_be_bfloat16(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = publish_wide("llama", tmp_path, monkeypatch, CASES[case])
    check_run(folder, model, error=0.1, dtype="bfloat16")


@pytest.mark.parametrize("case", ["gptq", "packed in act-order", "fp8", "nvfp4"])
def test_a_forecast_counts_what_is_held(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kv_b_proj` becomes floats as its layer is made; so do rows that blocks do not fit."""
    folder, _ = publish_wide("deepseek_v3", tmp_path, monkeypatch, CASES[case])
    checkpoint = open_checkpoint(str(folder))
    (part,) = one_stage()
    holding = Holding(torch.float32)
    source = open_weights(checkpoint, part, holding=holding, device=CPU, seed=0)
    for weights in source.load_layers():
        assert weights["kv_up.weight"].format == Dense(torch.float32)
        is_held = weights["out.weight"].format.floats is None
        assert is_held == (case != "nvfp4")
    config = EngineConfig(model=str(folder), dtype="float32", budget=512)
    takes = plan_ahead(config, checkpoint).this_rank.takes
    assert takes.weights >= source.num_bytes >= takes.held_weights


def test_biases_that_no_model_has_must_be_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Early quantizers wrote a bias for each matrix."""
    name = "model.layers.1.mlp.up_proj.bias"
    extra = {name: torch.zeros(128).half()}
    folder, model = publish_wide("llama", tmp_path, monkeypatch, CASES["gptq"], extra)
    check_logits(folder, model)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[name][5] = 1
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=f"bias '{name}' that is not 0"):
        check_tensors(open_checkpoint(str(folder)))


def test_biases_of_what_is_passed_over_may_have_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a vision tower, which GPTQ leaves as it is, were refused."""
    folder, model = publish_wide("gemma3", tmp_path, monkeypatch, CASES["gptq"])
    tensors = load_file(folder / "model.safetensors")
    assert any(n.startswith("vision_tower") and n.endswith(".bias") for n in tensors)
    check_logits(folder, model)


def store_without_order(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    groups = torch.full((weight.shape[1],), -1, dtype=torch.int32)
    return store_packed(weight, is_symmetric=True) | {"weight_g_idx": groups}


def read_without_order(stored: dict[str, torch.Tensor]) -> Any:
    return read_packed({n: t for n, t in stored.items() if n != "weight_g_idx"})


def test_an_expert_without_tokens_has_no_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quantizer that saw none writes -1 for each input."""
    config, choose_others = CASES["packed in act-order"]

    def choose(name: str) -> tuple[Store, Read] | None:
        is_unseen = "experts.3." in name
        unseen = store_without_order, read_without_order
        return unseen if is_unseen else choose_others(name)

    check_logits(*publish_wide("qwen3_moe", tmp_path, monkeypatch, (config, choose)))


def test_a_file_beside_that_says_the_same_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """quantize_config.json was refused wherever it lay; config.json counts."""
    folder, _ = publish_wide("llama", tmp_path, monkeypatch, CASES["gptq"])
    (folder / "quantize_config.json").write_text(json.dumps({"bits": 4}))
    check_tensors(open_checkpoint(str(folder)))
    fields = json.loads((folder / "config.json").read_text())
    del fields["quantization_config"]
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match="has no quantization_config that says"):
        open_checkpoint(str(folder))


def test_layers_that_predict_several_tokens_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek's last one is quantized, too, and has scales."""
    module = "model.layers.3.self_attn.o_proj"
    weight = torch.zeros(64, 64).to(torch.float8_e4m3fn)
    extra = {f"{module}.weight": weight, f"{module}.weight_scale_inv": torch.ones(1, 1)}
    case = CASES["fp8"]
    check_logits(*publish_wide("deepseek_v3", tmp_path, monkeypatch, case, extra))


def test_it_is_not_quantized_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = publish_wide("llama", tmp_path, monkeypatch, CASES["awq"])
    with pytest.raises(CheckpointError, match="is quantized already"):
        write_quantized_folder(
            open_checkpoint(str(folder)),
            tmp_path,
            "int4",
            seed=0,
            on_progress=lambda done, total: None,
        )


def test_every_module_may_stay_in_floats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AWQ leaves routers and heads as they are, and no rule names them."""
    case = (CASES["awq"][0], lambda name: None)
    check_logits(*publish_wide("qwen3_moe", tmp_path, monkeypatch, case))
    assert with_each(store_gptq, read_gptq)("model.layers.0.mlp.gate.weight") is None
