"""Models in GGUF, as llama.cpp's converter writes them, beside transformers in float32."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

import fminfer
from fminfer.core.config import EngineConfig, ModelOptions
from fminfer.core.errors import CheckpointError
from fminfer.core.partition import split_layers
from fminfer.models.checkpoint import longest_context_of, open_checkpoint
from fminfer.models.config_fields import architecture_of
from fminfer.models.fingerprint import compute_fingerprint
from fminfer.models.gguf.gguf_model import HARMLESS
from fminfer.models.holding import Holding
from fminfer.models.known_sizes import DEMO_MODEL
from fminfer.models.layer_source import open_weights
from fminfer.models.origins import check_tensors, find_stored_model
from tests.conftest import more
from tests.forward.test_transformer import logits_of
from tests.gguf_building import (
    ARRAY,
    BOOL,
    F32,
    SAMPLES,
    STRING,
    U32,
    Keys,
    Tensors,
    copy,
    f32,
    floats,
)

NAMES = sorted(path.stem for path in SAMPLES.glob("*.gguf"))
MAX_ERROR = 1e-4
Change = Callable[[Keys, Tensors], None]


def told(name: str) -> Any:
    """Return what transformers says of a sample."""
    return json.loads((SAMPLES / f"{name}.json").read_text())


def check_logprobs(path: Path, name: str, num_stages: int) -> None:
    prompts = told(name)["prompts"]
    num_layers = len(open_checkpoint(str(path)).model.layers)
    parts = split_layers(num_layers, min(num_stages, num_layers), head_cost=0.0)
    found = logits_of(path, parts, [prompt["ids"] for prompt in prompts])
    for prompt, logits in zip(prompts, found, strict=True):
        logprobs = logits.log_softmax(-1)
        best, ids = logprobs.max(-1)
        assert ids.tolist() == prompt["argmax"]
        assert error(best, prompt["argmax_logprobs"]) < MAX_ERROR
        later = torch.tensor(prompt["ids"][1:])[:, None]
        assert (
            error(logprobs[:-1].gather(1, later)[:, 0], prompt["next_logprobs"])
            < MAX_ERROR
        )


def error(found: torch.Tensor, expected: list[float]) -> float:
    return float((found - torch.tensor(expected)).abs().max())


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_logprobs_are_those_of_transformers(name: str, num_stages: int) -> None:
    """GGUF was refused. Each sample is another architecture, or other forms of blocks."""
    check_logprobs(SAMPLES / f"{name}.gguf", name, num_stages)


# Each architecture in one of the forms that its rows of 32 can have; all of them with --all.
PLAIN = [
    n for n in NAMES if n.partition("-")[0] not in ("kforms", "legacy", "fallback")
]
PLAIN.remove("gpt_oss-mxfp4_moe")
FORMS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param(name, form, marks=[] if i % len(FORMS) == j else more)
        for i, name in enumerate(PLAIN)
        for j, form in enumerate(FORMS)
    ],
)
def test_forms_give_the_logits_of_their_dequantized_numbers(
    name: str, form: str, tmp_path: Path
) -> None:
    """Quantized rows are permuted, joined, stacked and cut as floats are."""
    rows = [prompt["ids"] for prompt in told(name)["prompts"]]
    check_form(name, form, rows, tmp_path)


def check_form(name: str, form: str, rows: list[list[int]], folder: Path) -> None:
    """Compare a file whose matrices are quantized with one of the same numbers as floats."""
    kind = gguf.GGMLQuantizationType[form]
    quants = gguf.quants

    def rounded(tensors: Tensors, *, stays: bool) -> None:
        for each, (_, shape, _) in [*tensors.items()]:
            is_matrix = (
                len(shape) > 1 and shape[-1] % 32 == 0 and each.endswith(".weight")
            )
            if is_matrix and "norm" not in each and "ffn_gate_inp" not in each:
                packed = quants.quantize(floats(tensors[each]).astype(np.float32), kind)
                wide = quants.dequantize(packed, kind)
                own = (int(kind), shape, packed.tobytes())
                tensors[each] = own if stays else (0, shape, wide.tobytes())

    files = [folder / f"{each}.gguf" for each in ("packed", "wide")]
    for file in files:
        stays = file.stem == "packed"
        copy(name, file, lambda _, tensors, stays=stays: rounded(tensors, stays=stays))
    num_layers = len(open_checkpoint(str(files[0])).model.layers)
    parts = split_layers(num_layers, 1, head_cost=0.0)
    mine, theirs = (torch.cat(logits_of(file, parts, rows)) for file in files)
    assert float((mine - theirs).abs().max()) < MAX_ERROR
    stored = find_stored_model(open_checkpoint(str(files[0]))).list_formats().values()
    assert form in {each.name for parts in stored for each, _ in parts}


def test_one_is_taken_from_norms_before_they_are_rounded() -> None:
    """Gemma's are stored plus 1, in float32. In bfloat16 first, they would lose 3 bits."""
    checkpoint = open_checkpoint(str(SAMPLES / "gemma.gguf"))
    (part,) = split_layers(len(checkpoint.model.layers), 1, head_cost=0.0)

    def load_norm(dtype: torch.dtype) -> torch.Tensor:
        holding = Holding(dtype)
        cpu = torch.device("cpu")
        source = open_weights(checkpoint, part, holding=holding, device=cpu, seed=0)
        return source.load_exit(source.load_entry())["final_norm.weight"].plain

    rounded = load_norm(torch.float32).bfloat16()
    assert torch.equal(load_norm(torch.bfloat16), rounded)


