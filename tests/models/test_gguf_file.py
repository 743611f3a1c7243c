"""The reader of GGUF's headers, beside llama.cpp's own package and over broken files."""

from __future__ import annotations

import random
import shutil
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from fminfer.core.config import ModelOptions
from fminfer.core.errors import CheckpointError
from fminfer.core.partition import split_layers
from fminfer.models.checkpoint import open_checkpoint
from fminfer.models.config_fields import architecture_of
from fminfer.models.fingerprint import digest_weight_files
from fminfer.models.gguf.configs import config_of
from fminfer.models.gguf.gguf_model import gguf_architecture, read_gguf_model
from fminfer.models.known_sizes import DEMO_MODEL
from fminfer.models.model_folder import find_weight_files
from fminfer.models.origins import check_tensors
from fminfer.models.stored.gguf_file import TYPES, read_gguf
from fminfer.models.stored.stored_tensors import BLOCKS
from fminfer.models.stored.weight_folder import find_weights
from tests.conftest import num_examples
from tests.forward.test_transformer import logits_of
from tests.gguf_building import (
    ARRAY,
    BOOL,
    F32,
    SAMPLES,
    STRING,
    U32,
    U64,
    Keys,
    Tensors,
    build,
    copy,
    f32,
    read,
)

SOME = [
    "llama",
    "gemma",
    "mixtral",
    "kforms-q4_k_m",
    "legacy-q5_1",
    "deepseek_v2",
    "gpt_oss",
]
# A value of each kind, so that mutations meet each branch.
KEYS: dict[str, Any] = {
    "general.architecture": (STRING, "llama"),
    "general.alignment": (U32, 32),
    "tokenizer.ggml.tokens": (ARRAY, (STRING, ["a", "bc", "é", ""])),
    "tokenizer.ggml.scores": (ARRAY, (F32, [0.5, -1.0, 2.0])),
    "llama.block_count": (U32, 1),
    "llama.rope.freq_base": (F32, 10000.0),
    "llama.big": (U64, 1 << 40),
    "llama.flag": (BOOL, True),
    "xielu.beta": (ARRAY, (F32, [0.5])),  # values of layers, as tensors
    **{f"of.kind.{kind}": (kind, 1) for kind in (0, 1, 2, 3, 5, 11, 12)},
}
Q8 = gguf.quants.quantize(np.ones((2, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
TENSORS: dict[str, Any] = {
    "token_embd.weight": f32(np.ones((4, 8))),
    "blk.0.ffn_up_exps.weight": f32(np.ones((2, 3, 4))),
    "blk.0.ffn_up.weight": (8, (2, 64), Q8.tobytes()),
    "output_norm.weight": f32(np.ones(8)),
}


def logits(path: Path) -> torch.Tensor:
    num_layers = len(open_checkpoint(str(path)).model.layers)
    parts = split_layers(num_layers, 1, head_cost=0.0)
    return torch.cat(logits_of(path, parts, [[5, 6, 7, 8, 9, 3]]))


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_gguf(path)
    return str(caught.value)


@pytest.mark.parametrize("name", SOME)
def test_it_reads_what_llama_cpps_package_reads(name: str) -> None:
    path = SAMPLES / f"{name}.gguf"
    reader = gguf.GGUFReader(path)
    stored, metadata = read_gguf(path)
    theirs = {
        key: f.contents() for key, f in reader.fields.items() if key[:5] != "GGUF."
    }
    assert metadata.keys() == theirs.keys()
    for key, expected in theirs.items():
        found = metadata[key]
        assert found == expected or found == pytest.approx(expected, rel=1e-7)
    content = path.read_bytes()
    found = dict(stored.tensors)
    for tensor in reader.tensors:
        stem, _, leaf = tensor.name.rpartition(".")
        names = [n for n in (tensor.name,) if n in found]
        names = names or [f"{stem}.{n}.{leaf}" for n in range(int(tensor.shape[-1]))]
        parts = [found.pop(n) for n in names]
        assert {part.dtype for part in parts} == {tensor.tensor_type.name}
        values = b"".join(content[slice(*part.span)] for part in parts)
        assert values == tensor.data.tobytes()
        inner = tensor.data.shape if len(parts) == 1 else tensor.data.shape[1:]
        assert {part.shape for part in parts} == {inner}
    assert not found


def test_it_has_the_types_and_sizes_of_ggml() -> None:
    names = {int(each): each.name for each in gguf.GGMLQuantizationType}
    assert names.items() <= TYPES.items()
    sizes = {
        each.name: size for each, size in gguf.GGML_QUANT_SIZES.items() if size[0] > 1
    }
    assert sizes.items() <= BLOCKS.items()


def test_a_vocabulary_is_read_at_once(tmp_path: Path) -> None:
    """A list of strings took a second with numpy, string by string."""
    words = [f"word{n}" for n in range(49_000)]
    keys: Keys = {
        f"tokenizer.{n}": (ARRAY, (STRING, words)) for n in ("tokens", "merges")
    }
    keys["tokenizer.scores"] = (ARRAY, (F32, [float(n) for n in range(49_000)]))
    (path := tmp_path / "m.gguf").write_bytes(build(keys, TENSORS))
    times = []
    for _ in range(3):
        start = time.perf_counter()
        _, metadata = read_gguf(path)
        times.append(time.perf_counter() - start)
    assert metadata["tokenizer.tokens"] == words
    assert min(times) < 0.3


def test_version_2_is_read_as_3(tmp_path: Path) -> None:
    (path := tmp_path / "m.gguf").write_bytes(build(KEYS, TENSORS, version=2))
    stored, metadata = read_gguf(path)
    assert metadata["tokenizer.ggml.tokens"] == ["a", "bc", "é", ""]
    assert metadata["of.kind.12"] == 1.0 and metadata["llama.flag"] is True
    assert stored.tensors["blk.0.ffn_up.weight"].shape == (2, 68)


def mutated(rng: random.Random, content: bytes) -> bytes:
    data = bytearray(content)
    place = rng.randrange(len(data))
    how = rng.randrange(5)
    wild = rng.choice(
        [0, 1, 255, len(data), 1 << 31, 1 << 32, (1 << 63) - 1, (1 << 64) - 1]
    )
    if how == 0:
        data[place] ^= 1 << rng.randrange(8)
    elif how == 1:
        del data[place:]
    elif how == 2:
        del data[place : place + rng.randrange(1, 9)]
    elif how == 3:
        data[place : place + 8] = struct.pack("<Q", wild)
    else:
        data[place : place + 4] = struct.pack("<I", wild & 0xFFFFFFFF)
    return bytes(data)


def test_broken_headers_are_refused_or_read_inside_the_file(tmp_path: Path) -> None:
    """Each count, length and offset of a file is somebody else's, and none is believed."""
    rng = random.Random(3)
    path = tmp_path / "m.gguf"
    content = build(KEYS, TENSORS)
    num_read = 0
    count = num_examples(10_000)
    tracemalloc.start()
    # ten times as fast as a new one each time
    with path.open("wb", buffering=0) as file:
        for number in range(count):
            if number == count // 10:  # counting memory takes its time
                _, peak = tracemalloc.get_traced_memory()
                tracemalloc.stop()
            changed = mutated(rng, content)
            if rng.random() < 0.3:
                changed = mutated(rng, changed or content)
            file.seek(0)
            file.write(changed)
            file.truncate()
            num_read += reads_inside(path, len(changed))
    assert 0.01 < num_read / count < 0.9, "mutations reach nothing, or break nothing"
    assert peak < 4 << 20, "more was asked for than the file has"


def reads_inside(path: Path, num_bytes: int) -> bool:
    try:
        stored, _ = read_gguf(path)
    except CheckpointError as error:
        assert len(str(error)) < 2000
        return False
    spans = [tensor.span for tensor in stored.tensors.values()]
    assert all(0 < first <= last <= num_bytes for first, last in spans)
    return True


@pytest.mark.parametrize(
    "name", ["llama", "gemma3", "phi3-longrope", "deepseek_v3", "bloom"]
)
def test_broken_metadata_are_refused_or_make_a_model(name: str, tmp_path: Path) -> None:
    """A number of layers or heads may be any; it asked for lists of that length."""
    check_broken_metadata(SAMPLES / f"{name}.gguf", tmp_path / "m.gguf")


def check_broken_metadata(source: Path, path: Path) -> None:
    """Change the first 900 bytes of an architecture's keys, again and again."""
    rng = random.Random(source.name)
    content = source.read_bytes()
    (stored, _) = read_gguf(source)
    own = content.index(b"block_count") - 40
    num_read = 0
    for _ in range(num_examples(300)):
        data = bytearray(content)
        for _ in range(rng.randrange(1, 3)):
            place = rng.randrange(own, own + 900)
            wild = rng.choice(
                [0, 1, 3, 1 << 20, 1 << 31, (1 << 32) - 1, rng.randrange(1 << 32)]
            )
            data[place : place + 4] = struct.pack("<I", wild)
        path.write_bytes(data)
        try:
            model = read_gguf_model(path)
            gguf_architecture(model, architecture_of(config_of(model)).model)
            num_read += 1
        except CheckpointError:
            pass
    assert stored.header[1] > own + 900 and num_read < num_examples(300)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"GGML" + bytes(60), "does not begin with GGUF"),
        (b"<!DOCTYPE html><html>", "is a web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "pointer of git-LFS"),
        (
            build(KEYS, TENSORS, version=1),
            "GGUF version 1; fminfer reads versions 2 and 3. Convert",
        ),
        (build(KEYS, TENSORS, version=4), "GGUF version 4"),
        (build(KEYS, TENSORS, order=">"), "is big-endian, which does not run"),
        (
            (whole := build(KEYS, TENSORS))[:-40],
            f"the file has {len(whole) - 40} bytes and should have {len(whole)}",
        ),
        (whole[:100], "it has 100 bytes and is cut off in its header"),
        (whole[:120], "it has 120 bytes and is cut off in its header"),
        (
            build(KEYS | {"general.alignment": (U32, 24)}, TENSORS),
            "is 24, which is no power",
        ),
        (
            build(KEYS, {"x": (99, (4, 8), bytes(128))}),
            "'x' as type 99, which fminfer does not know",
        ),
        (
            build(KEYS, {"x": (8, (2, 40), bytes(128))}),
            "'x' has rows of 40, no multiple of 32",
        ),
        (
            build(KEYS, {"x": (0, (1, 1, 1, 1, 1), bytes(4))}),
            "'x' has 5 dimensions; 4 are",
        ),
        (build({"k": (ARRAY, (ARRAY, []))}, {}), "a value of the kind 9"),
        (build({"k": (ARRAY, (77, []))}, {}), "a value of the kind 77"),
        (
            build({"k": (STRING, "aé")}, {}).replace("é".encode(), b"\xff\xff"),
            "is damaged",
        ),
        (whole.replace(b"general.arch", b"\xffeneral.arch"), "a text in it is damaged"),
    ],
)
def test_what_is_no_readable_gguf_is_told(
    content: bytes, says: str, tmp_path: Path
) -> None:
    (path := tmp_path / "m.gguf").write_bytes(content)
    assert says in refusal(path)
    assert "codec" not in refusal(path), "Python's own words"


def doubled(content: bytes, one: bytes, other: bytes) -> bytes:
    """Return a file in which a name was written over another of the same length."""
    assert content.count(one) == 1 and len(one) == len(other)
    return content.replace(one, other)


def test_names_that_are_there_twice_are_told(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(doubled(build(KEYS, TENSORS), b"of.kind.2", b"of.kind.3"))
    assert "the key 'of.kind.3' is there twice" in refusal(path)
    both = {"a.weight": f32([1.0]), "b.weight": f32([2.0])}
    path.write_bytes(doubled(build({}, both), b"b.weight", b"a.weight"))
    assert "tensor 'a.weight' is there twice" in refusal(path)
    both = {"x_exps.weight": f32([[1.0], [2.0]]), "x_exps.1.weight": f32([2.0])}
    path.write_bytes(build({}, both))
    assert "tensor 'x_exps.1.weight' is there twice" in refusal(path)


def test_tensors_that_overlap_or_lie_askew_are_told(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    both = {"a": f32(np.ones(16)), "b": f32(np.ones(16))}
    content = build({}, both)
    old = struct.pack("<IQ", 0, 64)
    path.write_bytes(doubled(content, old, struct.pack("<IQ", 0, 32)))
    assert "the tensors 'a' and 'b' overlap" in refusal(path)
    path.write_bytes(doubled(content, old, struct.pack("<IQ", 0, 33)))
    assert "tensor 'b' begins at 33, no multiple of 32" in refusal(path)
    path.write_bytes(doubled(content, old, struct.pack("<IQ", 0, 1 << 40)))
    assert "should have 1099511627936" in refusal(path)


def split(name: str, folder: Path, num: int, *, says: int | None = None) -> Path:
    """Write a sample in parts, as llama-gguf-split does; the first has the metadata."""
    keys, tensors = read(SAMPLES / f"{name}.gguf")
    names = [*tensors]
    for part in range(num):
        own = {n: tensors[n] for n in names[part::num]}
        told = {"split.no": (2, part), "split.count": (2, says or num)}
        told["split.tensors.count"] = (5, len(tensors))
        path = folder / f"m-{part + 1:05}-of-{num:05}.gguf"
        path.write_bytes(build(told if part else keys | told, own))
    return folder / f"m-00001-of-{num:05}.gguf"


def test_a_split_model_is_the_whole_one(tmp_path: Path) -> None:
    first = split("llama", tmp_path, 3)
    whole = SAMPLES / "llama.gguf"
    assert [file.name[:7] for file in find_weights(first).files] == [
        "m-00001",
        "m-00002",
        "m-00003",
    ]
    assert find_weight_files(str(first)).keys() == {*tmp_path.iterdir()}
    assert logits(first).equal(logits(whole))
    names = digest_weight_files(
        open_checkpoint(str(first), ModelOptions(tokenizer=str(DEMO_MODEL)))
    )
    assert names.keys() == {file.name for file in tmp_path.iterdir()}


def test_a_file_is_known_by_its_content(tmp_path: Path) -> None:
    """Ollama's have no ending. A name that says "of 0 parts" says nothing."""
    for name in ("sha256-abc", "m-00001-of-00000.gguf"):
        shutil.copyfile(SAMPLES / "llama.gguf", tmp_path / name)
        assert logits(tmp_path / name).equal(logits(SAMPLES / "llama.gguf"))
        assert find_weight_files(str(tmp_path / name)).keys() == {tmp_path / name}


def test_parts_that_are_not_all_there_are_told(tmp_path: Path) -> None:
    first = split("llama", tmp_path, 2)
    second = tmp_path / "m-00002-of-00002.gguf"
    with pytest.raises(
        CheckpointError, match=r"is one part of a model; give the first, \S+m-00001-of"
    ):
        read_gguf_model(second)
    first.rename(alone := tmp_path / "alone.gguf")
    with pytest.raises(
        CheckpointError, match=r"has split\.count 2, but its name says 1 part"
    ):
        read_gguf_model(alone)
    alone.rename(first)
    second.write_bytes(first.read_bytes())
    with pytest.raises(
        CheckpointError, match=r"part 2 by its name, and has split\.no 0"
    ):
        read_gguf_model(first)
    second.unlink()
    with pytest.raises(
        CheckpointError, match=rf"lacks {second.name} \(1 file missing\)"
    ):
        read_gguf_model(first)
    with pytest.raises(
        CheckpointError, match=r"there is no file \S+nothing.gguf. A GGUF file of"
    ):
        open_checkpoint(str(tmp_path / "nothing.gguf"))


def test_a_type_that_does_not_run_is_named(tmp_path: Path) -> None:
    def change(keys: Keys, tensors: Tensors) -> None:
        tensors["blk.0.ffn_up.weight"] = (16, (256, 256), bytes(256 * 66))

    path = copy("kforms-q8_0", tmp_path / "m.gguf", change)
    says = (
        r"stores 'blk.0.ffn_up.weight' as IQ2_XXS: these types run: .*Q4_K.*F16\. "
        r"Take a file of"
    )
    with pytest.raises(CheckpointError, match=says):
        check_tensors(
            open_checkpoint(str(path), ModelOptions(tokenizer=str(DEMO_MODEL)))
        )
