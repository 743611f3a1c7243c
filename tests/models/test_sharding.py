"""Layers that several ranks share: any mix with stages, any format of weights."""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fminfer
from fminfer.compute.attention.kv_cache import KvCache
from fminfer.compute.formats.dense import Dense
from fminfer.compute.values.spec import (
    Attention,
    Layer,
    Mlp,
    Model,
    Moe,
    Norm,
    Relative,
)
from fminfer.compute.values.step import Rows
from fminfer.compute.values.weights import Format, Weight
from fminfer.core.config import EngineConfig
from fminfer.core.errors import UsageError
from fminfer.core.partition import Part
from fminfer.forward.layer_step import LayerStep, PartBuilder
from fminfer.forward.transformer import Transformer
from fminfer.models.checkpoint import open_checkpoint, open_random_checkpoint
from fminfer.models.config_fields import architecture_of
from fminfer.models.holding import Holding
from fminfer.models.layer_source import LayerSource, WeightDrawer, open_weights
from fminfer.models.origins import Origin, cut_origins, make_drawn_origins
from fminfer.models.quantized_folder import write_quantized_folder
from fminfer.models.sharding import ModelShard, TensorCut, shard_model
from fminfer.models.tensor_specs import model_specs, stage_specs, whole_model_part
from fminfer.plan.planning import plan_ahead
from tests.conftest import (
    FIELDS,
    SOME,
    family_config,
    make_model,
    more,
    num_examples,
    plain_registry,
    save_byte_tokenizer,
    some_families,
)
from tests.forward.test_stages import check_same
from tests.gguf_building import SAMPLES
from tests.models import test_oracle
from tests.models.test_oracle import SMALL, Oracle, check_all, mixed_requests
from tests.shard_threads import cut_engine, make_shards, plan_ranks

# Fused, interleaved, latent, with experts, with norms over all heads: two of each direction.
BOTH_WAYS = ("llama", "bloom", "mixtral", "deepseek_v3", "olmo2")
# How 8 and 4 bits are cut, and with which kernels by default: one of them asks for each form.
UNEVEN = dict.fromkeys(("", "int8", "int4-128", "int4-symmetric"), "auto")
UNEVEN |= dict.fromkeys(("int8-row", "int4", "int8-32"), "off")
# GGUF files of each size of blocks and each layout, and those with one block at a cut.
FILES = {
    "fallback",
    "kforms",
    "legacy-q5_1",
    "gpt_oss-mxfp4_moe",
    "bloom",
    "deepseek_v3",
}
FILES |= {"falcon-new", "gpt2", "llama", "phi3", "qwen3_moe"}
WHOLE = (
    "fallback-q4_k_m",
    "fallback-iq4_xs",
    "gpt_oss-mxfp4_moe",
    *(f"kforms-{each}" for each in ("q3_k_m", "q4_k_m", "q5_k_m", "q6_k")),
)
FOUR = (
    "llama",
    "gpt_bigcode",
    "qwen3_moe",
    "gpt_oss",
    "stablelm-parallel",
    "falcon-alibi",
    "olmoe",
)
# Others than llama that are cut below in two stages, or in four, are cut in two only with --all.
# These two have no setting that all others lack.
TWO = {*SOME} - {*BOTH_WAYS[1:], *FOUR[1:], "flex_olmo", "cohere-qk"}


@pytest.fixture(scope="module")
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    folder = tmp_path_factory.mktemp("family")
    model = make_model(request.param)
    model.save_pretrained(folder)
    save_byte_tokenizer(folder)
    return request.param, folder, Oracle(model)


def check_cut(
    folder: Path,
    oracle: Oracle,
    monkeypatch: pytest.MonkeyPatch,
    *sizes: int,
    **options: Any,
) -> None:
    """See that a model which is cut answers as transformers does."""

    class Engines:
        Engine = staticmethod(lambda name, **more: cut_engine(name, *sizes, **more))

    monkeypatch.setattr(test_oracle, "fminfer", Engines)
    check_all(folder, oracle, mixed_requests()[::2], SMALL | options)


