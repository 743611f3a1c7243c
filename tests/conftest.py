"""Small models of every family, made once, and transformers as the oracle beside them."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fminfer.machine.processor import cap_libraries, has_unit

cap_libraries()  # before torch is there
import torch  # noqa: E402
import transformers  # noqa: E402

# triton reads it when imported: its kernels run on the CPU
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from fminfer.compute.attention.kernel_attention import (  # noqa: E402
    ATTENTION_ERRORS,
    StageAttention,
    compute_attention_pairs,
)
from fminfer.compute.kernels.kernel_build import start_build  # noqa: E402
from fminfer.compute.layers.bodies import PartKernels, Parts  # noqa: E402
from fminfer.compute.sampling.sampler import (  # noqa: E402
    Drawer,
    Ranker,
    TokenSpan,
    draw_tokens,
    rank_logits,
)
from fminfer.compute.trial import compare_pairs  # noqa: E402
from fminfer.compute.values.spec import Alibi, Attention  # noqa: E402
from fminfer.core.partition import Part  # noqa: E402
from fminfer.forward.layer_step import PartBuilder  # noqa: E402
from fminfer.forward.registry import Registry  # noqa: E402
from fminfer.forward.transformer import Transformer  # noqa: E402
from fminfer.models.checkpoint import open_checkpoint  # noqa: E402
from fminfer.models.formats import Holding  # noqa: E402
from fminfer.models.layer_source import open_weights  # noqa: E402
from tests.further_families import BIGGER, FURTHER, GROUPED, VISION  # noqa: E402

IS_ALL = os.environ.get("FMINFER_TEST_ALL") == "1"
# More of what another test of the same run shows already: more families, dtypes or sizes.
more = pytest.mark.skipif(not IS_ALL, reason="more of the same; scripts/test --all")
LONG_FILES = (
    "test_triton",
    "test_ray",
    "test_start",
    "test_resume",
    "test_transformer",
    "test_stages",
    "test_oracle",
    "test_pipeline",
    "test_sanitizers",
    "test_lm_eval",
    "test_submit",
)
# Families whose attention differs: heads, windows, caps, biases, positions, experts.
FEW = (
    "llama",
    "qwen2-window",
    "gemma2",
    "mixtral",
    "bloom",
    "falcon-new",
    "falcon-alibi",
    "gptj",
    "gpt_neo",
    "gpt2-inverse",
    "mpt",
    "opt",
    "phi3-long",
)
# And those that are stored in other ways: experts and heads in turns, transposed, latent, rows.
STORED = (
    *FEW,
    "gpt_oss",
    "deepseek_v3",
    "qwen3_moe",
    "codegen",
    "gpt_bigcode",
    "gpt_neox",
    "ernie4_5_moe",
)
# And others, so that there is each setting of a spec and each layout: test_transformer holds it.
SOME = (
    *STORED,
    "deepseek_v2-groups",
    "nanochat",
    "granite",
    "opt-350m",
    "phimoe",
    "apertus",
    "qwen2_moe",
    "bloom-normed",
    "cohere-qk",
    "flex_olmo",
    "hunyuan_v1_moe",
    "xglm",
)


def num_examples(most: int) -> int:
    """Return how many random examples a test tries."""
    return most if IS_ALL else most // 3


def some_families(names: Iterable[str] = FEW) -> list[Any]:
    """Return every family as a test's parameter; those without a name here are more of
    the same."""
    return [
        pytest.param(each, marks=[] if each in names else [more])
        for each in sorted(FIELDS)
    ]


def in_turns(values: Iterable[Any], names: Iterable[str] = FEW) -> list[Any]:
    """Return each family with each value; unless `names` come to it in turn, it is more
    of it."""
    values = [*values]
    chosen = {(name, values[place % len(values)]) for place, name in enumerate(names)}
    return [
        pytest.param(name, value, marks=[] if (name, value) in chosen else [more])
        for name in sorted(FIELDS)
        for value in values
    ]


VOCAB = 300
SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2, "sliding_window": None}
# A name is a model_type, or one with a variant behind a dash.
FIELDS: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "llama-dynamic": GROUPED
    | {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "mistral": GROUPED | {"sliding_window": 24, "head_dim": 16},
    "qwen2": GROUPED,
    "qwen2-window": GROUPED
    | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "qwen3": GROUPED | {"head_dim": 32},
    "gemma": BIGGER | {"num_key_value_heads": 1, "head_dim": 32},
    # Windows shorter than the prompts, and caps low enough to bend.
    "gemma2": GROUPED
    | {
        "head_dim": 32,
        "query_pre_attn_scalar": 20,
        "sliding_window": 13,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 2.0,
    },
    "gemma3_text": GROUPED
    | {
        "head_dim": 32,
        "query_pre_attn_scalar": 20,
        "sliding_window": 11,
        "sliding_window_pattern": 2,
        "final_logit_softcapping": 3.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "phi": BIGGER,
    "phi3": GROUPED | {"sliding_window": 24},
    "phi3-long": GROUPED
    | {
        "max_position_embeddings": 512,
        "original_max_position_embeddings": 256,
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1.0 + 0.1 * i for i in range(8)],
            "long_factor": [2.0 + i for i in range(8)],
        },
    },
    "stablelm": GROUPED,
    "stablelm-parallel": GROUPED
    | {"use_parallel_residual": True, "qk_layernorm": True},
    "starcoder2": GROUPED | {"sliding_window": 17},
    "olmo2": GROUPED,
    "glm4": GROUPED | {"head_dim": 16},
    "mixtral": GROUPED | EXPERTS | {"num_local_experts": 4},
    "qwen3_moe": GROUPED
    | EXPERTS
    | {
        "num_experts": 8,
        "moe_intermediate_size": 48,
        "head_dim": 32,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 32},
    "gpt2": {},
    "gpt2-inverse": {
        "scale_attn_by_inverse_layer_idx": True,
        "reorder_and_upcast_attn": True,
    },
    "gpt_bigcode": {},
    "gpt_bigcode-heads": {"multi_query": False, "attention_softmax_in_fp32": False},
    "gpt_neo": {
        "attention_types": [[["global", "local", "local"], 1]],
        "window_size": 10,
    },
    "gpt_neox": BIGGER,
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8},
    "falcon": {"multi_query": True, "bias": True},
    "falcon-new": {"new_decoder_architecture": True, "num_kv_heads": 2},
    # 16 heads have slopes that are no powers of two, so that Falcon's rounding shows.
    "falcon-alibi": {
        "alibi": True,
        "multi_query": False,
        "parallel_attn": False,
        "bias": True,
    }
    | {"num_attention_heads": 16},
    "falcon-alibi-shared": {
        "alibi": True,
        "multi_query": True,
        "num_attention_heads": 16,
    },
    "mpt": {"max_seq_len": 256, "attn_config": {"clip_qkv": 0.9, "softmax_scale": 0.4}},
    "bloom": {"seq_length": 256},
    "opt-350m": {
        "ffn_dim": 128,
        "word_embed_proj_dim": 32,
        "do_layer_norm_before": False,
    },
    "opt-bare": {"ffn_dim": 128, "word_embed_proj_dim": 64, "enable_bias": False}
    | {"layer_norm_elementwise_affine": False},
    "gpt_neox-serial": BIGGER
    | {"use_parallel_residual": False, "attention_bias": False},
    "phi-qk": BIGGER | {"qk_layernorm": True},
    "bloom-normed": {
        "seq_length": 256,
        "apply_residual_connection_post_layernorm": True,
    },
    "falcon-one-norm": {"new_decoder_architecture": True, "num_kv_heads": 2}
    | {"num_ln_in_parallel_attn": 1},
    "gpt2-unscaled": {
        "scale_attn_weights": False,
        "activation_function": "relu",
        "n_inner": 96,
    },
    "gpt2-untied": {"tie_word_embeddings": False},
    "llama-biases": GROUPED
    | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    | {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "llama-yarn": GROUPED
    | {
        "head_dim": 32,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "gptj-whole": {"rotary_dim": 16, "activation_function": "gelu"},
    "mpt-12-heads": {"max_seq_len": 256, "num_attention_heads": 12, "hidden_size": 96},
    "phi3-partial": GROUPED | {"partial_rotary_factor": 0.5},
    "stablelm-serial": GROUPED | {"qk_layernorm": True, "use_qkv_bias": True},
}
FIELDS |= FURTHER


def family_config(name: str, num_layers: int = 3) -> Any:
    """Return the config of FIELDS[name], of transformers' class."""
    fields: dict[str, Any] = SHAPE | {"num_hidden_layers": num_layers} | FIELDS[name]
    if "attention_types" in fields:  # of gpt_neo: a pattern, and how often it comes
        fields["attention_types"] = [[fields["attention_types"][0][0], num_layers // 3]]
    for key, value in fields.items():
        if isinstance(value, list) and len(value) == 3:  # one for each layer
            fields[key] = value * (num_layers // 3)
    if "text_config" in fields:
        text = SHAPE | {"num_hidden_layers": num_layers} | fields["text_config"]
        fields = FIELDS[name] | {
            "text_config": text,
            "vision_config": VISION | fields["vision_config"],
        }
    return transformers.AutoConfig.for_model(name.partition("-")[0], **fields)


def model_class(config: Any) -> Any:
    """Return transformers' class of models that have the config."""
    if type(config) in transformers.AutoModelForCausalLM._model_mapping:
        return transformers.AutoModelForCausalLM
    return transformers.AutoModelForImageTextToText


def make_model(name: str, num_layers: int = 3) -> Any:
    """Build the small random model of FIELDS[name], every parameter far from 0 and 1, float32.

    Args:
        num_layers: a multiple of 3.
    """
    return make_model_of(family_config(name, num_layers))


def make_model_of(config: Any) -> Any:
    """Build a small random model, every parameter far from 0 and 1, float32."""
    torch.manual_seed(7)
    model = model_class(config).from_config(config).eval()
    if (
        getattr(config, "attn_logit_softcapping", None)
        or config.model_type == "gpt_oss"
    ):
        # transformers 5.17 takes sdpa, which leaves the cap out.
        model.config._attn_implementation = "eager"
    with torch.no_grad():
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.2)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.08)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def plain_registry(
    dtype: torch.dtype = torch.float32, kernels: PartKernels | None = None
) -> Registry:
    """Return a registry without a candidate: all is plain torch, but what parts are given."""
    registry = Registry("off", None, dtype, torch.device("cpu"))
    registry.of_products.clear()
    registry.parts = Parts(kernels)
    return registry


def load_network(folder: Path, part: Part | None = None) -> Transformer:
    """Load a checkpoint, or a stage's part of it, in float32 and plain torch."""
    checkpoint = open_checkpoint(str(folder))
    num_layers = len(checkpoint.model.layers)
    part = part or Part(0, 1, 0, num_layers)
    tensors = open_weights(
        checkpoint,
        part,
        holding=Holding(torch.float32),
        device=torch.device("cpu"),
        seed=1,
    )
    bodies = PartBuilder(plain_registry(), checkpoint.context_length)
    return Transformer(checkpoint.model, tensors, builder=bodies)


def triton_device() -> torch.device:
    """Return where Triton's kernels are tested: on a GPU if there is one, else interpreted."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def try_triton(dtype: torch.dtype) -> None:
    """Compare the GPU's attention with plain torch.

    Raises:
        ValueError: it gives something else.
    """
    from fminfer.compute.attention.triton_attention import TritonAttention

    where: Any = {"dtype": dtype, "device": triton_device()}
    how = Attention(heads=2, kv_heads=1, head_dim=16, scaling=0.25)
    kernel = TritonAttention(how.heads, *how.cache_shape[1:], **where)
    num_keys = 327 if torch.cuda.is_available() else 150  # more than two tiles of 64
    for kv_dtype in {dtype, torch.float32}:
        kinds = (how, replace(how, window=8, alibi=Alibi((0.1, 0.2))))
        pairs = compute_attention_pairs(
            kernel, StageAttention(kinds, 8, kv_dtype), num_keys, **where
        )
        compare_pairs(pairs, ATTENTION_ERRORS[dtype])


@pytest.fixture(scope="session")
def interpreter() -> None:
    """Skip what the interpreter cannot run: that of triton 3.6 counts to no tensor in
    numpy 2.4."""
    try:
        try_triton(torch.float32)
    except Exception as error:
        if "only 0-dimensional arrays can be converted" not in str(error):
            raise
        pytest.skip("the interpreter of triton 3.6 needs numpy < 2.4")


def span(
    logits: torch.Tensor, ranker: Ranker = rank_logits, drawer: Drawer = draw_tokens
) -> TokenSpan:
    """Return the tokens of (rows, vocab) logits, with what ranks them and draws."""
    return TokenSpan(logits.shape[-1], ranker=ranker, drawer=drawer)


@pytest.fixture
def without_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute as --same-answers on does where the processor has tiles (AMX)."""
    if has_unit("amx_bf16"):
        monkeypatch.setenv("FMINFER_CPU", "avx512_bf16")


def built_library() -> ctypes.CDLL:
    """Return the CPU's kernels."""
    build = start_build()
    library = build.wait_for_library()
    assert library is not None, build.error
    return library


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long files first: two processes, a file at a time, then end at about the same time."""
    ranks = {name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))


@pytest.fixture(autouse=True)
def restored_signals() -> Iterator[None]:
    """The command leaves signals ignored when it ends, and tests call it in this process."""
    numbers = (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGXCPU,
    )
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def run_files(
    engine: Any, inputs: list[Path], outputs: list[Path], **terms: Any
) -> Any:
    """Answer files with an engine, as the command does.

    Args:
        terms: as `RunTerms` has them.
    """
    from fminfer.answers.carrying_over import RunTerms
    from fminfer.job.file_job import run_job
    from fminfer.job.run_inputs import open_files
    from fminfer.job.run_summary import JobSummary

    files = open_files(inputs, outputs, RunTerms(engine.model_name, {}, **terms))
    summary = JobSummary(engine.model_name, "float32", inputs, outputs)
    return run_job(engine, files, summary, is_quiet=True)


def save_byte_tokenizer(folder: Path) -> None:
    """Save a tokenizer of the 256 bytes as a checkpoint's own."""
    from fminfer.text.tokenizer import _build_byte_tokenizer

    transformers.PreTrainedTokenizerFast(
        tokenizer_object=_build_byte_tokenizer()
    ).save_pretrained(folder)


@pytest.fixture(scope="session", params=sorted(FIELDS))
def family_checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    """Give (folder, transformers model) of one family."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(request.param)
    model.save_pretrained(folder)
    save_byte_tokenizer(folder)
    return folder, model


@pytest.fixture(scope="session")
def llama_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Give (folder, transformers model) of the llama family, for what no family changes."""
    folder = tmp_path_factory.mktemp("llama-one")
    model = make_model("llama")
    model.save_pretrained(folder)
    save_byte_tokenizer(folder)
    return folder, model
