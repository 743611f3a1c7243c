"""What is wrong with weights is named, before memory is taken, and nothing hostile runs."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import re
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fminfer.core.errors import CheckpointError
from fminfer.models.checkpoint import open_checkpoint
from fminfer.models.model_folder import find_weight_files
from fminfer.models.origins import check_tensors, find_stored_model
from fminfer.models.stored import torch_file
from fminfer.models.stored.tensor_table import read_weight_file
from fminfer.models.stored.torch_file import read_torch_file
from tests.conftest import make_model, num_examples
from tests.forms import FORMS, Files, Tensors, save

ALL = ("safetensors", *FORMS)


@pytest.fixture(scope="module")
def opt() -> Any:
    return make_model("opt")


def refuse(folder: Path) -> str:
    """Return why a folder is refused, by the headers of its files alone."""
    checkpoint = open_checkpoint(str(folder))
    with pytest.raises(CheckpointError) as caught:
        check_tensors(checkpoint)
    find_stored_model(checkpoint)  # a forecast does not fail, whatever is wrong
    find_weight_files(str(folder))
    return str(caught.value)


def _home(files: Files) -> tuple[Tensors, str]:
    """Return the file that holds the second product of a layer's MLP, and its name there."""
    for file in [*files][1:] or [*files]:
        for name in sorted(files[file]):
            if name.endswith("fc2.weight"):
                return files[file], name
    raise AssertionError("none there")


def _rename(files: Files) -> None:
    tensors, name = _home(files)
    tensors[name.replace("fc2", "fc_2")] = tensors.pop(name)


def _drop(files: Files) -> None:
    tensors, name = _home(files)
    del tensors[name]


def _double(files: Files) -> None:
    tensors, name = _home(files)
    tensors[f"model.{name}"] = tensors[name].clone()


def _transpose(files: Files) -> None:
    tensors, name = _home(files)
    # a part, where nobody can tell
    if tensors[name].shape[0] == tensors[name].shape[1]:
        name = "decoder.embed_tokens.weight"
    tensors[name] = tensors[name].t().contiguous()


@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_rename, r"fc_?2\.weight"),
        (_drop, r"fc2\.weight"),
        (_double, r"model\..*fc2\.weight"),
        (
            _transpose,
            r"fc2\.weight' has shape .* transposed|embed_tokens\.weight' has shape",
        ),
    ],
)
def test_a_tensor_that_does_not_fit(
    form: str, change: Callable[[Files], None], says: str, opt: Any, tmp_path: Path
) -> None:
    said = refuse(save(form, opt, tmp_path, change))
    # the other part has it otherwise
    if form == "metaseq-parts" and change is not _transpose:
        says = r"fc_?2\.weight"
    assert re.search(says, said), said


@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize("num_bytes", [1, 100, 20_000, 200_000])
def test_a_file_that_is_cut_off(
    form: str, num_bytes: int, opt: Any, tmp_path: Path
) -> None:
    save(form, opt, tmp_path)
    file = max(tmp_path.iterdir(), key=lambda file: file.stat().st_size)
    file.write_bytes(file.read_bytes()[: -min(num_bytes, file.stat().st_size - 10)])
    assert re.search(rf"{file.name} is broken \(.+\); fetch it again", refuse(tmp_path))


@pytest.mark.parametrize("form", ALL)
def test_noise_in_a_file_is_no_crash(form: str, opt: Any, tmp_path: Path) -> None:
    """Bytes of a pickle or header that changed: some error is named, or only values changed."""
    save(form, opt, tmp_path)
    file = max(tmp_path.iterdir(), key=lambda file: file.stat().st_size)
    whole = file.read_bytes()
    noise = random.Random(3)
    checkpoint = open_checkpoint(str(tmp_path))
    for _ in range(num_examples(60)):
        data = bytearray(whole)
        for _ in range(3):
            data[noise.randrange(min(len(data), 9000))] = noise.randrange(256)
        file.write_bytes(data)
        with contextlib.suppress(CheckpointError):
            check_tensors(checkpoint)


STAND_INS = {
    b"<!DOCTYPE html><html>": "is a web page.*/blob/.*/resolve/",
    b"\n  <html>": "is a web page",
    b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n": "git-LFS.*'git lfs pull'",
    b"": "is broken",
}


@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize("data", STAND_INS)
def test_files_that_stand_in_the_place_of_weights(
    form: str, data: bytes, opt: Any, tmp_path: Path
) -> None:
    save(form, opt, tmp_path)
    files = [file for file in sorted(tmp_path.iterdir()) if file.name != "config.json"]
    files[0].write_bytes(data)
    said = refuse(tmp_path)
    assert files[0].name in said and re.search(STAND_INS[data], said)