@pytest.mark.parametrize("family", some_families(TWO), indirect=True)
def test_two_ranks_equal_transformers(
    family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_cut(*family[1:], monkeypatch, 2)


@pytest.mark.parametrize("family", BOTH_WAYS, indirect=True)
def test_two_stages_of_two_ranks_equal_transformers(
    family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_cut(*family[1:], monkeypatch, 2, 2, kernels="off")


@pytest.mark.parametrize("family", FOUR, indirect=True)
def test_more_ranks_than_kv_heads_equal_transformers(
    family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_cut(*family[1:], monkeypatch, 4)


def answers(engine: fminfer.Engine) -> list[dict[str, Any]]:
    requests = [
        each | {"prompt": [i % engine.vocab_size for i in each["prompt"]]}
        for each in mixed_requests()[::4]
    ]
    records = sorted(engine.run(requests), key=lambda record: record.line.number)
    engine.close()
    assert not [record.error for record in records if record.error]
    return [record.to_dict()["result"] for record in records]


def check_equal(folder: Path | str | None, *sizes: int, **options: Any) -> None:
    """See that a cut model answers as the whole one, draws too, within 1e-5."""
    options = {"dtype": "float32", "block_size": 16, "budget": 1024} | options
    check_same(
        answers(cut_engine(folder, *sizes, **options)),
        answers(fminfer.Engine(folder and str(folder), **options)),
    )


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """9 heads in 3 groups, as SmolLM2 has, of which two ranks have 2 and 1; blocks of 32."""
    folder = tmp_path_factory.mktemp("smollm")
    sizes = {"hidden_size": 288, "intermediate_size": 384, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 300}
    config = transformers.LlamaConfig(
        **sizes, **heads, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None
    )
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.08)
    model.save_pretrained(folder)
    save_byte_tokenizer(folder)
    return folder


@pytest.mark.parametrize(
    ("form", "kernels"),
    [
        pytest.param(form, kernels, marks=[] if kernels == by_default else [more])
        for form, by_default in UNEVEN.items()
        for kernels in ("auto", "off")
    ],
)
def test_uneven_heads_in_8_and_4_bits(smollm: Path, form: str, kernels: str) -> None:
    """A cut of rows, or of blocks of inputs, holds the very numbers that the whole one holds."""
    check_equal(smollm, 2, quantize=form or None, kernels=kernels)
    if form == "int8-row":
        check_equal(smollm, 3, quantize=form, kernels=kernels)


def test_a_cut_of_a_row_has_whole_units(tmp_path: Path) -> None:
    """16 inputs of a row of int8-row ended the process: the kernels divided by 0 units."""
    config = family_config("llama")
    config.intermediate_size = 32
    config.save_pretrained(tmp_path)
    engine = EngineConfig(random_init=str(tmp_path), quantize="int8-row")
    with pytest.raises(UsageError, match="32 in blocks of 32 cannot be divided"):
        plan_ranks(engine, open_random_checkpoint(str(tmp_path)), 2)


@pytest.mark.parametrize(
    "quantized", [pytest.param("int8", marks=more), "int8-row", "int4"]
)
def test_quantized_folders_are_cut(
    smollm: Path, quantized: str, tmp_path: Path
) -> None:
    """`fminfer quantize` has written the blocks, of which each rank reads its own."""
    folder = tmp_path / "quantized"
    made = open_checkpoint(str(smollm))
    folder.mkdir()
    write_quantized_folder(
        made, folder, quantized, seed=1, on_progress=lambda done, total: None
    )
    check_equal(folder, 2)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path,
            marks=[] if {path.stem, path.stem.partition("-")[0]} & FILES else [more],
        )
        for path in sorted(SAMPLES.glob("*.gguf"))
    ],
    ids=lambda path: path.stem,
)
def test_gguf_files_are_cut(path: Path) -> None:
    """In blocks of 32 or 256, in parts of several formats, with rows in another order."""
    try:
        plan_ranks(EngineConfig(model=str(path)), open_checkpoint(str(path)), 2)
    except UsageError as error:
        assert path.stem in WHOLE, error
        assert "cannot be divided among" in str(error)
    else:
        assert path.stem not in WHOLE
        check_equal(str(path), 2)


def test_random_weights_do_not_depend_on_ranks(smollm: Path) -> None:
    check_equal(None, 3, random_init=str(smollm))


def random_model(draw: st.DrawFn) -> Model:
    """Return a small spec of any shape."""
    number = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    groups = number(1, 2, 3, 5, 8)
    per_group = number(1, 2, 3)
    attention = Attention(
        heads=groups * per_group,
        kv_heads=groups,
        head_dim=number(4, 8, 20),
        scaling=0.3,
        has_qkv_bias=draw(st.booleans()),
        has_out_bias=draw(st.booleans()),
        qk_norm=number(None, Norm(1e-5)),
        qk_norm_over=number("head", "heads", "all"),
        has_sinks=draw(st.booleans()),
        relative=number(None, Relative(8, 20, is_causal=True)),
    )
    mlp = Mlp("silu", number(8, 24, 33, 40), draw(st.booleans()), draw(st.booleans()))
    moe = Moe(number(2, 5), 2, mlp, shared=number(None, replace(mlp, size=16)))
    hidden = number(16, 24)
    is_parallel = draw(st.booleans())
    norm = Norm(1e-5)
    layer = Layer(
        attention,
        number(mlp, moe),
        input_norms=(norm, norm),
        output_norms=(None, None)
        if is_parallel
        else number((None, None), (norm, norm)),
        is_parallel=is_parallel,
        residual_scale=number(1.0, 0.5),
    )
    vocab = number(40, 77, 300)
    return Model(
        hidden, vocab, (layer, layer), norm, hidden, has_head_bias=draw(st.booleans())
    )


