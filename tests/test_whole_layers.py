"""Whole layers in one call: to the last bit what their parts give one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fminfer
from fminfer import loading
from fminfer.kernel_build import find_compiler
from fminfer.product_kernel import ProductKernel
from fminfer.whole_layers import StepCall, WholeLayer, join_layers
from tests.conftest import built_library
from tests.test_oracle import mixed_requests

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
# How many layers are norm, attention, norm and gated MLP, each a kernel of ours; others: none.
WHOLE = dict.fromkeys(
    ("gemma", "llama", "llama-dynamic", "mistral", "qwen2", "qwen2-window", "qwen3"), 3
)
WHOLE["qwen3_moe"] = 1  # the others have experts


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ProductKernel(built_library()).is_there:
        pytest.skip("this processor does not multiply pairs of bfloat16")
    monkeypatch.setattr(ProductKernel, "is_best_for", ProductKernel.can_pack)


def answers(folder: Path, **options: Any) -> tuple[int, list[Any]]:
    """Return how many layers are whole, and the choices of mixed requests."""
    engine = fminfer.Engine(str(folder), dtype="bfloat16", **options)
    stage: Any = engine._pipeline._run.__self__  # type: ignore[attr-defined]
    modules = [vars(module).get("forward") for module in stage._decoder.modules()]
    records = sorted(engine.run(mixed_requests()), key=lambda record: record.line.number)
    engine.close()
    assert all(record.result is not None for record in records)
    whole = [forward for forward in modules if isinstance(forward, WholeLayer)]
    return len(whole), [record.result["choices"] for record in records if record.result]


def test_they_give_what_their_parts_give(
    family_checkpoint: tuple[Path, Any],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts in chunks, decoding rows, scored tokens and others, windows, prefixes."""
    name = request.node.callspec.params["family_checkpoint"]
    options = {"chunk_size": 24, "block_size": 32, "budget": 1024}
    num_whole, found = answers(family_checkpoint[0], **options)
    assert num_whole == WHOLE.get(name, 0)
    if num_whole:
        monkeypatch.setattr(loading, "join_layers", lambda model, library: 0)
        assert answers(family_checkpoint[0], **options) == (0, found)


def test_plain_attention_has_no_whole_layers(llama_checkpoint: tuple[Path, Any]) -> None:
    assert answers(llama_checkpoint[0], attention="eager")[0] == 0


def test_a_layer_that_tells_attention_more_is_left_alone(
    llama_checkpoint: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the kernel does not know of it would not do."""

    def join(model: Any, library: Any) -> int:
        for layer in model.model.layers[:2]:
            layer.self_attn.told = layer.self_attn.told | {"something": 1.0}
        return join_layers(model, library)

    monkeypatch.setattr(loading, "join_layers", join)
    assert answers(llama_checkpoint[0])[0] == 1


@pytest.mark.parametrize("where", ["kernel", "space"])
def test_without_memory_a_step_is_computed_in_halves(
    where: str, llama_checkpoint: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of which may see the same layer's input again."""
    _, expected = answers(llama_checkpoint[0])
    failed: list[str] = []

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
        take = StepCall.take_space

        def take_failing(self: StepCall, size: int) -> torch.Tensor:
            if fails():
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            return take(self, size)

        monkeypatch.setattr(StepCall, "take_space", take_failing)
    assert answers(llama_checkpoint[0]) == (3, expected) and len(failed) == 2
