"""What is computed in fewer passes is the same, and what differs is left as it is."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface
from transformers.activations import ACT2FN

from fminfer import fused_layers
from fminfer.fused_layers import Fused, PartKernels, fuse_layers
from fminfer.kernel_build import find_compiler
from fminfer.layer_kernels import GELU_TANH, SILU, LayerKernels
from fminfer.triton_layers import TritonLayers

from .conftest import FIELDS, IS_ALL, built_library, make_model, triton_device

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
WIDTHS = [1, 15, 16, 17, 64, 80]

# Modules replaced in three layers: one by one norms, gelus, gated layers, attentions and layers.
FUSED = {
    "bloom": 3,
    "codegen": 3,
    "falcon": 0,
    "falcon-alibi": 0,
    "falcon-alibi-shared": 0,
    "falcon-new": 0,
    "gemma": 7 + 3 + 3 + 3 + 3,
    "gemma2": 13 + 3 + 3 + 3,
    "gemma3_text": 19 + 3 + 3 + 3,
    "glm4": 13 + 3,  # its rotary positions pair neighbours
    "gpt2": 3,
    "gpt2-inverse": 3,
    "gpt_bigcode": 3,
    "gpt_bigcode-heads": 3,
    "gpt_neo": 3,
    "gpt_neox": 0,
    "gptj": 3,
    "llama": 7 + 3 + 3 + 3,
    "llama-dynamic": 7 + 3 + 3 + 3,
    "mistral": 7 + 3 + 3 + 3,
    "mixtral": 7 + 3 + 3,
    "mpt": 0,
    "olmo2": 13 + 3 + 3,
    "opt": 0,
    "phi": 3,
    "phi3": 7 + 3 + 3,
    "phi3-long": 7 + 3 + 3,
    "qwen2": 7 + 3 + 3 + 3,
    "qwen2-window": 7 + 3 + 3 + 3,
    "qwen3": 13 + 3 + 3 + 3,
    "qwen3_moe": 13 + 1 + 3 + 3,
    "stablelm": 3,  # turns a part of each head
    "stablelm-parallel": 3,
    "starcoder2": 3 + 3,
}


# Triton's interpreter is slow. These have every norm, rotation and activation; --all has all.
IN_TRITON = (
    *("llama", "qwen3", "gemma2", "glm4", "phi3", "stablelm", "starcoder2", "olmo2"),
    *("bloom", "gpt2", "gptj", "mixtral"),
)


@pytest.fixture(scope="module", params=["g++", "triton"])
def kernels(request: pytest.FixtureRequest) -> PartKernels:
    """The CPU's, and the GPU's: on a GPU, or in triton's interpreter."""
    if request.param == "triton":
        return TritonLayers(triton_device())
    if find_compiler() is None:
        pytest.skip("there is no C++ compiler")
    return LayerKernels(built_library())


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def dtype(request: pytest.FixtureRequest, kernels: PartKernels) -> torch.dtype:
    """The interpreter rounds bfloat16 towards zero: float16 stands in for it."""
    is_wide = request.param == torch.float32 or isinstance(kernels, LayerKernels)
    is_wide |= kernels.device.type == "cuda"
    return request.param if is_wide else torch.float16


