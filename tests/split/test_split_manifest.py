"""The manifest's reader: whatever the file holds, it gives a manifest or says what is wrong."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fminfer.core.errors import FminferError, UsageError
from fminfer.split.manifest import MANIFEST, Manifest, read_manifest, read_part_paths
from fminfer.split.merging import merge_parts
from fminfer.split.splitting import SplitOptions, split_file
from tests.conftest import num_examples
from tests.fuzz.fuzz import check_manifest, make_split, mutate, sign

ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner)
    ),
    max_leaves=5,
)

HOSTILE_PATHS = [
    "../request_0.jsonl",
    "/etc/request_0.jsonl",
    "a/../../request_0.jsonl",
    "a//request_0.jsonl",
    "./request_0.jsonl",
    "a/./request_0.jsonl",
    ".split/request_0.jsonl",
    "a/request_00.jsonl",
    "a/request_-1.jsonl",
    "a/request_٣.jsonl",
    "a/passwd",
    "a/request_0.jsonl/",
    "a/request_0.jsonl/../x",
    "a\\..\\request_0.jsonl",
    "~/request_0.jsonl",
    "a/request_1e9.jsonl",
    "a.jsonl/request_0.jsonl",
]
ODD_PATHS = [
    "",
    "a/\0/request_0.jsonl",
    "\ud800/request_0.jsonl",
    "a" * 300 + "/request_0.jsonl",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A split of three parts and six lines."""
    make_split(tmp_path)
    return tmp_path / "parts"