def test_forms_of_blocks_that_do_not_run_are_named(tmp_path: Path) -> None:
    name = "blk.0.ffn_down.weight"
    kind = gguf.GGMLQuantizationType.IQ3_S
    inputs, num_bytes = gguf.GGML_QUANT_SIZES[kind]

    def change(_: Keys, tensors: Tensors) -> None:
        _, shape, _ = tensors[name]
        blocks = shape[0] * shape[1] // inputs
        tensors[name] = (int(kind), shape, bytes(blocks * num_bytes))

    path = tmp_path / "iq3_s.gguf"
    copy("fallback-iq4_xs", path, change)
    with pytest.raises(CheckpointError, match="as IQ3_S: these types run"):
        check_tensors(open_checkpoint(str(path)))


def differences(mine: Any, theirs: Any, path: str = "model") -> Iterator[str]:
    if dataclasses.is_dataclass(mine) and type(mine) is type(theirs):
        for field in dataclasses.fields(mine):
            both = (getattr(each, field.name) for each in (mine, theirs))
            yield from differences(next(both), next(both), f"{path}.{field.name}")
    elif (
        isinstance(mine, tuple)
        and isinstance(theirs, tuple)
        and len(mine) == len(theirs)
    ):
        for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            yield from differences(one, other, f"{path}[{number}]")
    elif mine != (
        pytest.approx(theirs, rel=1e-6) if isinstance(theirs, float) else theirs
    ):
        yield f"{path}: {mine} and {theirs}"


@pytest.mark.parametrize("name", NAMES)
def test_the_spec_is_that_of_the_config_before_conversion(name: str) -> None:
    """Logprobs of one sample do not tell each number: a window may be wider than its prompts."""
    fields = told(name)["config"]
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    checkpoint = open_checkpoint(str(SAMPLES / f"{name}.gguf"))
    assert not [*differences(checkpoint.model, architecture_of(config).model)]
    assert checkpoint.config.tie_word_embeddings == config.tie_word_embeddings
    assert {config.eos_token_id} <= checkpoint.eos_ids | {None}
    if name not in ("bloom", "falcon", "falcon-new"):  # of which configs tell none
        assert checkpoint.context_length == longest_context_of(config)


def with_kv_b(keys: Keys, tensors: Tensors) -> None:
    """Lay out latents as converters did before 2025: kv_b is whole, heads have their
    own sizes."""
    heads = keys["deepseek2.attention.head_count"]
    for name in [name for name in tensors if "attn_k_b" in name]:
        keys_of = floats(tensors.pop(name)).swapaxes(1, 2)
        values_of = floats(tensors.pop(name.replace("k_b", "v_b")))
        joined = np.concatenate([keys_of, values_of], 1)
        tensors[name.replace("k_b", "kv_b")] = f32(joined.reshape(-1, joined.shape[-1]))
    keys["deepseek2.attention.head_count_kv"] = heads
    for part in ("key", "value"):
        length = keys.pop(f"deepseek2.attention.{part}_length_mla")
        keys[f"deepseek2.attention.{part}_length"] = length


