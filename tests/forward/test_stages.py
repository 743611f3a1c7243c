"""A model cut into stages gives what the whole one gives, for any family and number of
stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import fminfer
from fminfer.compute.attention.kv_cache import KvCache
from fminfer.compute.kernels.kernel_build import find_compiler
from fminfer.compute.values.step import Step, StepResult, StepTrace
from fminfer.core.config import EngineConfig
from fminfer.core.partition import Part, make_parts, split_layers
from fminfer.forward.stage import Stage
from fminfer.forward.transformer import Transformer
from fminfer.forward.whole_layers import WholeLayers
from fminfer.models.checkpoint import open_checkpoint, open_random_checkpoint
from fminfer.models.holding import Holding
from fminfer.models.layer_source import open_weights
from fminfer.models.stored.tensor_table import TensorFiles
from fminfer.plan.planning import split_model
from tests.conftest import (
    VOCAB,
    in_turns,
    load_network,
    make_model,
    more,
    save_byte_tokenizer,
)
from tests.encoder_families import PAIRS, make_encoder
from tests.models.test_oracle import Request, mixed_requests
from tests.sequence_models import save_sequence_model

CPU = torch.device("cpu")
# layers
WHOLE_AND_OTHERS = ("llama", "qwen3", "gemma2", "gptj", "bloom", "falcon-alibi")
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "kernels": "off",
    "chunk_size": 60,
    "block_size": 16,
    "budget": 1024,
}


def make_stage(network: Transformer) -> Stage:
    cache = KvCache(
        [layer.attention for layer in network.layer_specs],
        num_blocks=-(-OPTIONS["budget"] // OPTIONS["block_size"]),
        block_size=OPTIONS["block_size"],
        dtype=torch.float32,
        device=CPU,
        kernel=None,
    )
    return Stage(network, cache)


class Chain:
    """The stages one after the other, in the place of one that has all layers."""

    def __init__(self, folder: Path, parts: list[Part]) -> None:
        self.stages = [make_stage(load_network(folder, part)) for part in parts]

    def run(self, step: Step) -> StepResult:
        hidden = None
        for stage in self.stages:
            hidden = stage.forward(step, hidden)
        assert hidden is not None
        return StepResult(step.step_id, self.stages[-1].finish(step, hidden), [])


def answers(
    folder: Path, chain: Chain | None, requests: list[Request] | None = None
) -> list[dict[str, Any]]:
    engine = fminfer.Engine(str(folder), **OPTIONS)
    if chain is not None:
        engine.pipeline.stages._run = chain.run
    requests = requests or mixed_requests()[::4]
    records = sorted(engine.run(requests), key=lambda record: record.line.number)
    engine.close()
    return [record.to_dict()["result"] for record in records]


def check_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for result, whole in zip(found, expected, strict=True):
        for choice, other in zip(result["choices"], whole["choices"], strict=True):
            assert choice["text"] == other["text"]
            ours = choice["logprobs"]
            theirs = other["logprobs"]
            assert ours["tokens"] == theirs["tokens"]
            if ours["token_logprobs"][0] is None:
                assert theirs["token_logprobs"].pop(0) is ours["token_logprobs"].pop(0)
            assert ours["token_logprobs"] == pytest.approx(
                theirs["token_logprobs"], abs=1e-5
            )


def test_a_warmed_up_model_gives_the_same(llama_checkpoint: tuple[Path, Any]) -> None:
    """A prompt and a token are computed before any request, on a GPU; their keys must
    not stay."""
    folder, _ = llama_checkpoint
    chain = Chain(folder, make_parts([2, 1]))
    for stage in chain.stages:
        stage._token_limit.most = 2  # memory was short while kernels were compiled
        stage.warm_up()
        assert stage.max_tokens == 0
    check_same(answers(folder, chain), answers(folder, None))


@pytest.mark.parametrize("name", sorted(PAIRS))
def test_a_warmed_up_decoder_behind_an_encoder_gives_the_same(
    name: str, tmp_path: Path
) -> None:
    """It has an encoder output to read, also in the step before any request."""
    save_sequence_model(name, tmp_path)
    requests = [
        {"prompt": [5 + n, 7, 9, 11], "max_tokens": 6, "logprobs": 1} for n in range(3)
    ]
    checkpoint = open_checkpoint(str(tmp_path))
    chain = Chain(tmp_path, split_model(EngineConfig(), checkpoint, 2))
    for stage in chain.stages:
        stage.warm_up()
    check_same(answers(tmp_path, chain, requests), answers(tmp_path, None, requests))


def test_a_warmed_up_encoder_gives_the_same(tmp_path: Path) -> None:
    make_encoder("bert").save_pretrained(tmp_path)
    options = OPTIONS | {"skip_tokenizer_init": True}
    with fminfer.Engine(str(tmp_path), **options) as engine:
        prompts = [[5, 6, 7], [8, 9]]
        before = engine.embed(prompts)
        stage: Any = engine.pipeline.stages._run.__self__  # type: ignore[attr-defined]
        stage.warm_up()
        assert (engine.embed(prompts) == before).all()


@pytest.mark.parametrize(("name", "num_stages"), in_turns((2, 3, 5)))
def test_stages_give_what_one_gives(name: str, num_stages: int, tmp_path: Path) -> None:
    make_model(name, num_layers=6).save_pretrained(tmp_path)
    save_byte_tokenizer(tmp_path)
    chain = Chain(tmp_path, split_layers(6, num_stages, head_cost=0.8))
    check_same(answers(tmp_path, chain), answers(tmp_path, None))


@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize(
    ("name", "body"),
    [
        *((name, "require") for name in WHOLE_AND_OTHERS),
        *(pytest.param(name, "off", marks=more) for name in WHOLE_AND_OTHERS[1:]),
        ("llama", "off"),
    ],
)
def test_the_last_layer_runs_only_for_tokens_that_are_wanted(
    name: str, body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the others it stores keys and values."""
    # to see its parts
    monkeypatch.setattr(WholeLayers, "join_layer", lambda self, parts: parts)
    make_model(name, num_layers=3).save_pretrained(tmp_path)
    save_byte_tokenizer(tmp_path)
    engine = fminfer.Engine(str(tmp_path), **(OPTIONS | {"kernels": body}))
    stage: Any = engine.pipeline.stages._run.__self__  # type: ignore[attr-defined]
    rows = [0, 0, 0]
    for place, layer in enumerate(stage._network.layers):

        def count(
            x: torch.Tensor, step: Any, *, place: int = place, own: Any = layer.mlp
        ) -> torch.Tensor:
            rows[place] += len(x)
            out: torch.Tensor = own(x, step)
            return out

        layer.mlp = count
    most = {"tokens": 0, "wanted": 0}

    def take_note(trace: StepTrace) -> None:
        most["tokens"] += trace.step.num_tokens
        most["wanted"] += len(trace.step.wanted) or 1

    engine.follow(on_step=take_note)
    records = sorted(
        engine.run(mixed_requests()[::4]), key=lambda record: record.line.number
    )
    check_same(
        [record.to_dict()["result"] for record in records], answers(tmp_path, None)
    )
    assert rows == [most["tokens"], most["tokens"], most["wanted"]]
    assert most["wanted"] < 0.8 * most["tokens"]
    engine.close()