@pytest.mark.parametrize(("size", "block"), [(3, 8), (3, 4), (4, 8)])
def test_a_group_of_heads_begins_with_a_block(size: int, block: int) -> None:
    """Two groups of 12 numbers in blocks of 8 were cut in the middle of a block."""
    attention = Attention(2 * size, 2, 4, scaling=0.5)
    layer = Layer(
        attention, Mlp("silu", 24), input_norms=(None, None), output_norms=(None, None)
    )
    model = Model(16, 40, (layer,), None, 16)
    if 4 * size % block:
        with pytest.raises(
            UsageError, match=r"of 3 and blocks of 8 cannot be .* nor among"
        ):
            shard_model(model, 0, 3, {"out": block, "down": block})
        return
    shares = [shard_model(model, n, 3, {"out": block, "down": block}) for n in range(3)]
    cuts = [share.cuts["0.out.weight"].columns for share in shares]
    assert all(cut and cut.start % block == 0 for cut in cuts)


@settings(
    max_examples=num_examples(120),
    deadline=None,
    suppress_health_check=[*HealthCheck],
)
@given(st.data())
def test_random_specs_are_cut_or_refused(data: st.DataObject) -> None:
    """Ranks give what one gives."""
    model = random_model(data.draw)
    count = data.draw(st.sampled_from([2, 3, 4, 6]))
    block = data.draw(st.sampled_from([1, 1, 8]))
    try:
        shares = [
            shard_model(model, number, count, {"out": block, "down": block})
            for number in range(count)
        ]
    except UsageError as error:
        assert f"--tensor-parallel-size {count}: " in str(error)
        assert "cannot be divided among" in str(error)
        return
    check_cuts(model, shares, block)
    check_random_forward(model, shares)


def test_every_family_is_cut() -> None:
    for name in FIELDS:
        model = architecture_of(family_config(name)).model
        check_cuts(model, [shard_model(model, number, 2, {}) for number in range(2)])


def check_cuts(model: Model, shares: list[ModelShard], block: int = 1) -> None:
    """See that sizes of cut specs are those of the cuts, which hold each number."""
    specs = model_specs(model)
    for share in shares:
        cuts = share.cuts
        own = model_specs(share.model)
        assert own.keys() == specs.keys()
        for name, spec in specs.items():
            held = cuts[name].cut_spec(spec) if name in cuts else spec
            assert held.shape == own[name].shape, name
    # each number is held, and what is added up is held once
    for name, spec in specs.items():
        cut = [share.cuts.get(name) for share in shares]
        if cut[0] is None:
            assert not any(cut)
        elif cut[0].columns is not None:
            numbers = [n for each in cut for n in each.columns]
            assert numbers == [*range(spec.shape[-1])], name
            is_whole = name.endswith("relative.weight")  # of heads, in no blocks
            assert is_whole or all(each.columns.start % block == 0 for each in cut)
        elif cut[0].rows is not None:
            assert {n for each in cut for part in each.rows for n in part} == {
                *range(
                    spec.shape[-2 if len(spec.shape) > 1 and spec.use != "bias" else -1]
                )
            }, name
        else:
            assert [each.is_zero for each in cut] == [
                place > 0 for place in range(len(cut))
            ]


class Numbers(WeightDrawer):
    """Draws each whole tensor by its name, biases too, and cuts it by the numbers of a cut."""

    def choose_format(self, origin: Origin) -> Format:
        return Dense(torch.float32)

    def make_weight(self, name: str, origin: Origin) -> Weight:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        x = torch.randn(origin.spec.shape, generator=generator) * 0.3
        cut = origin.cut
        if cut.rows is not None:
            dim = -2 if x.dim() > 1 and origin.spec.use != "bias" else -1
            x = torch.cat(
                [x.narrow(dim, part.start, len(part)) for part in cut.rows], dim
            )
        if cut.columns is not None:
            x = x[..., cut.columns.start : cut.columns.stop]
        found = torch.zeros_like(x) if cut.is_zero else x.contiguous()
        return Weight(origin.held_spec, Dense(torch.float32), (found,))