def with_joined_parts(keys: Keys, tensors: Tensors) -> None:
    """Join queries, keys and values, as the converter does with --fuse-qkv, and experts' ups."""
    for layer in range(2):
        for parts, whole, dim in (
            (("attn_q", "attn_k", "attn_v"), "attn_qkv", 0),
            (("ffn_gate_exps", "ffn_up_exps"), "ffn_gate_up_exps", 1),
        ):
            names = [f"blk.{layer}.{part}.weight" for part in parts]
            joined = np.concatenate([floats(tensors.pop(name)) for name in names], dim)
            tensors[f"blk.{layer}.{whole}.weight"] = f32(joined)


def with_single_experts(keys: Keys, tensors: Tensors) -> None:
    """Store each expert by itself, as the first files of Mixtral did."""
    for name in [name for name in tensors if "_exps" in name]:
        for number, one in enumerate(floats(tensors.pop(name))):
            tensors[name.replace("_exps", f".{number}")] = f32(one)


def with_a_vector(keys: Keys, tensors: Tensors) -> None:
    """Store the gate of a shared expert as a vector, and leave sizes out that tensors tell."""
    for layer in range(2):
        name = f"blk.{layer}.ffn_gate_inp_shexp.weight"
        tensors[name] = f32(floats(tensors[name]).reshape(-1))
    del keys["qwen2moe.expert_feed_forward_length"]
    del keys["qwen2moe.expert_shared_feed_forward_length"]


def with_own_head(keys: Keys, tensors: Tensors) -> None:
    """Store a tied head twice, and rows of positions that nobody reads."""
    tensors["output.weight"] = tensors["token_embd.weight"]
    tensors["blk.0.attn_rot_embd.weight"] = f32(np.ones(4))


def with_keys_of_states(keys: Keys, tensors: Tensors) -> None:
    """Tell of no experts, and of states that no layer has, as files of Granite 4 do."""
    keys["granite.attention.head_count_kv"] = (ARRAY, (U32, [2, 2]))
    for key in ("expert_count", "expert_used_count"):
        keys[f"granite.{key}"] = (U32, 0)
    for key in ("conv_kernel", "state_size", "group_count", "inner_size"):
        keys[f"granite.ssm.{key}"] = (U32, 4)
    keys["granite.rope.scaling.finetuned"] = (BOOL, True)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("granite", with_keys_of_states),
        ("deepseek_v2", with_kv_b),
        ("deepseek_v3", with_kv_b),
        ("mixtral", with_joined_parts),
        ("mixtral", with_single_experts),
        ("qwen2_moe", with_a_vector),
        ("llama3", with_own_head),
    ],
)
def test_files_of_other_converters_give_the_same(
    name: str, change: Change, tmp_path: Path
) -> None:
    check_logprobs(copy(name, tmp_path / "m.gguf", change), name, 2)


def test_biases_of_queries_and_keys_are_put_back_too(tmp_path: Path) -> None:
    """The converter lays out LLaMA's biases as it does the rows of matrices."""

    def with_biases(keys: Keys, tensors: Tensors) -> None:
        for layer in range(2):
            for part, heads in (("q", 4), ("k", 2), ("v", 0)):
                size = tensors[f"blk.{layer}.attn_{part}.weight"][1][0]
                bias = np.arange(size) + 100.0 * heads
                if heads:
                    bias = bias.reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)
                tensors[f"blk.{layer}.attn_{part}.bias"] = f32(bias)
            tensors[f"blk.{layer}.attn_output.bias"] = f32(np.zeros(32))

    path = copy("llama", tmp_path / "m.gguf", with_biases)
    checkpoint = open_checkpoint(str(path), ModelOptions(tokenizer=str(DEMO_MODEL)))
    (part,) = split_layers(2, 1, head_cost=0.0)
    holding = Holding(torch.float32)
    device = torch.device("cpu")
    source = open_weights(checkpoint, part, holding=holding, device=device, seed=0)
    found = source.load_layer(1)["qkv.bias"].plain
    how = checkpoint.model.layers[1].attention
    starts = zip(how.qkv_sizes, (400, 200, 0), strict=True)
    expected = torch.cat([torch.arange(size) + start for size, start in starts])
    assert found.tolist() == expected.tolist()


