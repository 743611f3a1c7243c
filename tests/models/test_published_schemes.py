"""What a `quantization_config` may say, what is refused, and what a forecast knows of it."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fminfer.core.config import EngineConfig
from fminfer.core.errors import CheckpointError
from fminfer.models.checkpoint import open_checkpoint, open_random_checkpoint
from fminfer.models.origins import (
    check_tensors,
    find_origins,
    read_origins,
)
from fminfer.models.published.schemes import METHODS, REFUSED, parse_scheme
from fminfer.plan.planning import plan_ahead
from tests.conftest import family_config, num_examples
from tests.published_building import (
    AWQ_4,
    CASES,
    FP8,
    GPTQ_4,
    W4A16,
    compressed,
    list_stored_formats,
    publish,
    write_quantization,
)

GIB = 1 << 30


def with_group(**changes: Any) -> dict[str, Any]:
    """Return W4A16 with another group of modules, or other weights of it."""
    config = copy.deepcopy(dict(W4A16))
    group = config["config_groups"]["group_0"]
    weights = changes.pop("weights", {})
    group |= changes
    group["weights"] |= weights
    return config


@pytest.mark.parametrize(
    ("config", "named"),
    [
        *(
            ({"quant_method": method}, f"by '{method}' .*does not run")
            for method in REFUSED
        ),
        (
            {"quant_method": "new"},
            r"by 'new', which does not run\. These do: gptq, awq",
        ),
        ({"bits": 4}, "by None, which does not run"),
        ({"quant_method": ["gptq"]}, "which does not run"),
        (["gptq"], "quantization_config to .*an object is allowed"),
        (GPTQ_4 | {"bits": 3}, r"bits to 3: 4, 8 run\. Take the model in 16 bits"),
        (GPTQ_4 | {"bits": 2}, "bits to 2: 4, 8 run"),
        (GPTQ_4 | {"bits": 4.0}, r"bits to 4\.0"),
        (GPTQ_4 | {"bits": True}, "bits to True"),
        (GPTQ_4 | {"group_size": 0}, "group_size to 0: -1, or the inputs"),
        (GPTQ_4 | {"group_size": "128"}, "group_size to '128'"),
        (GPTQ_4 | {"checkpoint_format": "marlin"}, "checkpoint_format to 'marlin'"),
        (GPTQ_4 | {"is_marlin_format": True}, "order of Marlin's kernels"),
        (GPTQ_4 | {"pack_dtype": "int16"}, "pack_dtype to 'int16'"),
        (
            GPTQ_4 | {"adapter": {"rank": 8}},
            "adapter to .*does not know what it changes",
        ),
        (GPTQ_4 | {"dynamic": {"(": {}}}, "is no regular expression"),
        (GPTQ_4 | {"dynamic": {"a": {"bits": 5}}}, r"dynamic\['a'\]\.bits to 5"),
        (GPTQ_4 | {"dynamic": {"a": {"rank": 5}}}, r"dynamic\['a'\]\.rank to 5"),
        (GPTQ_4 | {"kv_cache_scheme": {"num_bits": 8}}, "KV cache in 8 bits are not"),
        (AWQ_4 | {"version": "gemv"}, "version to 'gemv': 'gemm', 'GEMM' run"),
        (AWQ_4 | {"version": "gemv_fast"}, "version to 'gemv_fast'"),
        (AWQ_4 | {"backend": "llm-awq"}, "backend to 'llm-awq'"),
        (AWQ_4 | {"bits": 8}, "bits to 8: 4 run"),
        (AWQ_4 | {"modules_to_not_convert": "gate"}, "a list of names of modules"),
        (AWQ_4 | {"modules_to_not_convert": [1]}, "to 1; names of modules are allowed"),
        (FP8 | {"fmt": "e5m2"}, "fmt to 'e5m2'"),
        (
            FP8 | {"weight_block_size": [128]},
            r"weight_block_size to \[128\]: two sizes",
        ),
        (FP8 | {"weight_block_size": [0, 128]}, "two sizes"),
        (FP8 | {"expert_dtype": "fp4"}, "expert_dtype to 'fp4'"),
        (FP8 | {"modules_to_convert": ["embed"]}, "modules_to_convert to"),
        (FP8 | {"kv_cache_scheme": "static"}, "kv_cache_scheme to 'static'"),
        (FP8 | {"kv_cache_quant_method": "x"}, "kv_cache_quant_method to 'x'"),
        (W4A16 | {"format": "marlin-24"}, "format to 'marlin-24'"),
        (W4A16 | {"format": "dense"}, "format to 'dense'"),
        (W4A16 | {"sparsity_config": {"format": "sparse-24"}}, "sparse weights"),
        (W4A16 | {"transform_config": {"a": 1}}, "rotations of weights"),
        (with_group(format="mixed-precision"), "format to 'mixed-precision'"),
        (with_group(output_activations={"num_bits": 8}), "outputs in 8 bits"),
        (with_group(weights={"num_bits": 3}), "num_bits to 3: 4, 8 run"),
        (with_group(weights={"actorder": "other"}), "actorder to 'other'"),
        (with_group(weights={"dynamic": True}), "dynamic to True"),
        (with_group(weights={"strategy": "channel"}), "the strategy is 'channel'"),
        (with_group(weights={"strategy": "block"}), "strategy to 'block'"),
        (with_group(weights={"new": 1}), "new to 1: fminfer does not know"),
        (with_group(more=1), r"config_groups\['group_0'\]\.more to 1"),
    ],
)
def test_what_does_not_run_is_refused_by_name(config: Any, named: str) -> None:
    with pytest.raises(CheckpointError, match=named) as refused:
        parse_scheme(config)
    assert "Take the model in 16 bits" in str(refused.value) or "allowed" in named
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize(
    "config",
    [
        GPTQ_4 | {"backend": "auto", "hyb_act": False, "v2": False, "v2_alpha": 0.25},
        GPTQ_4 | {"awq_gemm_checkpoint": False},
        AWQ_4 | {"checkpoint_format": "gemm", "pack_dtype": "int32", "desc_act": False},
    ],
)
def test_what_quantizers_note_of_their_work_changes_nothing(config: Any) -> None:
    """By transformers 5, GPTQModel and AutoGPTQ."""
    assert parse_scheme(config) is not None


def test_every_method_that_runs_is_parsed() -> None:
    methods = [config["quant_method"] for config, _ in CASES.values()]
    assert {*methods, "mxfp4"} == METHODS.keys()
    assert parse_scheme(None) is None


@pytest.mark.parametrize(
    ("config", "module", "is_quantized"),
    [
        (
            AWQ_4 | {"modules_to_not_convert": ["gate"]},
            "model.layers.0.mlp.gate",
            False,
        ),
        (
            AWQ_4 | {"modules_to_not_convert": ["gate"]},
            "model.layers.0.gate_proj",
            True,
        ),
        (
            AWQ_4 | {"modules_to_not_convert": ["layers.1"]},
            "model.layers.1.q_proj",
            False,
        ),
        (
            AWQ_4 | {"modules_to_not_convert": ["layers.1"]},
            "model.layers.11.q_proj",
            True,
        ),
        (FP8 | {"ignored_layers": ["lm_head.weight"]}, "lm_head", False),
        (
            FP8 | {"modules_to_not_convert": ["model.layers.*.mlp.gate"]},
            "model.layers.3.mlp.gate",
            False,
        ),
        (
            FP8 | {"modules_to_not_convert": ["model.layers.*.mlp.gate"]},
            "model.layers.3.mlp.gate_proj",
            True,
        ),
        (W4A16 | {"ignore": ["re:.*gate$"]}, "model.layers.3.mlp.gate", False),
        (W4A16 | {"ignore": ["re:.*gate$"]}, "model.layers.3.mlp.gate_proj", True),
        (with_group(targets=["re:.*up_proj"]), "model.layers.3.mlp.gate_proj", False),
        (
            with_group(targets=["model.layers.3.mlp"]),
            "model.layers.3.mlp.up_proj",
            True,
        ),
        (GPTQ_4 | {"dynamic": {"-:.*q_proj": {}}}, "model.layers.3.q_proj", False),
        # names in a model with images, as quantizers and files have them
        *(
            (GPTQ_4 | {"dynamic": {rf"-:{where}\.layers\.3\.": {}}}, module, is_other)
            for where in (r"language_model\.model", r"model\.language_model", "model")
            for module, is_other in (
                ("model.layers.3.q_proj", False),
                ("model.layers.13.q_proj", True),
            )
        ),
        (
            with_group(targets=["language_model.model.layers.3.mlp.up_proj"]),
            "model.layers.3.mlp.up_proj",
            True,
        ),
        (W4A16 | {"ignore": ["language_model.lm_head"]}, "lm_head", False),
        (GPTQ_4 | {"dynamic": {"q_proj": {"bits": 8}}}, "model.layers.3.q_proj", True),
    ],
)
def test_names_choose_modules(
    config: Mapping[str, Any], module: str, is_quantized: bool
) -> None:
    """A name is a part of a path, not of a word: "gate" is no gate_proj."""
    scheme = parse_scheme(dict(config))
    assert scheme is not None
    assert (scheme.find_reader(module, (64, 64)) is not None) == is_quantized
    assert scheme.find_reader(module, (4, 64, 64)) is None, "stacked experts"


# What is changed of the stored tensors of one module of "llama", and what is said.
UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("case", "change", "named"),
    [
        ("gptq", {"scales": None}, f"lacks 1 of .*'{UP}.scales'.* incomplete"),
        ("gptq", {"qzeros": None}, f"lacks 1 of .*'{UP}.qzeros'"),
        ("gptq in act-order", {"g_idx": None}, f"lacks 1 of .*'{UP}.g_idx'"),
        ("gptq", {"scales": torch.ones(3, 128)}, rf"{UP}.scales' has shape \(3, 128\)"),
        (
            "gptq",
            {"scales": torch.ones(2, 128).int()},
            r"scales' as I32, .*asks for F16",
        ),
        ("gptq", {"g_idx": torch.zeros(64)}, r"g_idx' as F32, .*asks for I32"),
        ("gptq", {"g_idx": torch.zeros(63).int()}, r"g_idx' has shape \(63,\)"),
        ("gptq", {"more": torch.zeros(3)}, f"holds a tensor '{UP}.more'"),
        ("awq", {"scales": None}, f"lacks 1 of .*'{UP}.scales'"),
        ("packed", {"weight_zero_point": None}, f"lacks .*'{UP}.weight_zero_point'"),
        ("packed", {"k_scale": torch.ones(1)}, f"holds a tensor '{UP}.k_scale'"),
        ("fp8", {"weight_scale_inv": None}, f"lacks 1 of .*'{UP}.weight_scale_inv'"),
        ("fp8", {"weight_scale_inv": torch.ones(2, 1)}, r"has shape \(2, 1\)"),
        (
            "fp8",
            {"weight": torch.zeros(128, 64).to(torch.float8_e5m2)},
            "weight' as F8_E5M2, .*asks for F8_E4M3",
        ),
        ("nvfp4", {"weight_global_scale": None}, "lacks .*weight_global_scale'"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_refused_by_name(
    case: str, change: Mapping[str, torch.Tensor | None], named: str, tmp_path: Path
) -> None:
    folder, _ = publish("llama", tmp_path, *CASES[case])
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for leaf, tensor in change.items():
        if tensor is None:
            del tensors[f"{UP}.{leaf}"]
        else:
            tensors[f"{UP}.{leaf}"] = tensor
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=named):
        check_tensors(open_checkpoint(str(folder)))


@pytest.mark.parametrize("case", ["gptq", "fp8", "packed"])
def test_what_is_named_as_floats_has_floats(case: str, tmp_path: Path) -> None:
    folder, _ = publish("llama", tmp_path, *CASES[case])
    config, _ = CASES[case]
    key = "ignore" if case == "packed" else "modules_to_not_convert"
    write_quantization(folder, dict(config) | {key: [UP, "lm_head"]})
    said = f"'{UP}.weight'|'{UP}.weight_packed'|does not say that it is quantized so"
    with pytest.raises(CheckpointError, match=said):
        check_tensors(open_checkpoint(str(folder)))


def test_files_in_few_bits_need_a_config_that_says_how(tmp_path: Path) -> None:
    folder, _ = publish("llama", tmp_path, *CASES["fp8"])
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    del fields["quantization_config"]
    path.write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match="run if a quantization_config says how"):
        check_tensors(open_checkpoint(str(folder)))


def test_random_weights_have_no_scheme(tmp_path: Path) -> None:
    config = family_config("llama")
    config.quantization_config = dict(GPTQ_4)
    config.save_pretrained(tmp_path)
    with pytest.raises(
        CheckpointError, match="quantized by gptq, and random weights are"
    ):
        open_random_checkpoint(str(tmp_path))


def test_a_part_of_a_model_with_images_has_the_scheme_of_the_whole(
    tmp_path: Path,
) -> None:
    """The field stands beside text_config; names begin with language_model."""
    folder, _ = publish("gemma3", tmp_path, *CASES["fp8"])
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.config.quantization_config["quant_method"] == "fp8"
    formats = list_stored_formats(checkpoint)
    assert {each.name for each, _ in formats["0.qkv.weight"]} == {"float8-row"}


def mutate(value: Any, rng: random.Random) -> Any:
    """Return a config with one place changed: a value, a key, or one more."""
    changed = copy.deepcopy(value)
    places: list[tuple[Any, Any]] = []

    def collect(part: Any) -> None:
        items = part.items() if isinstance(part, dict) else enumerate(part)
        for key, inner in [*items]:
            places.append((part, key))
            if isinstance(inner, dict | list):
                collect(inner)

    collect(changed)
    if not places:
        return changed
    part, key = rng.choice(places)
    values: list[Any] = [None, True, False, 0, 1, -1, 4, 8, 3, 64, 1 << 70, -0.5, 1e400]
    values += ["", "gptq", "4", "re:(", "re:.*", "*", [], [1, 2], ["lm_head"], {}]
    values += [
        {"a": {}},
        [[]],
        {"group_0": None},
        float("nan"),
        "1x2",
        "9" * 5000 + "x1",
    ]
    kind = rng.randrange(4)
    if kind == 0 and isinstance(part, dict):
        del part[key]
    elif kind == 1 and isinstance(part, dict):
        names = [name for name, _ in FIELDS_OF_ALL]
        part[rng.choice(names)] = rng.choice([*values, *(v for _, v in FIELDS_OF_ALL)])
    else:
        part[key] = rng.choice(values)
    return changed


FIELDS_OF_ALL = [(k, v) for config, _ in CASES.values() for k, v in config.items()]
FIELDS_OF_ALL += [*W4A16["config_groups"]["group_0"]["weights"].items()]
FIELDS_OF_ALL += [("dynamic", {"-:a": {}, "b": {"bits": 8}}), ("lm_head", True)]


def test_changed_configs_are_read_or_refused(tmp_path: Path) -> None:
    """No other exception, neither as a config is parsed nor as tensors are sought by it."""
    rng = random.Random(81)
    shapes = ((64, 64), (300, 64), (7, 33), (4, 64, 64))
    num_parsed = 0
    for number in range(num_examples(12_000)):
        config, _ = [*CASES.values()][number % len(CASES)]
        for _ in range(rng.choice((1, 1, 2, 3))):
            config = mutate(config, rng)
        try:
            scheme = parse_scheme(config)
        except CheckpointError:
            continue
        if scheme is None:
            continue
        num_parsed += 1
        shape = rng.choice(shapes)
        reader = scheme.find_reader(UP, shape)
        if reader is not None:
            parts = reader.stored(f"{UP}.weight", shape, is_transposed=False)
            assert all(
                part.startswith(UP) and types for part, (types, _) in parts.items()
            )
    assert num_parsed > 100


def test_changed_headers_are_read_or_refused(tmp_path: Path) -> None:
    """Shapes and types of stored tensors change; what fits is read, with whatever values."""
    rng = random.Random(82)
    generator = torch.Generator().manual_seed(82)
    num_read = 0
    types = ("F16", "BF16", "F32", "I32", "I8", "U8", "F8_E4M3", "F8_E5M2", "I64", "F4")
    for number, (case, (config, choose)) in enumerate(CASES.items()):
        folder, _ = publish("llama", tmp_path / str(number), config, choose)
        checkpoint = open_checkpoint(str(folder))
        files, _ = read_origins(checkpoint, folder)
        names = [name for name in files.shapes if UP in name]
        for _ in range(num_examples(300)):
            shapes = dict(files.shapes)
            changed_types = dict(files.types)
            name = rng.choice(names)
            sizes = [*shapes[name]]
            for _ in range(rng.randrange(2)):
                sizes = rng.choice(([], [*sizes, 1], [1, *sizes], sizes[:-1], [3, 3]))
            shapes[name] = tuple(sizes)
            if rng.random() < 0.3:
                changed_types[name] = rng.choice(types)
            if rng.random() < 0.1:
                del shapes[name], changed_types[name]
            try:
                origins = find_origins(checkpoint, shapes, changed_types)
            except CheckpointError:
                continue
            pieces = [p for p in origins["1.up.weight"].pieces if p.reader is not None]
            for piece in pieces:
                stored = {}
                for part in piece.stored:
                    tensor = files.read(part).reshape(shapes[part]).clone()
                    size = tensor.untyped_storage().nbytes()
                    if rng.random() < 0.3:
                        noise = torch.randint(
                            256, (size,), dtype=torch.uint8, generator=generator
                        )
                        tensor = noise.view(tensor.dtype).reshape(tensor.shape)
                    stored[part] = tensor
                try:
                    assert piece.reader is not None
                    tensors = piece.reader.read(stored, is_transposed=False)
                except CheckpointError as error:
                    assert UP in str(error) or "gate_proj" in str(error), case
                    continue
                numbers = piece.reader.format.dequantize(tensors, torch.float32)
                assert numbers.shape == (128, 64), case
                num_read += 1
    assert num_read > 100


# Configs shaped like published ones -> the format of products, and the GiB of all weights.
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
QWEN_30B = {
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "vocab_size": 201088,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "torch_dtype": "bfloat16",
}
MXFP4_KEPT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": MXFP4_KEPT}
W4A16_128 = compressed(
    "pack-quantized", num_bits=4, type="int", strategy="group", group_size=128
)
SHAPES: dict[str, tuple[Any, Any, str, float]] = {
    "gpt-oss-20b": (GPT_OSS, MXFP4, "MXFP4", 12.8),
    "gpt-oss-120b": (
        GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128},
        MXFP4,
        "MXFP4",
        60.8,
    ),
    "DeepSeek-V3": (DEEPSEEK, FP8, "float8-128", 645.0),
    "Qwen3-30B FP8": (
        QWEN_30B,
        FP8
        | {
            "modules_to_not_convert": [
                "lm_head",
                *(f"model.layers.{n}.mlp.gate" for n in range(48)),
            ]
        },
        "float8-128",
        29.6,
    ),
    "AWQ": (LLAMA_8B, AWQ_4 | {"group_size": 128}, "whole4-128", 5.6),
    "GPTQ": (
        LLAMA_8B,
        GPTQ_4 | {"group_size": 128, "desc_act": True},
        "whole4-128 in act-order",
        5.6,
    ),
    "W4A16": (LLAMA_8B, W4A16_128, "whole4-128", 5.6),
    "NVFP4": (LLAMA_8B, CASES["nvfp4"][0], "bfloat16", 15.0),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_forecast_knows_formats_by_the_config_alone(
    name: str, tmp_path: Path
) -> None:
    """`check --no-weights` has no headers to ask."""
    fields, quantization, held, size = SHAPES[name]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields | {"quantization_config": quantization}))
    checkpoint = open_checkpoint(str(tmp_path), has_weights=False)
    formats = list_stored_formats(checkpoint)
    layer = checkpoint.model.num_cached_layers - 1
    of_experts = "experts." if "experts" in str(formats.keys()) else ""
    (down,) = {each for each, _ in formats[f"{layer}.{of_experts}down.weight"]}
    assert down.name == held or held == "bfloat16"
    config = EngineConfig(model=str(tmp_path), dtype="bfloat16", device="cpu")
    plan = plan_ahead(config, checkpoint)
    if down.is_held or held == "bfloat16":
        assert plan.held_in == held
        assert plan.this_rank.takes.weights / GIB == pytest.approx(size, rel=0.03)


def test_an_index_says_what_is_quantized(tmp_path: Path) -> None:
    """The head's name is in an index, with scales or without."""
    folder, _ = publish("llama", tmp_path, *CASES["fp8"])
    names = load_file(folder / "model.safetensors").keys()
    (folder / "model.safetensors").unlink()
    index = {"weight_map": dict.fromkeys(names, "a.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = open_checkpoint(str(folder), has_weights=False)
    check_tensors(checkpoint, has_weights=False)
    formats = {
        name: {each.name for each, _ in parts}
        for name, parts in list_stored_formats(checkpoint).items()
    }
    assert formats["0.qkv.weight"] == {"float8-row"}
    assert formats["2.down.weight"] == {"float8-128"}
    assert formats["head.weight"] == formats["embed.weight"] == {"float32"}