def load(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
    return found


def store(folder: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest as whoever knows the format would, with a check that fits."""
    parts = manifest.pop("parts")
    manifest.pop("check", None)
    entries = ",\n".join(json.dumps(part) for part in parts)
    text = f'{json.dumps(manifest)[:-1]},"parts":[\n{entries}\n'
    (folder / MANIFEST).write_bytes(sign(text.encode()))


def test_it_is_json_with_one_part_a_line(folder: Path) -> None:
    manifest = load(folder)
    text = (folder / MANIFEST).read_text()
    assert len(text.splitlines()) == len(manifest["parts"]) + 2
    assert [part["num_rows"] for part in manifest["parts"]] == [3, 2, 1]
    assert (
        manifest["num_lines"] == 6 and manifest["options"]["min_generate_token"] == 100
    )
    assert manifest["parts"][0]["hyperparameters"] == {"max_tokens": 5}
    found = read_manifest(folder)
    store(folder, manifest)
    assert read_manifest(folder) == found, (
        "it is what is written that counts, not its spaces"
    )


@pytest.mark.parametrize("path", [*HOSTILE_PATHS, *ODD_PATHS])
def test_paths_stay_in_the_folder(path: str, folder: Path) -> None:
    manifest = load(folder)
    manifest["parts"][1]["path"] = path
    store(folder, manifest)
    for read in (read_manifest, read_part_paths):
        with pytest.raises(
            UsageError, match=r"manifest\.json is damaged, in its line 3"
        ):
            read(folder)
    store(folder, manifest | {"is_complete": False, "parts": [path]})
    with pytest.raises(UsageError, match="damaged"):
        read_part_paths(folder)


def drop(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: manifest["parts"][0].pop(name)


def put(name: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: manifest["parts"][0].update({name: value})


@pytest.mark.parametrize(
    "change",
    [
        *map(
            drop, ("path", "engine", "hyperparameters", "num_rows", "digest", "lines")
        ),
        put("path", 5),
        put("engine", 5),
        put("hyperparameters", []),
        put("digest", None),
        put("num_rows", 2),
        put("num_rows", True),
        put("lines", [1, 2, 2]),
        put("lines", [1, 2, 0]),
        put("lines", [1, 2, -3]),
        put("lines", [1, 2, 2**53]),
        put("lines", [1, 2, 2**70]),
        put("lines", [1, 2, 3.0]),
        put("lines", [1, 2, True]),
        put("lines", [1, 2, "3"]),
        put("lines", {}),
        put("lines", []),
        put("lines", [1, 2, 5]),
        put("path", "c/request_0.jsonl"),
        put("num_equal", [0, 1]),
        put("num_equal", {}),
        put("num_equal", [0, 1, -1]),
        lambda manifest: manifest["parts"].append(manifest["parts"][0]),
        lambda manifest: manifest["parts"].pop(),
        lambda manifest: manifest["parts"].append(None),
        lambda manifest: manifest.update(num_lines=7),
        lambda manifest: manifest.update(num_lines=10**30),
        lambda manifest: manifest.update(num_parts=4),
        lambda manifest: manifest.update(fminfer_split=2),
        lambda manifest: manifest.update(is_complete=1),
        lambda manifest: manifest.update(source=None),
        lambda manifest: manifest.update(options=[]),
    ],
)
def test_what_is_wrong_is_told(
    change: Callable[[dict[str, Any]], object], folder: Path
) -> None:
    manifest = load(folder)
    change(manifest)
    store(folder, manifest)
    with pytest.raises(
        UsageError, match=r"manifest\.json is damaged, in its line \d: .{15}"
    ):
        read_manifest(folder)


def test_any_bit_that_flips_is_noticed(folder: Path) -> None:
    """A line number with another digit would put an answer in another's place."""
    data = (folder / MANIFEST).read_bytes()
    source = random.Random(5)
    for place in range(0, len(data), 3):
        changed = bytearray(data)
        changed[place] ^= 1 << source.randrange(8)
        (folder / MANIFEST).write_bytes(changed)
        with pytest.raises(UsageError):
            read_manifest(folder)
    for length in range(0, len(data), 7):
        (folder / MANIFEST).write_bytes(data[:length])
        with pytest.raises(UsageError):
            read_manifest(folder)
    (folder / MANIFEST).write_bytes(data + b"\n{}")
    with pytest.raises(UsageError):
        read_manifest(folder)


@given(
    value=ANY_JSON,
    place=st.sampled_from(["head", "part", "lines"]),
    name=st.text(max_size=9),
)
@settings(
    max_examples=num_examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_values(value: Any, place: str, name: str, tmp_path: Path) -> None:
    if not (tmp_path / "parts").exists():
        make_split(tmp_path)
        (tmp_path / "sound").write_bytes((tmp_path / "parts" / MANIFEST).read_bytes())
    manifest = json.loads((tmp_path / "sound").read_bytes())
    target = manifest if place == "head" else manifest["parts"][1]
    source = random.Random(name)
    key = source.choice([*(set(target) - {"parts"}), name])
    if place == "lines":
        target["lines"][0] = value
    else:
        target[key] = value
    store(tmp_path / "parts", manifest)
    check_manifest_reader(tmp_path / "parts")


@given(seed=st.integers(0, 2**32))
@settings(
    max_examples=num_examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_bytes(seed: int, tmp_path: Path) -> None:
    """`scripts/fuzz` does this for as long as one likes."""
    check_manifest(tmp_path, random.Random(seed))


def check_manifest_reader(folder: Path) -> None:
    for read in (
        read_manifest,
        read_part_paths,
        lambda path: merge_parts(path, path / "m.jsonl"),
    ):
        try:
            found = read(folder)
        except FminferError as error:
            assert str(error)
        else:
            assert not isinstance(found, Manifest) or len(found.parts) == 3


def test_a_damaged_manifest_is_not_split_over(folder: Path) -> None:
    """Nobody knows then which files are the split's."""
    data = (folder / MANIFEST).read_bytes()
    changed = mutate(data, [data], random.Random(1))
    (folder / MANIFEST).write_bytes(changed)
    with pytest.raises(UsageError, match="damaged"):
        split_file(folder.parent / "all.jsonl", folder, SplitOptions(100, 1000))
    assert (folder / MANIFEST).read_bytes() == changed


def test_the_check_is_of_all_bytes_before_it(folder: Path) -> None:
    before, _, end = (folder / MANIFEST).read_bytes().rpartition(b'],"check":')
    assert json.loads(b"{" + b'"check":' + end)["check"] == (
        hashlib.blake2b(before, digest_size=8).hexdigest()
    )


def test_two_parts_of_one_path_are_refused(folder: Path) -> None:
    manifest = load(folder)
    for place in (1, 0):
        manifest["parts"][place]["path"] = manifest["parts"][1]["path"]
    store(folder, manifest)
    with pytest.raises(UsageError, match="two parts have the same path"):
        read_manifest(folder)
