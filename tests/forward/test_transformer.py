"""The spec'd forward beside transformers in float32, of every row and variant, in plain torch.

test_oracle asks the same of the whole engine, in far fewer variants.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from fminfer.compute.attention.scoring import Scoring
from fminfer.compute.layers import plain
from fminfer.compute.layers.bodies import CpuPartKernels
from fminfer.compute.layers.products import make_library_candidates
from fminfer.compute.values.spec import Model, Norm
from fminfer.core.partition import Part, split_layers
from fminfer.forward.layer_step import LayerStep, PartBuilder
from fminfer.forward.transformer import Transformer
from fminfer.models.checkpoint import open_checkpoint
from fminfer.models.config_fields import ROWS, architecture_of
from fminfer.models.holding import Holding
from fminfer.models.layer_source import open_weights
from tests.conftest import (
    FIELDS,
    SOME,
    VOCAB,
    built_library,
    family_config,
    make_model,
    plain_registry,
)
from tests.encoder_families import ENCODERS, PAIRS

CPU = torch.device("cpu")
MAX_ERROR = 1e-5  # of a logit; those of the models are up to 10
IN_FLOAT32 = Holding(torch.float32)


def rows_of_ids() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(VOCAB) for _ in range(num)] for num in (90, 1, 33, 17)]


class Dense:
    """Attention of packed rows over nothing but the step's own keys, as plainly as can be."""

    def __init__(self, model: Model, lengths: list[int]) -> None:
        self.positions = torch.cat([torch.arange(num) for num in lengths])
        row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        self._distance = self.positions[:, None] - self.positions
        self._is_foreign = row[:, None] != row
        self._model = model
        self.first = 0  # the stage's first layer

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scoring: Scoring,
    ) -> torch.Tensor:
        how = self._model.layers[self.first + layer].attention
        sinks = scoring.sinks
        key, value = (
            part.repeat_interleave(query.shape[1] // part.shape[1], 1)
            for part in (key, value)
        )
        scores = torch.einsum("qhd,khd->hqk", query * how.scaling, key)
        if how.softcap:
            scores = torch.tanh(scores / how.softcap) * how.softcap
        if how.alibi and not how.alibi.is_rounded:
            scores = (
                scores - torch.tensor(how.alibi.slopes)[:, None, None] * self._distance
            )
        is_hidden = self._is_foreign | (self._distance < 0)
        if how.window:
            is_hidden = is_hidden | (self._distance >= how.window)
        scores = scores.masked_fill(is_hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat(
                [scores, sinks[:, None, None].expand(-1, len(query), 1)], -1
            )
        weights = scores.softmax(-1)[..., : len(key)]
        return torch.einsum("hqk,khd->qhd", weights, value)


@torch.inference_mode()
def logits_of(
    folder: Path,
    parts: list[Part],
    rows: list[list[int]] | None = None,
    *,
    bodies: Callable[[], PartBuilder] = lambda: PartBuilder(plain_registry(), 256),
    change: Callable[[Model], Model] = lambda model: model,
    holding: Holding = IN_FLOAT32,
) -> list[torch.Tensor]:
    """Return the logits of every token of rows (None: `rows_of_ids`), of stages in turn."""
    checkpoint = open_checkpoint(str(folder))
    model = change(checkpoint.model)
    rows = rows or rows_of_ids()
    attend = Dense(model, [len(row) for row in rows])
    x = torch.empty(0)
    for part in parts:
        tensors = open_weights(
            checkpoint,
            part,
            holding=holding,
            device=CPU,
            seed=0,
        )
        stage = Transformer(model, tensors, builder=bodies())
        if part.is_first:
            x = stage.embed(
                torch.tensor([each for row in rows for each in row]), attend.positions
            )
        attend.first = part.first
        x = stage.run(x, LayerStep(attend.positions, attend))
        if part.is_last:
            assert stage.head is not None
            x = stage.head(x)
    if model.logit_cap is not None:
        x = torch.tanh(x / model.logit_cap) * model.logit_cap
    return list(x.split([len(row) for row in rows]))


@torch.inference_mode()
def error_of(logits: list[torch.Tensor], own: Any) -> float:
    """Return the largest difference from what transformers gives for each row alone."""
    pairs = zip(rows_of_ids(), logits, strict=True)
    return max(
        float((own(input_ids=torch.tensor([row])).logits[0] - ours).abs().max())
        for row, ours in pairs
    )


def one_stage(num_layers: int = 3) -> list[Part]:
    return split_layers(num_layers, 1, head_cost=0.0)


def kernel_bodies() -> PartBuilder:
    kernels = CpuPartKernels(built_library())
    registry = plain_registry(kernels=kernels)
    registry.of_products += make_library_candidates(torch.float32, is_fast=False)
    return PartBuilder(registry, 256)


def test_every_row_and_variant(family_checkpoint: tuple[Path, Any]) -> None:
    folder, own = family_checkpoint
    assert error_of(logits_of(folder, one_stage()), own) < MAX_ERROR
    in_two = logits_of(folder, split_layers(3, 2, head_cost=0.0), bodies=kernel_bodies)
    assert error_of(in_two, own) < MAX_ERROR, (
        "two stages, compiled bodies, packed products"
    )


def test_a_layer_norm_may_have_an_offset() -> None:
    """A LayerNorm passed over it, as no row had both."""
    x = torch.randn(5, 8)
    weight = torch.randn(8)
    bias = torch.randn(8)
    found = plain.norm(
        x, Norm(1e-5, is_rms=False, has_bias=True, offset=1.0), weight, bias
    )
    expected = torch.nn.functional.layer_norm(x, (8,), weight + 1, bias, 1e-5)
    torch.testing.assert_close(found, expected)


def test_every_row_has_a_variant() -> None:
    """Here, or in test_encoders."""
    others = {name.partition(":")[0] for name in (*ENCODERS, *PAIRS)}
    assert {name.partition("-")[0] for name in FIELDS} | others == set(ROWS)


def settings_of(spec: Any) -> Iterator[Any]:
    """Yield the settings of a spec and of its parts; of numbers, whether they change
    anything."""
    for field in fields(spec):
        value = getattr(spec, field.name)
        for each in value if isinstance(value, tuple) else (value,):
            if is_dataclass(each):
                yield from settings_of(each)
            told = each if isinstance(each, str | bool) else each not in (None, 0, 1)
            yield type(spec), field.name, told


def test_some_families_have_all_that_others_have() -> None:
    """The default run asks most of them alone."""
    found: dict[str, set[Any]] = {}
    for name in FIELDS:
        row = architecture_of(family_config(name))
        layouts = (each.layout for each in (*row.inner.values(), *row.outer.values()))
        found[name] = {*settings_of(row.model), *layouts}
    missing = {
        name: has - set().union(*map(found.get, SOME)) for name, has in found.items()
    }
    assert not {name: has for name, has in missing.items() if has}, "add it to SOME"


def _attention(**changes: Any) -> Callable[[Model], Model]:
    def change(model: Model) -> Model:
        layers = (
            replace(layer, attention=replace(layer.attention, **changes))
            for layer in model.layers
        )
        return replace(model, layers=tuple(layers))

    return change


def _inside(part: str, **changes: Any) -> Callable[[Model], Model]:
    """Change a part of attention: its rotary positions, say."""

    def change(model: Model) -> Model:
        inner: Any = getattr(model.layers[0].attention, part)
        return _attention(**{part: replace(inner, **changes)})(model)

    return change


def _layer(**changes: Any) -> Callable[[Model], Model]:
    def change(model: Model) -> Model:
        return replace(
            model, layers=tuple(replace(layer, **changes) for layer in model.layers)
        )

    return change


def _mlp(**changes: Any) -> Callable[[Model], Model]:
    def change(model: Model) -> Model:
        names = set(changes)
        layers = (
            replace(layer, mlp=replace(cast(Any, layer.mlp), **changes))
            if names <= {field.name for field in fields(layer.mlp)}
            else layer
            for layer in model.layers
        )
        return replace(model, layers=tuple(layers))

    return change


def _expert(**changes: Any) -> Callable[[Model], Model]:
    def change(model: Model) -> Model:
        moe = cast(Any, model.layers[-1].mlp)
        return _mlp(expert=replace(moe.expert, **changes))(model)

    return change


def _norms(model: Model, **changes: Any) -> Model:
    """Change the norms of a model that has the same at all places."""
    assert model.final_norm is not None
    norm = replace(model.final_norm, **changes)
    return replace(_layer(input_norms=(norm, norm))(model), final_norm=norm)


WRONG: dict[str, list[Callable[[Model], Model]]] = {
    "mistral": [_attention(window=25), _attention(window=None)],
    "gemma2": [
        _attention(softcap=1.6),
        _attention(scaling=0.25),
        _layer(output_norms=(None, None)),
    ],
    "gemma3_text": [lambda model: replace(model, logit_cap=None)],
    "gemma": [lambda model: replace(model, embed_scale=1.0)],
    "glm4": [_inside("rope", is_interleaved=False)],
    "falcon-alibi": [_inside("alibi", is_rounded=False)],
    "mpt": [_attention(clip=None), _inside("alibi", slopes=(0.5, 0.25, 0.125, 0.0625))],
    "gpt2-inverse": [_attention(scaling=0.25)],
    "opt": [lambda model: replace(model, position_offset=1)],
    "bloom": [_mlp(activation="gelu")],
    "bloom-normed": [_layer(adds_normed=False)],
    "phi3-long": [_inside("rope", scale=1.0)],
    "olmo2": [_attention(qk_norm=None), _layer(output_norms=(None, None))],
    "qwen3_moe": [_mlp(is_normalized=False), _mlp(top_k=1)],
    "gpt_neo": [_attention(window=None)],
    "llama": [
        _layer(is_parallel=True),
        _mlp(activation="relu"),
        _layer(input_norms=(Norm(1e-3), Norm(1e-3))),
    ],
    "stablelm": [_layer(is_parallel=True)],
    "granite": [
        _layer(residual_scale=1.0),
        _attention(scaling=0.25),
        lambda model: replace(model, logit_scale=1.0),
        lambda model: replace(model, embed_scale=1.0),
    ],
    "cohere": [_inside("rope", is_interleaved=False), _layer(is_parallel=False)],
    "cohere2": [_attention(rope=None), _attention(window=None)],
    "olmo": [
        _attention(clip=None),
        _layer(input_norms=(Norm(1e-5, has_weight=False),) * 2),
    ],
    "arcee": [_mlp(activation="relu")],
    "xglm": [lambda model: replace(model, position_offset=1)],
    "apertus": [_mlp(activation="relu2")],
    "nemotron": [_mlp(activation="relu"), lambda model: _norms(model, offset=0.0)],
    "nanochat": [lambda model: replace(model, embed_norm=None)],
    "hunyuan_v1_dense": [_attention(qk_norm_is_last=False)],
    "smollm3": [_attention(rope=None), _attention(window=None)],
    "qwen2_moe": [_mlp(has_shared_gate=False), _mlp(shared=None)],
    "phimoe": [_mlp(scores="softmax"), _mlp(mixer_eps=0.01)],
    "ernie4_5_moe": [_mlp(has_choice_bias=False), _mlp(shared=None)],
    "gpt_oss": [
        _expert(limit=0.05),
        _expert(activation="silu"),
        _mlp(has_router_bias=False),
        _attention(has_sinks=False),
    ],
    "deepseek_v2-groups": [_mlp(rated_by=2), _attention(scaling=36**-0.5)],
    "deepseek_v3": [
        _inside("latent", norm=Norm(1e-3)),
        _inside("rope", is_interleaved=False),
    ],
    "glm4_moe": [
        _mlp(has_choice_bias=False),
        _mlp(scores="softmax"),
        _mlp(groups=2),
        _mlp(top_groups=3),
        _mlp(scale=1.0),
    ],
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_a_wrong_spec_is_seen(name: str, tmp_path: Path) -> None:
    """Otherwise the test above would pass whatever rows say."""
    own = make_model(name)
    own.save_pretrained(tmp_path)
    for change in WRONG[name]:
        assert (
            error_of(logits_of(tmp_path, one_stage(), change=change), own)
            > 10 * MAX_ERROR
        )
