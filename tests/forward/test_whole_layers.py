"""Whole layers in one call: to the last bit what their parts give one by one."""

from __future__ import annotations

import copy
import ctypes
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fminfer
from fminfer.compute.kernels.kernel_build import find_compiler
from fminfer.compute.kernels.library_calls import RowSizes
from fminfer.compute.layers import products
from fminfer.compute.layers.bodies import GELU, RELU
from fminfer.compute.layers.experts import Workspace
from fminfer.compute.values.spec import Alibi, Norm, Rope
from fminfer.compute.values.weights import KERNEL_TYPES
from fminfer.forward.whole_layers import WholeLayer, WholeLayers, can_join
from fminfer.models.checkpoint import open_random_checkpoint
from fminfer.models.config_fields import architecture_of
from tests.conftest import FIELDS, SOME, built_library, family_config, in_turns
from tests.models.test_oracle import mixed_requests

pytestmark = pytest.mark.skipif(
    find_compiler() is None, reason="there is no C++ compiler"
)


@pytest.fixture
def own_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have them multiply also where tiles are faster."""
    monkeypatch.setattr(products, "has_unit", lambda name: False)


def layer_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Norm as whole layers do; torch rounds otherwise on the way."""
    rows, out = rows_of(x)
    run = built_library().fminfer_layer_norm
    address = ctypes.c_void_p
    run.argtypes = [
        ctypes.POINTER(RowSizes),
        address,
        address,
        ctypes.c_float,
        address,
        address,
    ]
    run(rows, module.weight.data_ptr(), module.bias.data_ptr(), module.eps, None, None)
    return out