def refusal(name: str, path: Path, change: Change) -> str:
    copy(name, path, change)
    with pytest.raises(CheckpointError) as caught:
        check_tensors(
            open_checkpoint(str(path), ModelOptions(tokenizer=str(DEMO_MODEL)))
        )
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        (
            "llama.attention.temperature_scale",
            (F32, 0.5),
            "which fminfer does not read for this",
        ),
        (
            "llama.attention.causal",
            (BOOL, False),
            "causal to False, and fminfer computes such a",
        ),
        ("llama.pooling_type", (U32, 3), "pooling_type to 3"),
        (
            "llama.rope.scaling.type",
            (STRING, "longest"),
            "only with none, linear, yarn or longr",
        ),
        ("llama.rope.dimension_count", (U32, 4), "dimension_count to 4"),
        ("llama.attention.value_length", (U32, 4), "value_length to 4"),
        (
            "llama.attention.head_count_kv",
            (9, (U32, [2, 1])),
            "only with one number for all",
        ),
        ("llama.block_count", (U32, 3), "block_count is 3, and 2 are stored"),
        (
            "llama.embedding_length",
            (U32, 64),
            "embedding_length is 64, output_norm.weight has",
        ),
        (
            "llama.context_length",
            (STRING, "long"),
            "context_length is 'long', and no whole numb",
        ),
        (
            "llama.rope.freq_base",
            (F32, float("nan")),
            "freq_base is nan, and no number",
        ),
        (
            "general.architecture",
            (STRING, "mamba"),
            "the architecture 'mamba', which does not r",
        ),
        (
            "general.type",
            (STRING, "adapter"),
            "is no language model (general.type 'adapter', architecture 'llama')",
        ),
    ],
)
def test_a_key_that_would_change_answers_refuses_the_file(
    key: str, value: Any, says: str, tmp_path: Path
) -> None:
    found = refusal(
        "llama", tmp_path / "m.gguf", lambda keys, _: keys.update({key: value})
    )
    assert says in found and str(tmp_path / "m.gguf") in found


def test_keys_that_change_nothing_are_left_out(tmp_path: Path) -> None:
    more: Keys = {f"llama.{key}": (U32, 1) for key in HARMLESS}
    more |= {
        "somebody.notes": (STRING, "x"),
        "general.url": (STRING, "x"),
        "llama.pooling_type": (U32, 0),
    }
    check_logprobs(
        copy("llama", tmp_path / "m.gguf", lambda k, _: k.update(more)), "llama", 1
    )


def test_missing_keys_and_tensors_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    says = refusal("llama", path, lambda keys, _: keys.pop("llama.context_length"))
    assert "lacks the key llama.context_length" in says
    says = refusal("llama", path, lambda _, tensors: tensors.pop("blk.1.attn_k.weight"))
    assert "lacks 1 of the model's tensors, such as 'blk.1.attn_k.weight'" in says
    more = {"blk.1.attn_gate.weight": f32(np.ones((4, 4)))}
    says = refusal("llama", path, lambda _, tensors: tensors.update(more))
    assert "holds a tensor 'blk.1.attn_gate.weight' that a model" in says
    says = refusal(
        "llama3", path, lambda _, t: t.update({"rope_freqs.weight": f32([1.0])})
    )
    assert "rope_freqs.weight has 1 factors, and 4 above 0" in says


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fminfer"


def test_small_files_are_written_once_for_each_file(
    cache: Path, tmp_path: Path
) -> None:
    """Tokenizer, chat template and ends are files to all other code, and a GGUF has none."""
    first = open_checkpoint(str(SAMPLES / "llama.gguf"))
    assert first.tokenizer_folder == first.generation_folder
    assert [file.parent for file in cache.glob("*/tokenizer.json")] == [
        first.tokenizer_folder
    ]
    (tokenizer := cache / str(first.tokenizer_folder) / "tokenizer.json").chmod(0o400)
    written_at = tokenizer.stat().st_mtime_ns
    with ThreadPoolExecutor(4) as pool:
        both = ["llama", "gemma"] * 8
        found = [*pool.map(lambda n: open_checkpoint(str(SAMPLES / f"{n}.gguf")), both)]
    assert len({each.tokenizer_folder for each in found}) == 2
    assert tokenizer.stat().st_mtime_ns == written_at
    assert len([*cache.iterdir()]) == 2, "parts of other processes were left there"
    other = {"tokenizer.ggml.eos_token_id": (U32, 7)}
    path = copy("llama", tmp_path / "m.gguf", lambda keys, _: keys.update(other))
    assert open_checkpoint(str(path)).eos_ids == {7} != first.eos_ids


def test_small_files_without_a_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    folder = open_checkpoint(str(SAMPLES / "llama.gguf")).tokenizer_folder
    assert folder is not None and (folder / "tokenizer.json").exists()