def compute(
    model: Model, share: ModelShard | None = None, shards: Any = None
) -> torch.Tensor:
    """Return the logits of some tokens, of those that a rank has."""
    checkpoint: Any = SimpleNamespace(
        model=model, config=SimpleNamespace(tie_word_embeddings=False)
    )
    origins = cut_origins(make_drawn_origins(checkpoint), share)
    numbers = Numbers(0, 0.0, 1.0, torch.device("cpu"), Holding(torch.float32))
    source = LayerSource(checkpoint, whole_model_part(model), origins, numbers)
    tokens = None if share is None else share.tokens[share.shard]
    own = model if share is None else share.model
    bodies = PartBuilder(plain_registry(), 64)
    network = Transformer(own, source, builder=bodies, shards=shards, tokens=tokens)
    cache = KvCache(
        [layer.attention for layer in own.layers],
        num_blocks=2,
        block_size=16,
        dtype=torch.float32,
        device=torch.device("cpu"),
        kernel=None,
    )
    ids = torch.tensor([3, 39, 0, 17, 8, 21])
    positions = torch.arange(len(ids))
    step = LayerStep(
        positions, cache.make_attention(Rows.from_tables((0, len(ids), [1])))
    )
    with torch.inference_mode():
        assert network.head is not None
        return network.head(network.run(network.embed(ids, positions), step))


def check_random_forward(model: Model, shares: list[ModelShard]) -> None:
    """Compute some tokens with random weights of a spec, whole and by ranks in threads."""
    with ThreadPoolExecutor(len(shares)) as pool:
        shards = make_shards(len(shares))
        logits = [*pool.map(compute, [model] * len(shares), shares, shards)]
    torch.testing.assert_close(
        torch.cat(logits, 1), compute(model), atol=2e-4, rtol=1e-4
    )


def test_a_rank_reads_and_holds_its_part_only(tmp_path: Path) -> None:
    """It reads its rows, and all of what is cut by columns; it holds what its plan expects."""
    make_model("llama").save_pretrained(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    config = EngineConfig(model=str(tmp_path), dtype="float32", tensor_parallel_size=2)
    plan = plan_ahead(config, checkpoint)
    whole = plan_ahead(replace(config, tensor_parallel_size=1), checkpoint)
    assert [rank.part for rank in plan.ranks] == Part(0, 1, 0, 3, num_shards=2).shards
    sizes = []
    for rank in plan.ranks:
        source = open_weights(
            checkpoint,
            rank.part,
            holding=plan.holding,
            device=torch.device("cpu"),
            seed=1,
            share=rank.share,
        )
        held = [
            *source.load_entry().values(),
            *source.load_exit(source.load_entry()).values(),
        ]
        held += [each for layer in source.load_layers() for each in layer.values()]
        assert rank.share is not None
        specs = stage_specs(rank.share.model, rank.part)
        assert sum(each.num_bytes for each in held) == 4 * sum(
            each.size for each in specs.values()
        )
        sizes.append(source.num_bytes)
        reader = source._maker
        cuts = rank.share.cuts
        for name, origin in source._layers[1].items():
            waiting = reader.list_parts_to_read(origin)
            size = (
                origin.spec
                if cuts.get(f"1.{name}", TensorCut()).columns
                else origin.held_spec
            )
            assert sum(each.nbytes for each in waiting) == 4 * size.size, name
    (one,) = whole.ranks
    assert sum(rank.takes.kv_token for rank in plan.ranks) == one.takes.kv_token
    total = sum(
        4 * each.size for each in stage_specs(checkpoint.model, one.part).values()
    )
    assert total < sum(sizes) < 1.02 * total, "norms are whole on each"


def test_the_reason_is_told_before_anything_is_read() -> None:
    config = EngineConfig(random_init="llama-160m", tensor_parallel_size=13)
    with pytest.raises(UsageError, match=r"12 heads .* among 13 ranks, but among 12;"):
        plan_ahead(config, open_random_checkpoint("llama-160m"))


def test_the_number_of_ranks_is_in_the_fingerprint() -> None:
    """Sums of other parts round otherwise; without tensor parallelism all is as it was."""
    checkpoint = open_random_checkpoint("llama-160m")
    one, two = (
        plan_ahead(
            EngineConfig(random_init="llama-160m", tensor_parallel_size=size),
            checkpoint,
        )
        for size in (1, 2)
    )
    found = two.fingerprint()
    assert found.pop("--tensor-parallel-size") == "2" and found == one.fingerprint()
    assert "--tensor-parallel-size" not in one.fingerprint()
