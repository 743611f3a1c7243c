"""Streamed layers: the answers of the whole model, and no wrong ones when a disk fails."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

import fminfer
from fminfer.core.errors import MachineError, UsageError
from fminfer.engine import stats
from fminfer.forward import layer_stream
from fminfer.forward.layer import TransformerLayer
from fminfer.models.stored import direct_reads
from fminfer.models.stored.direct_reads import (
    PIECE,
    DirectReads,
    LentBuffer,
    Span,
    buffer_size_of,
    merge_spans,
    read_file_stamp,
    wait_for_reads,
)
from fminfer.plan import streaming
from tests.conftest import (
    STORED,
    in_turns,
    make_model,
    more,
    run_files,
    save_byte_tokenizer,
    some_families,
)
from tests.encoder_families import make_encoder, save
from tests.forked import Forked, run_forked
from tests.forward.test_stages import check_same
from tests.gguf_building import SAMPLES
from tests.sequence_models import save_sequence_model
from tests.shard_threads import cut_engine

SMALL = {"dtype": "float32", "block_size": 16, "budget": 1024, "chunk_size": 24}
NUM_LAYERS = 3  # more than slots
assert NUM_LAYERS > layer_stream.SLOTS


@pytest.fixture
def num_brought(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Count the layers that are streamed."""
    counts = {"layers": 0}
    bring = layer_stream.LayerStream._start_reading

    def counted(*given: Any, **how: Any) -> layer_stream.Slot:
        counts["layers"] += 1
        return bring(*given, **how)

    monkeypatch.setattr(layer_stream.LayerStream, "_start_reading", counted)
    yield counts


def answers(engine: fminfer.Engine) -> list[dict[str, Any]]:
    """Answer rows whose prompts are cut in chunks, scored, and drawn from."""
    requests: list[dict[str, Any]] = [
        {"prompt": [*range(3, 40)], "temperature": 0, "logprobs": 2},
        {"prompt": [*range(3, 12)], "temperature": 0, "logprobs": 2, "echo": True},
        {
            "prompt": [9, 4, 7],
            "temperature": 0.9,
            "top_p": 0.9,
            "seed": 4,
            "logprobs": 1,
        },
    ]
    for each in requests:
        ids = [number % engine.vocab_size for number in each["prompt"]]
        each |= {"prompt": ids, "max_tokens": 5, "ignore_eos": True}
    records = sorted(engine.run(requests), key=lambda record: record.line.number)
    engine.close()
    assert not [record.error for record in records if record.error]
    return [record.to_dict()["result"] for record in records]


def check_streamed(
    folder: Path | str, *, make: Any = fminfer.Engine, **options: Any
) -> None:
    """Check that layers from the disk give the answers of the whole model, draws included."""
    options = SMALL | options
    whole = answers(fminfer.Engine(str(folder), **options))
    check_same(answers(make(str(folder), offload="disk", **options)), whole)


def save_model(name: str, folder: Path) -> Path:
    make_model(name).save_pretrained(folder)
    save_byte_tokenizer(folder)
    return folder


@pytest.mark.parametrize("name", some_families(STORED))
def test_streamed_answers_equal_those_of_the_whole_model(
    name: str, tmp_path: Path, num_brought: dict[str, int]
) -> None:
    check_streamed(save_model(name, tmp_path))
    assert num_brought["layers"] >= 6 * NUM_LAYERS  # in each pass anew


TYPES: dict[str, dict[str, Any]] = {
    "plain": {"kernels": "off"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
}


@pytest.mark.parametrize(("name", "kind"), in_turns(TYPES))
def test_streamed_answers_in_other_types(name: str, kind: str, tmp_path: Path) -> None:
    check_streamed(save_model(name, tmp_path), **TYPES[kind])


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama", (2, 1)),
        ("bloom", (1, 2)),
        ("mixtral", (2, 1)),
        *(pytest.param(name, (1, 2), marks=more) for name in ("llama", "mixtral")),
        pytest.param("bloom", (2, 1), marks=more),
    ],
)
def test_ranks_stream_their_parts(
    name: str, sizes: tuple[int, int], tmp_path: Path
) -> None:
    def make(folder: str, **options: Any) -> fminfer.Engine:
        return cut_engine(folder, *sizes, **options)

    check_streamed(save_model(name, tmp_path), make=make)