def test_names_digests_and_fingerprints(cache: Path, tmp_path: Path) -> None:
    path = copy("llama", tmp_path / "m.gguf")
    config = EngineConfig(str(path))
    floats = (torch.float32, torch.float32)

    def found() -> dict[str, str]:
        return compute_fingerprint(config, open_checkpoint(str(path)), *floats)

    first = found()
    assert first["--model-name"] == str(path) and found() == first
    content = bytearray(path.read_bytes())
    content[-100] ^= 1  # of the last tensor
    path.write_bytes(content)
    assert {name for name, value in found().items() if value != first[name]} == {
        "the model"
    }


def test_config_and_tokenizer_may_be_others(cache: Path, tmp_path: Path) -> None:
    """With a tokenizer of their own the file's is not written, which may be of a kind
    unknown."""
    other = {"tokenizer.ggml.model": (STRING, "of tomorrow")}
    path = copy("llama", tmp_path / "m.gguf", lambda keys, _: keys.update(other))
    with pytest.raises(CheckpointError, match="of tomorrow"):
        open_checkpoint(str(path))
    checkpoint = open_checkpoint(str(path), ModelOptions(tokenizer=str(DEMO_MODEL)))
    assert checkpoint.tokenizer_folder == DEMO_MODEL and not [
        *cache.glob("*/tokenizer*")
    ]
    assert checkpoint.eos_ids == {2}
    fields = told("llama")["config"] | {"rms_norm_eps": 0.5}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = str(tmp_path / "config.json")
    options = ModelOptions(str(path), tokenizer=str(DEMO_MODEL), model_config=config)
    checkpoint = open_checkpoint(str(path), options)
    assert (
        checkpoint.model.final_norm is not None
        and checkpoint.model.final_norm.eps == 0.5
    )
    check_tensors(checkpoint)
    for wrong in ({"revision": "main"}, {"model_config": str(path)}):
        with pytest.raises(
            CheckpointError, match=r"--revision is|is a GGUF file, no config\.json"
        ):
            open_checkpoint(str(path), ModelOptions(str(path), **wrong))


@pytest.mark.parametrize(
    "broken",
    [
        {"model": (STRING, "of tomorrow")},
        {"pre": (STRING, "of tomorrow"), "model": (STRING, "gpt2")},
        {"scores": (ARRAY, (F32, [0.5]))},
    ],
)
def test_ends_are_the_files_whatever_tokenizer_is_given(
    broken: Keys, cache: Path, tmp_path: Path
) -> None:
    """With --tokenizer the ends that only a chat template tells were lost: answers went on."""

    def change(keys: Keys, tensors: Tensors) -> None:
        keys |= {f"tokenizer.ggml.{key}": value for key, value in broken.items()}
        keys["tokenizer.ggml.tokens"][1][1][9] = "<|im_end|>"
        keys["tokenizer.chat_template"] = (STRING, "{{ x }}<|im_end|>")
        keys["general.sampling.temp"] = (F32, 0.5)

    path = copy("llama", tmp_path / "m.gguf", change)
    for _ in range(2):  # the second time from the cache
        checkpoint = open_checkpoint(str(path), ModelOptions(tokenizer=str(DEMO_MODEL)))
        assert checkpoint.tokenizer_folder == DEMO_MODEL and checkpoint.eos_ids == {
            2,
            9,
        }
        assert checkpoint.generation_fields["temperature"] == 0.5
    with pytest.raises(CheckpointError, match="--tokenizer"):
        open_checkpoint(str(path))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_answers_with_them(world_size: int) -> None:
    """From the command to answers: the plan, the tokenizer, ranks of one pipeline."""
    prompts = told("llama3")["prompts"]
    rows = [
        {"prompt": prompt["ids"], "max_tokens": 1, "temperature": 0}
        for prompt in prompts
    ]
    options = {
        "dtype": "float32",
        "budget": 256,
        "world_size": world_size,
        "device": "cpu",
    }
    engine = fminfer.Engine(str(SAMPLES / "llama3.gguf"), **options)
    asked = [
        row | {"logprobs": 0, "return_token_ids": True, "ignore_eos": True}
        for row in rows
    ]
    records = sorted(engine.run(asked), key=lambda record: record.line.number)
    engine.close()
    for prompt, record in zip(prompts, records, strict=True):
        (choice,) = record.to_dict()["result"]["choices"]
        assert choice["token_ids"] == prompt["argmax"][-1:]
        (logprob,) = choice["logprobs"]["token_logprobs"]
        assert logprob == pytest.approx(prompt["argmax_logprobs"][-1], abs=MAX_ERROR)