def rows_of(x: torch.Tensor) -> tuple[RowSizes, torch.Tensor]:
    """Return how to walk through (…, width), whose rows may have gaps, and an empty result."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    width = x.shape[-1]
    count = out.numel() // x.shape[-1]
    sizes = (count, 1, width, x.stride(-2), 0, KERNEL_TYPES[x.dtype], 2)
    return RowSizes(x.data_ptr(), out.data_ptr(), *sizes), out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 15, 16, 17, 80])
def test_layer_norms(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    norm = nn.LayerNorm(width, eps=1e-3).to(dtype).requires_grad_(False)
    norm.weight += torch.randn(width).to(dtype)
    norm.bias += torch.randn(width).to(dtype)
    for count in (1, 1300):  # 1300 rows of 16 are for two threads
        x = (5 + torch.randn(count, width + 3)).to(dtype)[:, :width]
        expected = copy.deepcopy(norm).double()(x.double())
        tolerance = 2e-5 if dtype == torch.float32 else 5e-3
        found = layer_norm(norm, x).double()
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_relu(dtype: torch.dtype) -> None:
    x = torch.tensor(
        [[float("nan"), float("-inf"), float("inf"), -0.0, 1e-30, *range(-8, 9)]]
    )
    x = x.to(dtype)
    rows, out = rows_of(x)
    run = built_library().fminfer_gate
    run.argtypes = [ctypes.POINTER(RowSizes), ctypes.c_void_p, ctypes.c_int64]
    run(rows, None, RELU)
    torch.testing.assert_close(out, x.relu(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gelu(dtype: torch.dtype) -> None:
    """It is that with erf, to 3e-7 in float32; far from 0 it is 0, or x."""
    x = torch.cat(
        [torch.linspace(-14, 14, 4001), torch.tensor([-1e30, 1e30, -0.0, float("nan")])]
    )
    x = x.to(dtype)[None]
    rows, out = rows_of(x)
    run = built_library().fminfer_gate
    run.argtypes = [ctypes.POINTER(RowSizes), ctypes.c_void_p, ctypes.c_int64]
    run(rows, None, GELU)
    expected = nn.functional.gelu(x.double())
    tolerance = 4e-7 if dtype == torch.float32 else 5e-3
    torch.testing.assert_close(
        out.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True
    )


# How many layers of a model are one call; of the others none.
WHOLE = dict.fromkeys(
    (
        "llama",
        "llama-dynamic",
        "llama-biases",
        "llama-yarn",
        "mistral",
        "qwen2",
        "qwen2-window",
        "qwen3",
        "gemma",
        "phi3",
        "phi3-long",
        "phi3-partial",
        "starcoder2",
        "bloom",
        "opt",
        "gpt2",
        "gpt2-inverse",
        "gpt2-unscaled",
        "gpt2-untied",
        "gpt_bigcode-heads",
        "gpt_bigcode",
        "gpt_neo",
        "stablelm",
        "cwm",
        "ministral",
        "ministral3",
        "internlm3",
        "seed_oss",
        "smollm3",
        "vaultgemma",
        "mistral3",
        "mixtral",
        "qwen3_moe",
        "qwen2_moe",
        "glm4_moe",
        "dots1",
        "phimoe",
        "phimoe-long",
        "solar_open",
        "gpt_neox-serial",
        "gpt_neox_japanese",
        "biogpt",
        "xglm",
    ),
    3,
)
# the third has no rotary positions, and norms of queries and keys
WHOLE["exaone_moe"] = 2
# Those of SOME, and others by what the library reads: offsets, norms of heads, caps,
# fewer layers.
ASKED = (*SOME, "gemma", "qwen3", "vaultgemma", "starcoder2", "exaone_moe")


def test_what_the_library_serves() -> None:
    """By the spec alone: norms before, no norm elsewhere, an activation that it has."""
    for name in FIELDS:
        layers = architecture_of(family_config(name)).model.layers
        assert sum(map(can_join, layers)) == WHOLE.get(name, 0), name


@pytest.mark.parametrize(
    "change",
    [
        {"is_parallel": True},
        {"adds_normed": True},
        {"output_norms": (Norm(1e-5), None)},
        {"sum_norms": (None, Norm(1e-5))},
        {"input_norms": (Norm(1e-5), None)},
        # no bias: it is no RMS
        {"input_norms": (Norm(1e-5, is_rms=False), Norm(1e-5, is_rms=False))},
        {"input_norms": (Norm(1e-5, has_weight=False), Norm(1e-5))},
        {"input_norms": (Norm(1e-5, is_rms=False, has_bias=True, offset=1.0),) * 2},
    ],
)
def test_layers_of_another_form_are_left(change: dict[str, Any]) -> None:
    (layer, *_) = open_random_checkpoint("llama-160m").model.layers
    assert can_join(layer) and not can_join(replace(layer, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"clip": 0.5},
        {"qk_norm": Norm(1e-5), "qk_norm_over": "all"},
        {"qk_norm": Norm(1e-5, is_rms=False, has_bias=True)},
        {"qk_norm": Norm(1e-5), "rope": None},
        {"rope": Rope((1.0,), is_interleaved=True)},
        {"alibi": Alibi((1.0,) * 12, is_rounded=True)},
    ],
)
def test_attention_of_another_form_is_left(change: dict[str, Any]) -> None:
    (layer, *_) = open_random_checkpoint("llama-160m").model.layers
    assert not can_join(replace(layer, attention=replace(layer.attention, **change)))


def answers(folder: Path, **options: Any) -> tuple[int, list[Any]]:
    """Return how many layers are whole, and the choices of mixed requests."""
    engine = fminfer.Engine(str(folder), **{"dtype": "bfloat16"} | options)
    stage: Any = engine.pipeline.stages._run.__self__  # type: ignore[attr-defined]
    num_whole = sum(isinstance(layer, WholeLayer) for layer in stage._network.layers)
    records = sorted(
        engine.run(mixed_requests()[::2]), key=lambda record: record.line.number
    )
    engine.close()
    assert all(record.result is not None for record in records)
    return num_whole, [record.result["choices"] for record in records if record.result]


@pytest.mark.usefixtures("own_products")
@pytest.mark.parametrize(
    ("family_checkpoint", "types"),
    [
        *in_turns(["float32", "bfloat16"], [name for name in ASKED if name in WHOLE]),
        *itertools.product(("llama", "bloom"), ["float32 float16", "bfloat16 float32"]),
    ],
    indirect=["family_checkpoint"],
)
def test_they_give_what_their_parts_give(
    types: str,
    family_checkpoint: tuple[Path, Any],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts in chunks, decoding rows, scored tokens and others, windows, prefixes."""
    name = request.node.callspec.params["family_checkpoint"]
    dtype, _, kv_dtype = types.partition(" ")
    options: dict[str, Any] = {"dtype": dtype, "kv_dtype": kv_dtype or "auto"}
    options |= {"chunk_size": 24, "block_size": 32, "budget": 1024}
    num_whole, found = answers(family_checkpoint[0], **options)
    assert num_whole == WHOLE.get(name, 0)
    if num_whole:
        monkeypatch.setattr(WholeLayers, "join_layer", lambda self, parts: parts)
        assert answers(family_checkpoint[0], **options) == (0, found)


@pytest.mark.usefixtures("own_products")
def test_plain_attention_has_no_whole_layers(
    llama_checkpoint: tuple[Path, Any],
) -> None:
    assert answers(llama_checkpoint[0], kernels="off")[0] == 0


@pytest.mark.usefixtures("own_products")
@pytest.mark.parametrize("where", ["kernel", "space"])
def test_without_memory_a_step_is_computed_in_halves(
    where: str, llama_checkpoint: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of which may see the same layer's input again."""
    _, expected = answers(llama_checkpoint[0])
    failed: list[str] = []
    # Not in the trial, which would leave the layers as they are.
    monkeypatch.setattr(
        "fminfer.forward.registry.compare_pairs", lambda pairs, limit: None
    )

    def fails() -> bool:
        if len(failed) < 2:
            failed.append(where)
            return True
        return False

    if where == "kernel":
        init = WholeLayer.__init__

        def init_failing(self: WholeLayer, *args: Any) -> None:
            init(self, *args)
            run: Any = self._run
            self._run = lambda *args: 1 if fails() else run(*args)  # type: ignore[assignment]

        monkeypatch.setattr(WholeLayer, "__init__", init_failing)
    else:
        take = Workspace.allocate

        def take_failing(self: Workspace, size: int) -> torch.Tensor:
            if fails():
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            return take(self, size)

        monkeypatch.setattr(Workspace, "allocate", take_failing)
    assert answers(llama_checkpoint[0]) == (3, expected) and len(failed) == 2