@pytest.mark.parametrize("name", ["kforms-q4_k_m", "gpt_oss-mxfp4_moe", "llama"])
def test_gguf_files_stream(name: str) -> None:
    check_streamed(SAMPLES / f"{name}.gguf")


def test_an_encoder_and_a_decoder_share_their_slots(tmp_path: Path) -> None:
    save_sequence_model("t5", tmp_path)
    requests = [
        {"prompt": f"translate {n}", "max_tokens": 5, "logprobs": 1} for n in range(6)
    ]
    found = []
    for offload in ("off", "disk"):
        with fminfer.Engine(str(tmp_path), dtype="float32", offload=offload) as engine:
            found.append(
                [
                    record.to_dict()["result"]["choices"]
                    for record in engine.run(requests)
                ]
            )
    assert found[0] == found[1]


def test_vectors_of_streamed_layers(tmp_path: Path) -> None:
    folder = save(make_encoder("bert"), tmp_path)
    found = []
    for offload in ("off", "disk"):
        options: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True}
        with fminfer.Engine(str(folder), offload=offload, **options) as engine:
            records = engine.run([{"input": [5, 6, 7, 8]}, {"input": [9, 4]}])
            found.append([record.to_dict()["result"]["data"] for record in records])
    assert found[0] == found[1]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_some_layers_stay(
    count: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_brought: dict[str, int],
) -> None:
    monkeypatch.setattr(streaming, "_count_streamed", lambda plan, rank: count)
    check_streamed(save_model("llama", tmp_path))
    is_read_again = count > layer_stream.SLOTS
    assert (num_brought["layers"] > 2 * count) == is_read_again


