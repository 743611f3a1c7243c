"""Headers of safetensors files: a sound one is parsed at once, an odd one entry by entry."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fminfer.core.errors import CheckpointError
from fminfer.models.stored import stored_tensors
from fminfer.models.stored.stored_tensors import StoredTensor, read_safetensors
from fminfer.models.stored.tensor_table import TensorFiles

NUM_TENSORS = 3730  # a tenth of DeepSeek V3's 37,299
NUM_FILES = 5


def entry(first: int, last: int, dtype: str = "F32") -> str:
    shape = (last - first) // (2 if dtype == "BF16" else 4)
    return f'{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[{first},{last}]}}'


def header(*entries: str) -> str:
    return "{" + ",".join(entries) + "}"


A = '"a":' + entry(0, 4)
B = '"b":' + entry(4, 8)
HEADERS = {
    "sound": header(A, B),
    "out of order": header(B, A),
    "with metadata": header('"__metadata__":{"format":"pt","a:b":"c:d"}', A, B),
    "empty tensors": header(A, B, '"c":' + entry(4, 4), '"d":' + entry(8, 8)),
    "nothing": "{}",
    "spaces": json.dumps(json.loads(header(A, B)), indent=2) + "  ",
    "a name with colons": header(A, '":b:":' + entry(4, 8)),
    "a name that is escaped": header(A, '"\\u003a":' + entry(4, 8)),
    "a name twice": header(A, A, B),
    "a name twice, and once escaped": header(A, '"\\u0061":' + entry(4, 8)),
    "a name twice, and an escaped colon": header(A, '"\\u003a":' + entry(4, 8), A),
    "a field twice": header(A, '"b":' + entry(4, 8)[:-1] + ',"dtype":"F32"}'),
    "metadata twice": header('"__metadata__":{}', '"__metadata__":{}', A, B),
    "a hole": header(A, '"b":' + entry(8, 12)),
    "an overlap": header('"a":' + entry(0, 8), B),
    "too short": header(A),
    "too long": header(A, B, '"c":' + entry(8, 12)),
    "not from the start": header(B),
    "backwards": header(A, B.replace("[4,8]", "[8,4]")),
    "below 0": header(A.replace("[0,4]", "[-4,0]"), B),
    "a fraction": header(A, B.replace("[1]", "[1.0]")),
    "a truth": header(A, B.replace("[1]", "[true]")),
    "a number of twenty digits": header(A, B.replace("8]", "80000000000000000000]")),
    "a shape in words": header(A, B.replace("[1]", '"1"')),
    "a scalar": header(A, B.replace("[1]", "[]")),
    "an empty text as shape": header(A, B.replace("[1]", '""')),
    "many dimensions": header(A, B.replace("[1]", str([1] * 17))),
    "another size": header(A, B.replace("[1]", "[2]")),
    "a type of tomorrow": header(A, B.replace("F32", "F3")),
    "a number as type": header(A, B.replace('"F32"', "32")),
    "a list as type": header(A, B.replace('"F32"', "[]")),
    "three offsets": header(A, B.replace("[4,8]", "[4,8,8]")),
    "no type": header(A, B.replace("dtype", "type")),
    "a text as entry": header(A, '"b":"F32"'),
    "a list": "[]",
    "a number that is none": header(A, B.replace("[1]", "[NaN]")),
    "no UTF-8": header(A, B).replace("b", "\udcff"),
    "cut off": header(A, B)[:-1],
}


def outcome(path: Path) -> tuple[list[tuple[str, StoredTensor]], object] | str:
    try:
        file = read_safetensors(path)
    except CheckpointError as error:
        return str(error)
    told = (file.types, file.shapes, file.spans, file.header)
    assert file.types == {name: each.dtype for name, each in file.tensors.items()}
    assert [*file.spans.values()] == [each.span for each in file.tensors.values()]
    return [*file.tensors.items()], told


@pytest.mark.parametrize("name", HEADERS)
def test_all_at_once_is_as_one_by_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is parsed at once is what each entry would give, and errors are the same."""
    raw = HEADERS[name].encode(errors="surrogateescape")
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(8))
    found = outcome(path)
    monkeypatch.setattr(stored_tensors, "_parse_sound_header", lambda *_: None)
    assert found == outcome(path)


def write_checkpoint(folder: Path) -> None:
    homes = {}
    for number in range(NUM_FILES):
        name = f"model-{number + 1:05}-of-{NUM_FILES:05}.safetensors"
        names = [f"layer.{number}.{n}" for n in range(NUM_TENSORS // NUM_FILES)]
        parts = (f'"{n}":{entry(8 * i, 8 * i + 8)}' for i, n in enumerate(names))
        raw = header(*parts).encode()
        values = bytes(8 * len(names))
        (folder / name).write_bytes(struct.pack("<Q", len(raw)) + raw + values)
        homes |= dict.fromkeys(names, name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": homes}))


@pytest.fixture
def count_objects(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Count the places of tensors that were made one by one."""
    made = []

    class Counted(StoredTensor):
        def __init__(self, *args: object) -> None:
            made.append(args)
            super().__init__(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(stored_tensors, "StoredTensor", Counted)
    return lambda: len(made)


def test_a_scan_makes_nothing_of_a_tensor(
    count_objects: Callable[[], int], tmp_path: Path
) -> None:
    """37,299 tensors took 1.1 s of computing: each had three objects of its own."""
    write_checkpoint(tmp_path)
    start_s = time.process_time()
    files = TensorFiles(tmp_path)
    assert time.process_time() - start_s < 1
    assert len(files.types) == len(files.shapes) == NUM_TENSORS
    assert count_objects() == 0
    assert files.read("layer.0.1").shape == (2,)
    assert 0 < count_objects() < 9