@pytest.fixture(autouse=True)
def tensors_where_the_kernels_are(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make a test's tensors on the device of its kernels."""
    device = torch.device("cpu")
    if "kernels" in request.fixturenames:
        device = request.getfixturevalue("kernels").device
    if device.type == "cpu":
        yield
        return
    with device:
        yield


@pytest.fixture
def many(kernels: PartKernels) -> int:
    """Tokens; the interpreter takes a millisecond for each."""
    is_fast = isinstance(kernels, LayerKernels) or kernels.device.type == "cuda"
    return 2000 if is_fast else 20


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return (1, …) of random numbers whose rows do not follow one another at once."""
    torch.manual_seed(len(shape))
    return torch.randn(1, *shape[:-1], shape[-1] + 3).to(dtype)[..., : shape[-1]]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare with what was computed in float64."""
    tolerance = 2e-6 if found.dtype == torch.float32 else 5e-3
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("width", WIDTHS)
def test_norms(kernels: PartKernels, width: int, dtype: torch.dtype, many: int) -> None:
    weight = torch.randn(width).to(dtype)
    for x in (rows(5, width, dtype=dtype), rows(many // 3, 3, width, dtype=dtype)):
        for y in (x, x.transpose(1, 2) if x.dim() == 4 else x):
            wide = y.double()
            scaled = wide * (wide.square().mean(-1, keepdim=True) + 1e-3).rsqrt()
            for offset in (0.0, 1.0):
                found = kernels.rms_norm(y, weight, 1e-3, offset)
                close(found, scaled * (weight.double() + offset))


@pytest.mark.parametrize("width, turned", [(16, 16), (64, 64), (80, 80), (34, 34), (64, 20)])
def test_rotary_positions(
    kernels: PartKernels, width: int, turned: int, dtype: torch.dtype, many: int
) -> None:
    for tokens in (1, many // 7):
        x, angles = rows(tokens, 3, width, dtype=dtype), torch.randn(1, tokens, turned)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        wide, turn = x.double(), [part.double()[:, :, None] for part in (cos, sin)]
        head = wide[..., :turned]
        first, second = head.chunk(2, -1)
        expected = wide.clone()
        expected[..., :turned] = head * turn[0] + torch.cat([-second, first], -1) * turn[1]
        close(kernels.rotate(x, cos, sin), expected)


@pytest.mark.parametrize("width", WIDTHS)
def test_gates(kernels: PartKernels, width: int, dtype: torch.dtype, many: int) -> None:
    acts: dict[int, Callable[..., torch.Tensor]] = {
        SILU: nn.functional.silu,
        GELU_TANH: lambda x: nn.functional.gelu(x, approximate="tanh"),
    }
    for tokens in (1, many):
        both = 4 * torch.randn(1, tokens, 2 * width).to(dtype)
        first, second = both.double().chunk(2, -1)
        for activation, act in acts.items():
            close(kernels.gate(both, activation), act(first) * second)
            assert kernels.gate(both[0], activation).shape == (tokens, width)
        close(kernels.gelu(both), acts[GELU_TANH](both.double()))


@pytest.mark.parametrize("width", WIDTHS)
def test_a_sum_and_its_norm(
    kernels: PartKernels, width: int, dtype: torch.dtype, many: int
) -> None:
    for tokens in (1, many):
        x, other = rows(tokens, width, dtype=dtype), torch.randn(1, tokens, width).to(dtype)
        weight = torch.rand(width).to(dtype)
        both, normed = kernels.add_and_norm(x, other, weight, 1e-5, 1.0)
        assert torch.equal(both, x + other), "rounded as torch rounds"
        alone = kernels.rms_norm(both, weight, 1e-5, 1.0)
        if kernels.device.type == "cpu":
            assert torch.equal(normed, alone)
        else:  # two variants of one kernel, which a compiler may round differently
            close(normed, alone.double())


def test_strange_numbers_stay_strange(kernels: PartKernels) -> None:
    values = torch.tensor([float("nan"), 1e30, -1e30, 1e-30, -0.0, 88.0, -88.0, 3.0])
    both = torch.cat([values, torch.ones(8)])[None, None]
    for activation, act in ((SILU, "none"), (GELU_TANH, "tanh")):
        found = kernels.gate(both, activation)[0, 0]
        own = nn.functional.silu(values)
        if act == "tanh":
            own = nn.functional.gelu(values, approximate=act)
        torch.testing.assert_close(found, own, rtol=1e-6, atol=1e-30, equal_nan=True)
    x = torch.randn(1, 3, 32)
    x[0, 1, 7] = float("nan")
    found = kernels.rms_norm(x, torch.ones(32), 1e-6, 0.0)
    assert found.isnan().any(-1).tolist() == [[False, True, False]], "its row and no other"


def test_the_kernels_get_only_what_they_expect(kernels: PartKernels) -> None:
    """They would read past the tensors' ends."""
    x = torch.zeros(1, 4, 16)
    wrong: list[Callable[[], object]] = [
        lambda: kernels.rms_norm(x, torch.ones(15), 1e-6, 0.0),
        lambda: kernels.rms_norm(x, torch.ones(16).double(), 1e-6, 0.0),
        lambda: kernels.rms_norm(x.expand(2, 4, 16), torch.ones(16), 1e-6, 0.0),
        lambda: kernels.rms_norm(x.transpose(1, 2), torch.ones(4), 1e-6, 0.0),
        lambda: kernels.rotate(x[:, :, None], torch.ones(1, 3, 16), torch.ones(1, 3, 16)),
        lambda: kernels.rotate(x[:, :, None], torch.ones(1, 4, 18), torch.ones(1, 4, 18)),
        lambda: kernels.rotate(x[:, :, None], torch.ones(1, 4, 16), torch.ones(1, 4, 8)),
        lambda: kernels.gate(torch.zeros(1, 4, 15), SILU),
        lambda: kernels.add_and_norm(x, x[:, :3], torch.ones(16), 1e-6, 0.0),
        lambda: kernels.add_and_norm(x, x.bfloat16(), torch.ones(16), 1e-6, 0.0),
    ]
    for call in wrong:
        with pytest.raises(AssertionError):
            call()


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_every_family_answers_the_same(kernels: PartKernels, name: str, dtype: torch.dtype) -> None:
    if isinstance(kernels, TritonLayers) and name not in IN_TRITON and not IS_ALL:
        pytest.skip("more of the same; scripts/test --all")
    model = make_model(name).requires_grad_(False).to(dtype)
    if name == "gemma2":  # whose cap sdpa does not know
        for layer in model.model.layers:
            layer.self_attn.attn_logit_softcapping = None
    if model._supports_sdpa or name == "gemma2":
        model.config._attn_implementation = "sdpa"
    ids = torch.randint(5, 200, (1, 21))
    own = model(input_ids=ids).logits
    assert fuse_layers(model, kernels) == Fused(FUSED[name], {})
    found = model(input_ids=ids).logits
    tolerance = 1e-5 if dtype == torch.float32 else 0.1 * float(own.abs().amax())
    torch.testing.assert_close(found, own, rtol=0, atol=tolerance)


class OtherNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.randn(32)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x / (x.norm(dim=-1, keepdim=True) + self.eps)


class OtherRMSNorm(OtherNorm):
    """It has the name and differs."""


def test_what_differs_is_left(kernels: PartKernels) -> None:
    model: Any = make_model("llama").requires_grad_(False)
    layer = model.model.layers[0]
    layer.input_layernorm = OtherRMSNorm().requires_grad_(False)
    gated, attend = layer.mlp.forward, layer.self_attn.forward
    layer.mlp.forward = lambda x: 1.001 * gated(x)
    layer.self_attn.forward = lambda *given, **named: (attend(*given, **named)[0] / 2, None)
    assert fuse_layers(layer, kernels).num_modules == 1, "the other norm"
    assert layer.self_attn.q_proj is not None and layer.mlp.up_proj is not None


@pytest.mark.parametrize("name", ["gelu", "quick_gelu", "relu", "gelu_new", "silu"])
def test_an_activation_is_known_by_its_curve(
    kernels: PartKernels, name: str, dtype: torch.dtype
) -> None:
    """Near 0 they are alike, and in bfloat16 everywhere."""
    layer: Any = make_model("llama").requires_grad_(False).to(dtype).model.layers[0]
    layer.mlp.act_fn = ACT2FN[name]
    layer.mlp.gate_proj.weight *= 0.01
    fuse_layers(layer.mlp, kernels)
    assert hasattr(layer.mlp, "gate_up_proj") == (name in ("gelu_new", "silu"))


def test_a_norm_with_a_few_large_weights_keeps_its_1(kernels: PartKernels) -> None:
    norm: Any = make_model("gemma").requires_grad_(False).to(torch.bfloat16).model.norm
    norm.weight[:2] = 200.0
    x = torch.randn(1, 3, len(norm.weight)).to(torch.bfloat16)
    own = norm(x)
    assert fuse_layers(norm, kernels).num_modules == 1
    torch.testing.assert_close(norm(x), own, rtol=0.02, atol=0.01)


def test_what_is_of_another_form_does_not_end_the_load(kernels: PartKernels) -> None:
    model: Any = make_model("llama").requires_grad_(False)
    first, second, third = model.model.layers
    del first.mlp.act_fn
    second.input_layernorm.weight = nn.Parameter(torch.ones(3, 3), requires_grad=False)
    third.self_attn.forward = lambda *given, **named: [][0]
    assert fuse_layers(third.self_attn, kernels).num_modules == 0
    fused = fuse_layers(model, kernels)
    assert fused.num_modules == FUSED["llama"] - 2 - 3, "no layer: the first fails"
    assert not fused.failures, "the modules are of another form; no kernel is to blame"


def test_what_cannot_be_joined_for_want_of_memory_is_left(
    kernels: PartKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = make_model("llama").requires_grad_(False)
    join, asked = fused_layers._join, []

    def join_some(layers: list[nn.Linear]) -> nn.Linear:
        asked.append(len(layers))
        if len(asked) == 3:  # q, k and v of the second layer
            raise torch.OutOfMemoryError("CUDA out of memory")
        return join(layers)

    monkeypatch.setattr(fused_layers, "_join", join_some)
    ids = torch.randint(5, 200, (1, 21))
    own = model(input_ids=ids).logits
    assert fuse_layers(model, kernels).num_modules == FUSED["llama"] - 2, "attention, and its layer"
    torch.testing.assert_close(model(input_ids=ids).logits, own, rtol=0, atol=1e-5)
    monkeypatch.setattr(fused_layers, "_join", lambda layers: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fuse_layers(make_model("llama").requires_grad_(False), kernels)


def test_old_weights_go_layer_by_layer(
    kernels: PartKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = make_model("llama").requires_grad_(False)
    old = [weakref.ref(layer.self_attn.q_proj.weight) for layer in model.model.layers]
    alive, join = [], fused_layers._join

    def watch(layers: list[nn.Linear]) -> nn.Linear:
        gc.collect()
        alive.append(sum(ref() is not None for ref in old))
        return join(layers)

    monkeypatch.setattr(fused_layers, "_join", watch)
    fuse_layers(model, kernels)
    assert alive == [3, 2, 2, 1, 1, 0], "before q, k and v, and before gate and up, of each layer"


class OneBitOff(LayerKernels):
    """Kernels whose sum and norm in one differ from the norm alone as two Triton variants may."""

    step = 0  # units in the last place by which every number of the norm is off

    def add_and_norm(
        self, x: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, eps: float, offset: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        both = x + other
        normed = self.rms_norm(both, weight, eps, offset)
        for _ in range(self.step):
            normed = torch.nextafter(normed, torch.full_like(normed, torch.inf))
        return both, normed


@needs_compiler
def test_a_sum_and_norm_may_be_rounded_otherwise() -> None:
    """A layer was fused only if it was equal to the last bit.

    A GPU's compiler may contract products and sums of two variants of a kernel differently; then
    every layer was left as it was, and nobody was told.
    """
    kernels = OneBitOff(built_library())
    for step, missing in ((1, 0), (4000, 3)):  # 4,000 units are 5e-4
        kernels.step = step
        fused = fuse_layers(make_model("llama").requires_grad_(False), kernels)
        assert fused.num_modules == FUSED["llama"] - missing


@needs_compiler
def test_a_kernel_that_fails_in_a_module_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was raised while a module was tried, ours as well, left it as it was in silence."""
    kernels = LayerKernels(built_library())

    def fail(*given: object) -> None:
        raise RuntimeError("a kernel image is not there")

    monkeypatch.setattr(kernels, "rotate", fail)
    fused = fuse_layers(make_model("llama").requires_grad_(False), kernels)
    assert fused.num_modules == FUSED["llama"] - 3 - 3, "attention, and the layers"
    assert str(fused.failures["LlamaAttention"]) == "a kernel image is not there"
    monkeypatch.setattr(kernels, "gelu", fail)
    assert list(fuse_layers(make_model("bloom"), kernels).failures) == ["BloomGelu"]


class SmallSteps(nn.Module):
    """A layer that adds half of what its MLP gives, of which a wide tolerance sees nothing."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = layer.input_layernorm, layer.self_attn
        self.post_attention_layernorm, self.mlp = layer.post_attention_layernorm, layer.mlp

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        both = hidden_states + attended
        out: torch.Tensor = both + 0.5 * self.mlp(self.post_attention_layernorm(both))
        return out


def test_a_layer_that_adds_otherwise_is_left(kernels: PartKernels) -> None:
    layer = SmallSteps(make_model("llama").requires_grad_(False).model.layers[0])
    layer.mlp.down_proj.weight *= 1e-4
    num_fused = fuse_layers(layer, kernels).num_modules
    assert num_fused == 4, "its norms, attention and MLP, but not itself"


def test_each_layer_is_told_its_own_window(kernels: PartKernels) -> None:
    """Layers of one class differ in settings: each kind is looked at."""
    model: Any = make_model("gemma2").requires_grad_(False)
    fuse_layers(model, kernels)
    windows = []

    def record(*tensors: torch.Tensor, **how: Any) -> tuple[torch.Tensor, None]:
        windows.append(how["sliding_window"])
        return tensors[1].transpose(1, 2), None

    AttentionInterface.register("recorder", record)
    model.config._attn_implementation = "recorder"
    model(input_ids=torch.tensor([[1, 2, 3]]))
    window = model.config.sliding_window
    assert windows == [window, None, window]