def test_an_index_that_names_what_is_not_there(opt: Any, tmp_path: Path) -> None:
    save("bin-shards", opt, tmp_path)
    (tmp_path / "pytorch_model-00002-of-00003.bin").unlink()
    assert re.search(
        r"lacks pytorch_model-00002-of-00003.bin, which its pytorch_model.bin.index.json names",
        refuse(tmp_path),
    )
    index = tmp_path / "pytorch_model.bin.index.json"
    for wrong, says in [
        ("[]", "is broken"),
        ("{", "is broken"),
        ('{"weight_map": 3}', "is broken"),
        ('{"weight_map": {"a": "../b.bin"}}', "outside its folder"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "outside its folder"),
    ]:
        index.write_text(wrong)
        assert says in refuse(tmp_path)


@pytest.mark.parametrize("form", ["bin-pieces", "layers"])
def test_files_that_overlap(form: str, opt: Any, tmp_path: Path) -> None:
    def overlap(files: Files) -> None:
        first, last, *_ = files
        name = next(iter(files[first]))
        files[last][name] = files[first][name]

    said = refuse(save(form, opt, tmp_path, overlap))
    assert re.search(r"holds the tensor '.+' twice, in \S+ and \S+", said)


@pytest.mark.parametrize(
    "name", ["pytorch_1.pt", "pytorch_2.pt", "pytorch_embs.pt", "pytorch_lm_head.pt"]
)
def test_a_layer_that_is_missing(name: str, opt: Any, tmp_path: Path) -> None:
    save("layers", opt, tmp_path)
    (tmp_path / name).unlink()
    assert (name if name != "pytorch_2.pt" else "'model.decoder.layers.2.") in refuse(
        tmp_path
    )


def test_a_layer_too_many(opt: Any, tmp_path: Path) -> None:
    extra = lambda files: files.update({"pytorch_3.pt": dict(files["pytorch_2.pt"])})  # noqa: E731
    assert "model.decoder.layers.3." in refuse(save("layers", opt, tmp_path, extra))


def test_raw_shards_of_metaseq(opt: Any, tmp_path: Path) -> None:
    opt.config.save_pretrained(tmp_path)
    torch.save({"model": {}}, tmp_path / "checkpoint_last-model_part-0-shard7.pt")
    assert "metaseq.scripts.reshard_fsdp" in refuse(tmp_path)
    flat = {"model": {"decoder.layers.0.flat_param_0": torch.zeros(3)}}
    torch.save(flat, tmp_path / "reshard-model_part-0.pt")
    assert "metaseq.scripts.reshard_fsdp" in refuse(tmp_path)


def test_a_part_that_is_missing(opt: Any, tmp_path: Path) -> None:
    save("metaseq-parts", opt, tmp_path)
    (tmp_path / "reshard-model_part-0.pt").unlink()
    assert "lacks reshard-model_part-0.pt" in refuse(tmp_path)


def test_a_folder_of_other_weights(opt: Any, tmp_path: Path) -> None:
    opt.config.save_pretrained(tmp_path)
    (tmp_path / "tf_model.h5").touch()
    assert re.search(
        r"no \.safetensors file.*holds tf_model.h5.*docs/models.md", refuse(tmp_path)
    )