def test_it_computes_thousands_of_tokens_at_once(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    rows = [
        {"prompt": [n % 200 + 3, n // 200], "max_tokens": 2, "seed": n}
        for n in range(600)
    ]
    with fminfer.Engine(str(tmp_path), dtype="float32", offload="disk") as engine:
        assert not [record.error for record in engine.run(rows, 600) if record.error]
        # as many as a CPU's step has otherwise
        assert engine.stats.max_rows_running > 256
        assert engine.stats.num_steps <= 3


def num_direct() -> int:
    """Return how many files this process has open for direct reads."""
    count = 0
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            count += bool(fcntl.fcntl(number, fcntl.F_GETFL) & os.O_DIRECT)
    return count


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="a system without direct reads")
def test_a_closed_engine_leaves_no_files_open(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    before = num_direct()  # of other tests
    with fminfer.Engine(str(tmp_path), **SMALL, offload="disk") as engine:
        list(engine.run([{"prompt": [5, 6, 7], "max_tokens": 2}]))
        assert num_direct() > before
    assert num_direct() == before


def test_an_engine_that_is_closed_twice_closes_no_file_of_others(
    tmp_path: Path,
) -> None:
    save_model("llama", tmp_path)
    engine = fminfer.Engine(str(tmp_path), **SMALL, offload="disk")
    engine.close()
    with ExitStack() as stack:
        others = [
            stack.enter_context((tmp_path / "config.json").open()) for _ in range(9)
        ]
        engine.close()
        for other in others:
            assert json.load(other)


def test_a_layer_is_gone_before_the_next_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Converted weights take memory only once."""
    save_model("llama", tmp_path)
    how: dict[str, Any] = {**SMALL, "offload": "disk", "kernels": "off"}
    layers: weakref.WeakSet[TransformerLayer] = weakref.WeakSet()
    counts = []
    make = TransformerLayer.__init__

    def count(layer: TransformerLayer, *given: Any) -> None:
        make(layer, *given)
        layers.add(layer)
        counts.append(len(layers))

    with fminfer.Engine(str(tmp_path), **how) as engine:
        monkeypatch.setattr(TransformerLayer, "__init__", count)
        list(engine.run([{"prompt": [5, 6, 7], "max_tokens": 4}]))
    assert counts == [1] * len(counts) and len(counts) >= 4 * NUM_LAYERS


def test_a_head_that_is_stored_beside_its_embedding_counts_once(tmp_path: Path) -> None:
    """The reported bytes of weights are the same, with and without streaming."""
    save_model("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {
        "tie_word_embeddings": True
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    sizes = []
    for offload in ("off", "disk"):
        with fminfer.Engine(str(tmp_path), **SMALL, offload=offload) as engine:
            sizes.append(engine.facts.measured.weight_bytes)
    assert sizes[0] == sizes[1]


def test_random_weights_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="random weights have none"):
        fminfer.Engine(
            random_init="llama-160m", offload="disk", skip_tokenizer_init=True
        )


def test_a_cpu_has_no_other_memory_for_layers() -> None:
    with pytest.raises(UsageError, match="Use --offload disk, or auto"):
        fminfer.Engine(offload="cpu", device="cpu")


def test_auto_keeps_what_fits() -> None:
    with fminfer.Engine(offload="auto", device="cpu") as engine:
        assert engine.facts.streaming == ""


# What goes wrong with files.


def write_at(file: Path, place: int, data: bytes) -> None:
    with file.open("r+b") as stream:
        stream.seek(place)
        stream.write(data)


def cut_off(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def change(file: Path) -> None:
    write_at(file, file.stat().st_size - 4096, bytes(64))


@pytest.mark.parametrize(
    ("damage", "told"), [(cut_off, "was changed|was cut off"), (change, "was changed")]
)
def test_a_file_that_changes_ends_the_run(
    damage: Any, told: str, tmp_path: Path, num_brought: dict[str, int]
) -> None:
    """No row gets an error, and no answer comes from changed weights."""
    save_model("llama", tmp_path)
    request = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "logprobs": 1}
    engine = fminfer.Engine(str(tmp_path), **SMALL, offload="disk")
    first = next(iter(engine.run([request])))
    damage(tmp_path / "model.safetensors")
    with pytest.raises(MachineError, match=told):
        list(engine.run([request | {"prompt": [8, 9, 10]}]))
    assert first.error is None
    engine.close()


def test_a_disk_that_fails_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model("llama", tmp_path)
    engine = fminfer.Engine(str(tmp_path), **SMALL, offload="disk")

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(
        MachineError, match=r"model\.safetensors cannot be read \(Input/output"
    ):
        list(engine.run([{"prompt": [5, 6, 7], "max_tokens": 9}]))
    engine.close()


@pytest.mark.parametrize("slow", [range(0), range(18, 25)])
def test_a_disk_that_slows_is_told(
    slow: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model("llama", tmp_path)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": [5, 6, 7], "max_tokens": 16, "ignore_eos": true}\n')
    read = direct_reads.OpenFile.read
    num_reads = itertools.count()
    clock_s = [0.0]

    def read_in(*asked: Any) -> None:
        clock_s[0] += 10.0 if next(num_reads) in slow else 1.0
        read(*asked)

    with fminfer.Engine(str(tmp_path), **SMALL, offload="disk") as engine:
        monkeypatch.setattr(direct_reads.OpenFile, "read", read_in)
        monkeypatch.setattr(
            direct_reads, "time", SimpleNamespace(monotonic=lambda: clock_s[0])
        )
        # of a small model a pass reads little
        monkeypatch.setattr(stats, "MUCH_READ", 1)
        summary = run_files(engine, [rows], [tmp_path / "out.jsonl"])
    summary.device = "cpu"  # the command's part
    told = summary.to_text()
    assert "it waited for layers" in told
    assert ("the disk of stage 0 was slow at times" in told) == bool(slow)


def test_a_file_that_another_replaces_is_read_on(tmp_path: Path) -> None:
    """The open file has the bytes of the answers so far."""
    save_model("llama", tmp_path)
    request = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "logprobs": 1}
    with fminfer.Engine(
        str(tmp_path), **SMALL, offload="disk", prefix_cache=False
    ) as engine:
        first = next(iter(engine.run([request]))).to_dict()["result"]["choices"]
        other = tmp_path / "other.safetensors"
        other.write_bytes(bytes(1000))
        os.replace(other, tmp_path / "model.safetensors")
        assert next(iter(engine.run([request]))).to_dict()["result"]["choices"] == first


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    """kill -9, then the same command: every row once, equal to those of the whole model."""
    model = save_model("llama", tmp_path / "model")
    file = tmp_path / "rows.jsonl"
    row = {"max_tokens": 12, "temperature": 0.7, "ignore_eos": True}
    lines = [{"prompt": [n % 90 + 3, n // 90], "seed": n} | row for n in range(200)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def command(name: str, *more: str) -> list[str]:
        options = ["--dtype", "float32", "--output", str(tmp_path / name), "-q", *more]
        return ["run", str(file), "--model-name", str(model), *options]

    few = ("--offload", "disk", "--max-rows", "16")
    run = Forked(command("out.jsonl", *few))
    until = time.monotonic() + 60
    while time.monotonic() < until and run.poll() is None:
        if sum(each.stat().st_size for each in tmp_path.glob("*out*journal*")) > 20_000:
            break
        time.sleep(0.01)
    run.kill()
    assert run.wait() == -signal.SIGKILL
    assert run_forked(command("out.jsonl", *few)).returncode == 0
    assert run_forked(command("whole.jsonl")).returncode == 0
    found, whole = (
        [json.loads(line)["result"]["choices"] for line in (tmp_path / name).open()]
        for name in ("out.jsonl", "whole.jsonl")
    )
    assert len(found) == 200 and found == whole


# The reader by itself.


def read_all(spans: list[Span], wholes: list[Span] | None = None) -> LentBuffer:
    places = merge_spans(wholes or spans)
    lent = LentBuffer(
        places,
        layer_stream._allocate_buffer(buffer_size_of(places), torch.device("cpu")),
    )
    reads = DirectReads({span.file: None for span in spans})
    wait_for_reads(reads.start(lent, merge_spans(spans)))
    reads.close()
    return lent


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 100_000, (8 << 20) + 5])
def test_spans_are_read_wherever_they_lie(size: int, tmp_path: Path) -> None:
    file = tmp_path / "file"
    data = torch.randint(256, (size,), dtype=torch.uint8)
    file.write_bytes(data.numpy().tobytes())
    for first, last in ((0, size), (size // 3, size), (size // 3, size // 2 + 1)):
        span = Span(file, first, last)
        assert torch.equal(read_all([span]).find_bytes(span), data[first:last])


def test_parts_of_a_tensor_lie_where_they_would_in_it(tmp_path: Path) -> None:
    file = tmp_path / "file"
    data = torch.randint(256, (1 << 20,), dtype=torch.uint8)
    file.write_bytes(data.numpy().tobytes())
    whole = Span(file, 100, 1 << 20)
    parts = [Span(file, 5000, 9000), Span(file, 500_000, 600_000)]
    found = read_all(parts, [whole]).find_bytes(whole)
    for part in parts:
        own = slice(part.first - 100, part.last - 100)
        assert torch.equal(found[own], data[part.first : part.last])
    assert not found[200_000:300_000].any()  # it was not read


@pytest.mark.parametrize("at_once", [True, False])
def test_it_reads_where_a_file_system_cannot_directly(
    at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems refuse a direct open, others each direct read."""
    file = tmp_path / "file"
    file.write_bytes(b"weights" * 1000)
    opened = os.open
    read = os.preadv
    direct = getattr(os, "O_DIRECT", 0)

    def open_file(path: Any, flags: int, *more: Any) -> int:
        if at_once and flags & direct:
            raise OSError(errno.EINVAL, "no direct reads here")
        return opened(path, flags, *more)

    def read_file(number: int, *more: Any) -> int:
        if fcntl.fcntl(number, fcntl.F_GETFL) & direct:
            raise OSError(errno.EINVAL, "no direct reads here")
        return read(number, *more)

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(os, "preadv", read_file)
    span = Span(file, 7, 14)
    assert bytes(read_all([span]).find_bytes(span).tolist()) == b"weights"


def test_a_file_that_a_server_has_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size cannot be read either."""
    file = tmp_path / "file"
    file.write_bytes(b"weights")
    reads = DirectReads({file: None})
    spans = [Span(file, 0, 7)]

    def lose(*_: Any) -> os.stat_result:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    lent = LentBuffer(
        spans, layer_stream._allocate_buffer(buffer_size_of(spans), torch.device("cpu"))
    )
    with (
        monkeypatch.context() as patch,
        pytest.raises(MachineError, match="Stale file handle"),
    ):
        patch.setattr(direct_reads, "read_file_stamp", lose)
        wait_for_reads(reads.start(lent, spans))
    reads.close()


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="a system without direct reads")
def test_pieces_are_read_at_once_where_direct_reads_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When each thread found that out, the second took it for a failing disk."""
    file = tmp_path / "file"
    file.write_bytes(b"weights " * (2 * PIECE // 8))
    read = os.preadv
    both = threading.Barrier(2)

    def read_file(number: int, *more: Any) -> int:
        if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct reads here")
        both.wait(20)  # each of the two pieces
        return read(number, *more)

    monkeypatch.setattr(os, "preadv", read_file)
    span = Span(file, 0, 2 * PIECE)
    assert bytes(read_all([span]).find_bytes(span).tolist()) == file.read_bytes()


# A GPU's layers, with a GPU that is not there: what is copied, waited for, and left.


class PretendGpu:
    """Takes the calls that layers on a GPU make of CUDA."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pinned: set[int] = set()
        self.calls: list[str] = []
        for name, found in {
            "Stream": lambda device: self,
            "stream": lambda stream: nullcontext(),
            "current_stream": lambda device: self,
            "cudart": lambda: self,
        }.items():
            monkeypatch.setattr(torch.cuda, name, found)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.pinned.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> None:
        self.pinned.remove(address)

    def synchronize(self) -> None:
        self.calls.append("copied")

    def record_event(self) -> Any:
        number = self.calls.count("given")
        self.calls.append("given")
        return SimpleNamespace(synchronize=lambda: self.calls.append(f"{number} done"))


class NumberedLayers:
    """Gives layers whose bytes are their numbers."""

    device = SimpleNamespace(type="cuda")
    streamed = range(4)

    def __init__(self, folder: Path) -> None:
        self._files = [folder / str(number) for number in self.streamed]
        for number, file in enumerate(self._files):
            file.write_bytes(bytes([number]) * (1000 + number))
        self.files = SimpleNamespace(
            seen={file: read_file_stamp(file) for file in self._files}
        )

    def find_spans(self, number: int) -> tuple[list[Span], list[Span]]:
        spans = [Span(self._files[number], 0, 1000 + number)]
        return spans, spans

    def load_layer(self, number: int, lent: LentBuffer) -> list[int]:
        return lent.find_bytes(self.find_spans(number)[0][0]).tolist()


@pytest.mark.parametrize(("kind", "num_slots"), [("own memory", 4), ("disk", 2)])
def test_a_gpu_has_two_layers_at_once(
    kind: Any, num_slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = PretendGpu(monkeypatch)
    source = cast(Any, NumberedLayers(tmp_path))
    stream = layer_stream.LayerStream(
        source, lambda number, weights: cast(Any, weights), kind
    )
    assert len(gpu.pinned) == num_slots
    for _ in range(3):
        for number in range(4):
            with stream.layer(number, (number + 1) % 4) as layer:
                assert layer == [number] * (1000 + number)
    # the layer before the last one was done before it was copied
    for number in range(2, 12):
        place = [n for n, call in enumerate(gpu.calls) if call == "copied"][number]
        assert gpu.calls[place - 1 : place + 2] == [
            f"{number - 2} done",
            "copied",
            "given",
        ]
    stream.close()
    assert not gpu.pinned