def test_the_seeds_split_of_70_layers(tmp_path: Path) -> None:
    """8 ranks × --num-layers 9 with --max-layers 70, as the seed runs BLOOM: the last has 7."""
    size = {"hidden_size": 32, "n_layer": 70, "n_head": 4, "vocab_size": VOCAB}
    config = transformers.AutoConfig.for_model("bloom", bos_token_id=None, **size)
    torch.manual_seed(3)
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path)
    save_byte_tokenizer(tmp_path)
    parts = split_layers(70, 8, head_cost=0, each=9, most=70)
    assert [part.num_layers for part in parts] == [9] * 7 + [7]
    requests = mixed_requests()[2::14]
    found = answers(tmp_path, Chain(tmp_path, parts), requests)
    check_same(found, answers(tmp_path, None, requests))


def test_random_weights_are_the_same_in_parts(tmp_path: Path) -> None:
    """A rank draws its own layers only, and a tied head apart from its embedding."""
    fields = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    fields |= {
        "num_attention_heads": 4,
        "vocab_size": VOCAB,
        "tie_word_embeddings": True,
    }
    config = transformers.AutoConfig.for_model("llama", **fields)
    config.save_pretrained(tmp_path)
    checkpoint = open_random_checkpoint(str(tmp_path))
    whole, *parts = (
        open_weights(
            checkpoint, part, holding=Holding(torch.float32), device=CPU, seed=5
        )
        for part in (*make_parts([4]), *make_parts([3, 1]))
    )
    assert (
        parts[1].load_exit({})["head.weight"].equals(whole.load_entry()["embed.weight"])
    )
    (last,) = parts[1].load_layers()
    for name, weight in [*whole.load_layers()][3].items():
        assert weight.equals(last[name])


def test_the_progress_of_a_last_stage_counts_its_tied_head(tmp_path: Path) -> None:
    """The head was read when the progress stood at its end."""
    make_model("gpt2").save_pretrained(tmp_path)
    seen: list[tuple[int, int]] = []
    source = open_weights(
        open_checkpoint(str(tmp_path)),
        make_parts([2, 1])[1],
        holding=Holding(torch.float32),
        device=CPU,
        seed=0,
        on_progress=lambda done, total: seen.append((done, total)),
    )
    groups = [source.load_exit({}), *source.load_layers()]
    num_bytes = sum(weight.num_bytes for group in groups for weight in group.values())
    assert "head.weight" in groups[0] and source.num_bytes == num_bytes
    assert len(set(seen)) == len(seen) and seen[-1] == (num_bytes, num_bytes)


def test_a_stage_reads_only_its_own_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("llama").save_pretrained(tmp_path)
    read: list[str] = []
    own = TensorFiles.read
    own_copy = TensorFiles.copy

    def spying(files: TensorFiles, name: str) -> torch.Tensor:
        read.append(name)
        return own(files, name)

    def spying_on_copies(files: TensorFiles, name: str, target: torch.Tensor) -> None:
        read.append(name)
        own_copy(files, name, target)

    monkeypatch.setattr(TensorFiles, "read", spying)
    monkeypatch.setattr(TensorFiles, "copy", spying_on_copies)
    load_network(tmp_path, make_parts([1, 1, 1])[1])
    assert read and all(name.startswith("model.layers.1.") for name in read)