class Hostile:
    """Runs a command when it is unpickled."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call = call
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return self.call, self.arguments


@pytest.mark.parametrize("how", ["zip", "old", "plain"])
@pytest.mark.parametrize(
    ("call", "name"),
    [
        (os.system, "posix.system"),
        (eval, "eval"),
        (getattr, "getattr"),
        (bytearray, "bytearray"),
    ],
)
def test_a_hostile_pickle_is_refused_and_not_run(
    how: str, call: Any, name: str, opt: Any, tmp_path: Path
) -> None:
    touched = tmp_path / "touched"
    word = f"touch {touched}" if call is os.system else f"open({str(touched)!r}, 'w')"
    hostile = {"a.weight": torch.zeros(2), "b": Hostile(call, word)}
    opt.config.save_pretrained(tmp_path)
    file = tmp_path / "pytorch_model.bin"
    if how == "plain":
        file.write_bytes(pickle.dumps(Hostile(call, word)))
    else:
        torch.save(hostile, file, _use_new_zipfile_serialization=how == "zip")
    said = refuse(tmp_path)
    assert re.search(
        rf"asks to load \S*{name}, which no weights need, and nothing of it was", said
    )
    assert not touched.exists()


def pack(path: Path, data: bytes, how: int = zipfile.ZIP_STORED, **more: bytes) -> Path:
    with zipfile.ZipFile(path, "w", how) as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", b"3")
        for name, each in more.items():
            archive.writestr(f"archive/data/{name.removeprefix('_')}", each)
    return path


def of_tensor(
    shape: tuple[int, ...], strides: tuple[int, ...], num_values: int
) -> bytes:
    """Return the pickle of one tensor, written by hand."""

    def tuple_of(numbers: tuple[int, ...]) -> bytes:
        return (
            b"(" + b"".join(b"\x8a\x08" + struct.pack("<q", n) for n in numbers) + b"t"
        )

    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpu"
    storage += b"\x8a\x08" + struct.pack("<q", num_values) + b"tQ"
    rest = b"K\0" + tuple_of(shape) + tuple_of(strides) + b"\x89}"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + rest + b"tR"
    return b"\x80\x02}X\x01\0\0\0a" + tensor + b"s."


GIGA = 1 << 33
BOMBS: dict[str, Callable[[Path], Path]] = {
    "compressed values": lambda p: pack(
        p, of_tensor((GIGA,), (1,), GIGA), zipfile.ZIP_DEFLATED, _0=bytes(1 << 24)
    ),
    "compressed pickle": lambda p: pack(
        p, b"\x80\x02" + b"}" * (1 << 24), zipfile.ZIP_DEFLATED
    ),
    "values of one": lambda p: pack(p, of_tensor((GIGA,), (0,), 1), _0=bytes(4)),
    "values that are not there": lambda p: pack(
        p, of_tensor((GIGA,), (1,), GIGA), _0=bytes(4)
    ),
    "values before the first": lambda p: pack(
        p, of_tensor((2,), (-1,), 2), _0=bytes(8)
    ),
    "many instructions": lambda p: pack(p, b"\x80\x02" + b"N" * 60_000 + b"."),
    "a string of gigabytes": lambda p: pack(
        p, b"\x80\x04\x8d" + struct.pack("<Q", GIGA) + b"a."
    ),
    "an old string": lambda p: _written(
        p, b"\x80\x04\x8e" + struct.pack("<Q", GIGA) + b"a."
    ),
    "nested tuples as keys": lambda p: pack(
        p, b"\x80\x02}" + b")" + b"q\0h\0\x86" * 60 + b"Ns."
    ),
}


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_are_refused_before_they_take_memory(
    bomb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_file, "MOST_STEPS", 50_000)  # five million take seconds
    path = BOMBS[bomb](tmp_path / "pytorch_model.bin")
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is broken"):
            read_weight_file(path)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


def test_by_hand_is_as_torch_has_it(tmp_path: Path) -> None:
    """The bombs are no tensors only because of what they promise."""
    path = pack(tmp_path / "a.bin", of_tensor((2, 3), (3, 1), 6), _0=bytes(24))
    assert read_torch_file(path).tensors["a"].shape == (2, 3)
    assert torch.load(path, weights_only=True)["a"].shape == (2, 3)


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [GIGA], "data_offsets": [0, 4 * GIGA]}},
        {"a": {"dtype": "F32", "shape": [GIGA], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
        {"a": {"dtype": "F32", "shape": 1}},
        [],
    ],
)
def test_headers_that_promise_what_is_not_there(header: Any, tmp_path: Path) -> None:
    data = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(data)) + data + bytes(4))
    with pytest.raises(CheckpointError, match="is broken"):
        read_weight_file(path)
    path.write_bytes(struct.pack("<Q", GIGA) + data)
    with pytest.raises(CheckpointError, match="its header should have"):
        read_weight_file(path)
    twice = b'{"a": {}, "a": {}}'
    path.write_bytes(struct.pack("<Q", len(twice)) + twice)
    with pytest.raises(CheckpointError, match="'a' is there twice"):
        read_weight_file(path)


@pytest.mark.parametrize("form", ["bin", "safetensors"])
def test_quantized_weights_are_named_as_such(
    form: str, opt: Any, tmp_path: Path
) -> None:
    name = "model.decoder.layers.0.fc1.weight"
    types = {torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8", torch.int32: "I32"}
    for dtype, called in types.items():

        def change(files: Files, dtype: torch.dtype = dtype) -> None:
            (tensors,) = files.values()
            tensors[name] = tensors[name].to(dtype)

        said = refuse(save(form, opt, tmp_path / called, change))
        assert f"stores {name!r} as {called}: quantized weights run if" in said


def test_experts_in_mxfp4_are_named_as_such(opt: Any, tmp_path: Path) -> None:
    opt.config.save_pretrained(tmp_path)
    blocks = {
        "model.layers.0.mlp.experts.down_proj_blocks": torch.zeros(
            2, 2, dtype=torch.uint8
        )
    }
    save_file(blocks, tmp_path / "model.safetensors")
    assert "down_proj_blocks' as U8: quantized weights run if" in refuse(tmp_path)


def test_a_type_that_nobody_knows(opt: Any, tmp_path: Path) -> None:
    """The header has 60 bytes, and 60 is a "<": the file was called a web page."""
    opt.config.save_pretrained(tmp_path)
    data = b'{"a": {"dtype": "F3", "shape": [8], "data_offsets": [0, 3]}}'
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(data)) + data + bytes(3))
    assert "stores 'a' as F3: quantized weights run if" in refuse(tmp_path)
