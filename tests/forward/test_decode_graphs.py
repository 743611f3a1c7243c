"""Decode steps as graphs: what is captured may read nothing of the device, and padding
changes no number. A recorder stands for CUDA: its replay does the work once more, on
the same tensors.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

import fminfer
from fminfer.compute.attention import triton_attention
from fminfer.compute.attention.kv_cache import KvCache
from fminfer.compute.attention.paged_attention import attend_chunk
from fminfer.compute.attention.scoring import AttentionCall
from fminfer.compute.attention.triton_attention import TritonAttention
from fminfer.compute.layers import triton_layers
from fminfer.compute.layers.bodies import PartKernels, Parts
from fminfer.compute.layers.triton_layers import TritonPartKernels
from fminfer.compute.trial import explain_failure
from fminfer.compute.values.spec import Moe
from fminfer.compute.values.step import Rows, Step
from fminfer.compute.values.weights import Function, Weight
from fminfer.core.config import EngineConfig
from fminfer.core.errors import UsageError
from fminfer.core.partition import Part
from fminfer.forward.decode_graphs import (
    CudaCapture,
    DecodeGraphs,
    Work,
    can_capture,
    choose_graph_sizes,
    choose_graphs,
)
from fminfer.forward.layer_step import LayerStep, PartBuilder
from fminfer.forward.registry import Registry
from fminfer.forward.stage import Stage, StageKernels
from fminfer.forward.transformer import Transformer
from fminfer.models.checkpoint import open_model, open_random_checkpoint
from fminfer.models.holding import Holding
from fminfer.models.layer_source import open_weights
from fminfer.plan.planning import plan_ahead
from fminfer.runtime.load import builder
from fminfer.runtime.load.builder import LoadedPart
from tests.conftest import SOME, family_config, some_families
from tests.steps import Row, make_draws, make_step

CPU = torch.device("cpu")
BLOCK = 4
BLOCKS = 40
MAX_ROWS = 12
interpreted = pytest.mark.usefixtures("interpreter")


class Recorder:
    """Runs work once, and what it returns runs it again."""

    def __init__(self, device: torch.device) -> None:
        assert device == CPU

    def __call__(self, work: Work) -> Work:
        work()
        return work


class RowByRow(Registry):
    """Makes products whose rows are computed alone, for libraries round by the number
    of rows."""

    def choose_product(self, weight: Weight, bias: torch.Tensor | None) -> Function:
        product = super().choose_product(weight, bias)
        return lambda x: torch.cat([product(row) for row in x.split(1)])


class TilesInTorch(TritonAttention):
    """The GPU's attention in plain torch, tile by tile; the interpreter takes minutes."""

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        query = call.query
        keys = call.keys
        values = call.values
        how = call.scoring
        new_keys = call.new_keys
        new_values = call.new_values
        rows = call.layout
        size = keys.shape[2]
        out = torch.empty_like(query.transpose(1, 2))
        for token, slot in enumerate(rows.slots.tolist()):
            if slot >= 0:
                keys[slot // size, :, slot % size] = new_keys[0, :, token]
                values[slot // size, :, slot % size] = new_values[0, :, token]
        for first, num, position, table, _ in [
            *rows.prompt_tiles.tolist(),
            *rows.decode_tiles.tolist(),
        ]:
            end = position + num
            blocks = rows.blocks[table : table + -(-end // size)].long()
            seen = (
                c[blocks].transpose(0, 1).flatten(1, 2)[:, :end] for c in (keys, values)
            )
            if num:
                tile = query[0, :, first : first + num]
                out[0, first : first + num] = attend_chunk(tile, *seen, position, how)
        return out


def make_network(
    family: str,
    folder: Path,
    part: Part | None = None,
    parts: PartKernels | None = None,
    kind: type[TritonAttention] = TilesInTorch,
) -> tuple[Transformer, TritonAttention]:
    """Return a family's layers with random weights, and the GPU's attention."""
    family_config(family).save_pretrained(folder)
    checkpoint = open_random_checkpoint(str(folder))
    model = checkpoint.model
    part = part or Part(0, 1, 0, len(model.layers))
    source = open_weights(
        checkpoint, part, holding=Holding(torch.float32), device=CPU, seed=1
    )
    registry = RowByRow("off", None, torch.float32, CPU)
    registry.of_products.clear()
    registry.parts = Parts(parts)
    bodies = PartBuilder(registry, checkpoint.context_length)
    network = Transformer(model, source, builder=bodies)
    how = model.layers[0].attention
    kernel = kind(how.heads, *how.cache_shape[1:], dtype=torch.float32, device=CPU)
    return network, kernel


def make_stage(network: Transformer, kernel: TritonAttention, **how: Any) -> Stage:
    how = {"max_rows": MAX_ROWS, "capture": Recorder, "explain": raised} | how
    graphs = partial(DecodeGraphs, network, kernel=kernel, **how)
    kernels = StageKernels(kernel, graphs=graphs)
    return Stage(network, make_cache(network, kernel), kernels)


def make_cache(network: Transformer, kernel: TritonAttention | None) -> KvCache:
    return KvCache(
        [layer.attention for layer in network.layer_specs],
        num_blocks=BLOCKS,
        block_size=BLOCK,
        dtype=torch.float32,
        device=CPU,
        kernel=kernel,
    )


def raised(error: BaseException) -> str:
    raise error


def steps_of(rng: random.Random) -> list[Step]:
    """Return prompts, and decode steps of some of their rows, whose tables grow and change."""
    tables = [rng.sample(range(BLOCKS), 3) for _ in range(4)]
    lengths = [5, 1, 4, 7]
    steps = [
        make_step(
            [Row([*range(n)], 0, t) for n, t in zip(lengths, tables, strict=True)]
        )
    ]
    for places in ([0], [2, 1, 3], [0, 1, 2, 3], [3, 0, 1], [1]):
        rows = [
            Row([rng.randrange(300)], lengths[each], tables[each]) for each in places
        ]
        steps.append(make_step(rows))
        for each in places:
            lengths[each] += 1
    moved = tables[1][0], 39  # as a shared block is copied before it is written
    tables[1] = [39, *tables[1][1:]]
    rows = [Row([7], lengths[1], tables[1]), Row([8], lengths[0], tables[0])]
    return [*steps, make_step(rows, block_copies=np.array([moved]))]


# Windows, caps, ALiBi in two forms, both branches at once, learned positions.
DENSE = (
    "llama",
    "gemma2",
    "qwen2-window",
    "bloom",
    "falcon-alibi",
    "gptj",
    "gpt2-inverse",
)
NOT_BY_ROWS = ("opt", "youtu")  # have products that RowByRow does not make


@pytest.mark.parametrize("family", [*DENSE, *NOT_BY_ROWS])
def test_padded_steps_give_the_same_numbers(family: str, tmp_path: Path) -> None:
    check_padded_steps(*make_network(family, tmp_path), is_exact=family in DENSE)


@interpreted
def test_padded_steps_of_the_kernels(tmp_path: Path) -> None:
    part = Part(0, 1, 0, 1)
    check_padded_steps(*make_network("llama", tmp_path, part, kind=TritonAttention))


@torch.inference_mode()
def check_padded_steps(
    network: Transformer, kernel: TritonAttention, *, is_exact: bool = True
) -> None:
    found, expected = (make_stage(network, kernel) for _ in range(2))
    expected.graphs = None
    assert found.graphs is not None
    sizes = []
    for step in steps_of(random.Random(3)):
        before = len(found.graphs.graphs)
        pair = found.forward(step, None), expected.forward(step, None)
        assert torch.equal(*pair) or (not is_exact and torch.allclose(*pair, atol=1e-5))
        sizes.append(len(found.graphs.graphs) - before)
    assert sizes == [0, 1, 1, 0, 0, 0, 1], (
        "graphs of 1, 4 and 2 rows, each captured once"
    )
    assert len(found.run(make_step([Row([9], 0, [1])])).logprobs_of("tokens")) == 1


@torch.inference_mode()
def test_other_stages_take_hidden_states(tmp_path: Path) -> None:
    network, kernel = make_network("llama", tmp_path, Part(1, 3, 1, 2))
    found, expected = (make_stage(network, kernel) for _ in range(2))
    expected.graphs = None
    for step in steps_of(random.Random(4)):
        hidden = torch.randn(step.num_tokens, network.model.hidden_size)
        assert torch.equal(found.forward(step, hidden), expected.forward(step, hidden))
    assert found.graphs is not None and len(found.graphs.graphs) == 3


@torch.inference_mode()
def test_steps_that_no_graph_computes(tmp_path: Path) -> None:
    """Chunks, more rows than expected, tables without room, and what is not wanted of
    all rows."""
    network, kernel = make_network("llama", tmp_path)
    stage = make_stage(network, kernel, max_rows=2)
    rows = Rows.from_tables(*((0, 1, [each]) for each in range(3)))
    ids = np.arange(3)
    assert stage.graphs is not None
    assert stage.graphs.run(rows, ids, None) is None
    assert stage.graphs.run(Rows.from_tables((0, 2, [0])), ids[:2], None) is None
    stage.graphs._inputs = stage.graphs._inputs[:8]
    assert stage.graphs.run(rows.select(slice(1)), ids[:1], None) is None
    step = make_step(
        [Row([each], 0, [each]) for each in range(2)], draws=make_draws([0])
    )
    assert stage.forward(step, None).shape == (1, network.model.hidden_size)
    assert not stage.graphs.graphs


def test_warming_up_writes_no_keys(tmp_path: Path) -> None:
    """A padded row would store its key in block 0, which may be another row's."""
    network, kernel = make_network("llama", tmp_path)
    stage = make_stage(network, kernel)
    assert stage.graphs is not None
    stage.cache._kv.fill_(7.0)
    stage.graphs.warm_up()
    assert [*stage.graphs.graphs] == [MAX_ROWS]
    assert (stage.cache._kv == 7.0).all()


class Failing(Recorder):
    error: Exception = RuntimeError("operation not permitted when stream is capturing")

    def __call__(self, work: Work) -> Work:
        raise self.error


class WithoutMemory(Failing):
    error = torch.OutOfMemoryError("CUDA out of memory")


@torch.inference_mode()
def test_what_cannot_be_captured_is_launched(tmp_path: Path) -> None:
    """Without memory only the graphs of that size are left out; otherwise all, and it
    is told."""
    network, kernel = make_network("llama", tmp_path)
    explain = partial(explain_failure, "auto", "CUDA graphs")
    step = make_step([Row([5], 0, [0])])
    expected = make_stage(network, kernel).forward(step, None)
    for capture, is_told in ((WithoutMemory, False), (Failing, True)):
        stage = make_stage(network, kernel, capture=capture, explain=explain)
        assert torch.equal(stage.forward(step, None), expected)
        assert stage.graphs is not None
        assert ("stream is capturing" in stage.graphs.why_not) == is_told
    required = partial(explain_failure, "require", "CUDA graphs")
    with pytest.raises(UsageError, match="require: CUDA graphs"):
        make_stage(network, kernel, capture=Failing, explain=required).forward(
            step, None
        )


class FakeCuda:
    """Notes what is asked of CUDA's streams and graphs."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.pools = itertools.count()

    def note(self, text: str) -> None:
        self.notes.append(text)

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        self.note(f"enter {name}")
        try:
            yield
        finally:
            self.note(f"leave {name}")

    def put(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def stream(name: str) -> Any:
            return SimpleNamespace(wait_stream=lambda other: self.note(f"{name} waits"))

        def graph(made: Any, pool: int, of: Any, *, capture_error_mode: str) -> Any:
            assert capture_error_mode == "thread_local" and of is not None
            return self.inside(f"graph in pool {pool}")

        made = SimpleNamespace(replay=lambda: self.note("replay"))
        fakes = {
            "Stream": lambda device: stream("side"),
            "current_stream": lambda device: stream("own"),
            "stream": lambda of: self.inside("stream"),
            "graph": graph,
            "CUDAGraph": lambda: made,
            "graph_pool_handle": lambda: next(self.pools),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)


def test_a_capture_runs_once_before_and_leaves_its_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels are compiled outside of a capture; what fails in one may not change the thread."""
    cuda = FakeCuda()
    cuda.put(monkeypatch)
    capture = CudaCapture(torch.device("cuda"))
    capture(lambda: cuda.note("work"))()
    before = ["side waits", "enter stream", "work"]
    inner = ["enter graph in pool 0", "work", "leave graph in pool 0", "leave stream"]
    assert cuda.notes == [*before, *inner, "own waits", "replay"]
    cuda.notes.clear()
    with pytest.raises(ZeroDivisionError):
        capture(lambda: cuda.note(str(1 // (len(cuda.notes) < 3))))
    assert cuda.notes[-2:] == ["leave graph in pool 0", "leave stream"]
    cuda.notes.clear()
    capture(lambda: None)
    assert "enter graph in pool 1" in cuda.notes, (
        "the first pool may be gone with its graph"
    )


def test_where_there_are_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silently none on a CPU, for plain attention and for experts, which are counted."""
    FakeCuda().put(monkeypatch)
    network, kernel = make_network("llama", tmp_path)
    gpu = torch.device("cuda")
    assert choose_graphs("require", network, kernel, 2, CPU) is None
    assert choose_graphs("require", network, None, 2, gpu) is None
    found = choose_graphs("require", network, kernel, 2, gpu)
    assert found is not None and found(make_stage(network, kernel).cache).why_not == ""
    mixture, _ = make_network("mixtral", tmp_path)
    assert choose_graphs("require", mixture, kernel, 2, gpu) is None


def test_a_failure_while_a_run_computes_is_told(
    llama_checkpoint: tuple[Path, Any],
) -> None:
    """Of what becomes slower, a run's figures say why."""
    engine = fminfer.Engine(
        str(llama_checkpoint[0]), device="cpu", kernels="off", budget=64
    )
    assert not engine.facts.measured.why_slower
    graphs: Any = SimpleNamespace(why_not="")
    engine.pipeline.graphs = graphs
    assert not engine.facts.measured.why_slower
    graphs.why_not = "CUDA graphs: no"
    assert (
        engine.facts.measured.why_slower
        == engine.facts.measured.why_plain
        == graphs.why_not
    )
    engine.close()


def test_a_failure_on_any_rank_is_told_at_the_start(
    llama_checkpoint: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only rank 0 looked at its own graphs."""

    def make(loaded: LoadedPart) -> Any:
        graphs = SimpleNamespace(why_not="CUDA graphs: no")
        return SimpleNamespace(graphs=graphs)

    config = EngineConfig(
        str(llama_checkpoint[0]), device="cpu", kernels="off", budget=64
    )
    monkeypatch.setattr(builder, "make_stage", make)
    # what a rank tells others
    why = builder.build(plan_ahead(config, open_model(config)))[2]
    assert why.plain == why.slower == "CUDA graphs: no"


@pytest.mark.parametrize(
    ("max_rows", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (20, [1, 2, 4, 8, 16, 20]),
        (64, [1, 2, 4, *range(8, 65, 8)]),
    ],
)
def test_sizes(max_rows: int, sizes: list[int]) -> None:
    assert choose_graph_sizes(max_rows) == sizes


def test_sizes_of_many_rows() -> None:
    sizes = choose_graph_sizes(1024)
    assert sizes[-1] == 1024 and len(sizes) == 35
    assert all(b - a <= max(8, b // 4) for a, b in itertools.pairwise(sizes))


# Those that wait for a device, or copy to it: a capture would fail, or a replay be wrong.
READS = {
    "_local_scalar_dense",
    "nonzero",
    "bincount",
    "unique_dim",
    "_unique2",
    "masked_select",
    "equal",
    "is_nonzero",
    "histc",
    "argwhere",
}
HOST = {
    "tolist",
    "item",
    "numpy",
    "cpu",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
}
MAKERS = {torch.tensor, torch.as_tensor, torch.from_numpy, torch.frombuffer}


class NoReads(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        assert name not in READS, f"{func} waits for the device"
        if name in ("index", "index_put", "index_put_"):
            assert not any(
                each is not None and each.dtype == torch.bool for each in args[1]
            ), func
        if name == "repeat_interleave":
            assert func._overloadname != "Tensor", func
        if name == "lift_fresh":  # a number goes with the launch, more are copied
            assert args[0].dim() == 0, "a tensor is made of the host's numbers"
        return func(*args, **(kwargs or {}))


class NoHost(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = (resolve_name(func) or "").rpartition(".")[2]
        assert name not in HOST, f"{name} waits for the device"
        assert func not in MAKERS or not isinstance(args[0], list | tuple), (
            f"{func} copies to it"
        )
        return func(*args, **(kwargs or {}))


class Watching(Recorder):
    """Captures as CUDA would refuse to: the work may not look at what it computes."""

    def __call__(self, work: Work) -> Work:
        work()
        with NoReads(), NoHost():
            work()
        return work


class Nothing:
    """A kernel that is launched, and does nothing: the interpreter would read its arguments."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(grid)
        return lambda *tensors, **sizes: None


def launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("store_kernel", "attend_kernel", "join_kernel"):
        monkeypatch.setattr(triton_attention, name, Nothing())
    for name in ("norm_kernel", "rotate_kernel", "gate_kernel"):
        monkeypatch.setattr(triton_layers, name, Nothing())


@torch.inference_mode()
def watch(family: str, folder: Path, *, captures_all: bool = False) -> bool:
    """Capture a family's step under watch, with the GPU's bodies; False: it is not captured."""
    parts = TritonPartKernels(CPU)
    network, kernel = make_network(family, folder, None, parts, TritonAttention)
    if not (captures_all or can_capture(network.layer_specs)):
        assert any(isinstance(layer.mlp, Moe) for layer in network.layer_specs)
        return False
    graphs = make_stage(network, kernel, capture=Watching).graphs
    assert graphs is not None
    rows = Rows.from_tables((6, 1, [2, 1]), (0, 1, [3]), (1, 1, [4]))
    return graphs.run(rows, np.array([5, 6, 7]), None) is not None


@pytest.mark.parametrize("family", some_families(SOME))
def test_no_family_looks_at_what_it_computes(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch_nothing(monkeypatch)
    watch(family, tmp_path)


def test_experts_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were they captured, the test above would say so."""
    launch_nothing(monkeypatch)
    assert not watch("mixtral", tmp_path)
    with pytest.raises(AssertionError, match="waits for the device"):
        watch("mixtral", tmp_path, captures_all=True)


@pytest.mark.parametrize("family", some_families(SOME))
@torch.inference_mode()
def test_nor_does_plain_torch(family: str, tmp_path: Path) -> None:
    """Attention in plain torch looked for blocks that a row sees in part, by `nonzero`."""
    network, _ = make_network(family, tmp_path)
    if not can_capture(network.layer_specs):
        return
    stage = Stage(network, make_cache(network, None))
    stage.cache._kv.zero_()
    attend = stage.cache.make_attention(
        Rows.from_tables((6, 1, [2, 1]), (0, 1, [3]), (1, 1, [4]))
    )
    ids = torch.tensor([5, 6, 7])
    positions = torch.tensor([6, 0, 1])
    with NoReads(), NoHost():
        found = network.run(network.embed(ids, positions), LayerStep(positions, attend))
    assert len(found) == 3 and found.isfinite().all()
