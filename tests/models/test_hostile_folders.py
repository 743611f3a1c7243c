"""A folder of a stranger is refused in a sentence, or it answers: no traceback, no
hang, no code.

87 of 632 changed folders ended in tracebacks; a pipe was waited for, and a pickle of
some hundred bytes made a message of 2.6 MB. `hostile_folders` has the changes.
"""

from __future__ import annotations

import errno
import json
import os
import re
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fminfer.core.config import EngineConfig
from fminfer.core.errors import CheckpointError, MachineError
from fminfer.core.impostors import check_no_impostor, is_gguf, naming_broken_files
from fminfer.models.checkpoint import open_model
from fminfer.models.config_fields import check_counts
from fminfer.models.model_folder import find_weight_files
from fminfer.models.stored.stored_tensors import read_safetensors
from fminfer.models.stored.torch_file import read_torch_file
from fminfer.runtime.load.assembly import load_tokenizer
from tests.conftest import IS_ALL, family_config, more
from tests.forked import fork_server, run_forked
from tests.gguf_building import copy
from tests.models import hostile_folders
from tests.models.hostile_folders import make_folder, pickles, put, update

NUM_TRIED = 700 if IS_ALL else 10


def _try_all(num: int, folder: str) -> None:
    """Try cases in forks of this process, which is one of the fork server's."""
    cases = hostile_folders.sample(num)
    faults = {
        outcome.name: outcome.fault
        for outcome in hostile_folders.try_all(cases, Path(folder))
        if outcome.fault
    }
    (Path(folder) / "faults.json").write_text(json.dumps(faults))


def test_changed_folders(tmp_path: Path) -> None:
    process = fork_server().Process(target=_try_all, args=(NUM_TRIED, str(tmp_path)))
    process.start()
    process.join()
    assert json.loads((tmp_path / "faults.json").read_text()) == {}


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    make_folder("demo", tmp_path / "m")
    return tmp_path / "m"


def refusal(folder: Path) -> str:
    """Return why a folder is refused as its config and its tokenizer are read."""
    config = EngineConfig(str(folder))
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(config, open_model(config))
    return str(caught.value)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"num_attention_heads": 0},
            r"config.json sets num_attention_heads to 0; .* from 1 to",
        ),
        (
            {"num_hidden_layers": 10**9},
            "sets num_hidden_layers to 1000000000; .* to 4,096",
        ),
        ({"vocab_size": -1}, "sets vocab_size to -1"),
        ({"num_labels": 10**9}, "sets num_labels to 1000000000"),
        ({"head_dim": float("nan")}, "sets head_dim to nan"),
        ({"text_config": {"hidden_size": 0}}, "sets hidden_size to 0"),
        ({"max_position_embeddings": -1}, "has a context of -1 tokens"),
        ({"dtype": "64"}, r"m/config.json is broken \(AttributeError"),
        ({"architectures": [1]}, "config.json is broken"),
        ({"id2label": "x"}, "m/config.json is broken"),
    ],
)
def test_values_of_a_config(fields: dict[str, Any], says: str, demo: Path) -> None:
    update("config.json", fields)(demo)
    assert re.search(says, refusal(demo))


@pytest.mark.parametrize(
    ("name", "fields", "says"),
    [
        ("deepseek_v3", {"n_group": None}, r"makes layer\.mlp\.groups None"),
        (
            "gemma3_text",
            {"query_pre_attn_scalar": -1},
            r"makes layer\.attention\.scaling .*j\)",
        ),
        ("mixtral", {"num_experts_per_tok": -1}, r"makes layer\.mlp\.top_k -1"),
        (
            "mixtral",
            {"sliding_window": 10**30},
            r"makes layer\.attention\.window 10000",
        ),
        (
            "mixtral",
            {"num_experts_per_tok": 9},
            "each token goes to 9 of them; 1 to all",
        ),
        ("deepseek_v3", {"n_group": 5}, "experts into 5 groups"),
        ("deepseek_v3", {"n_group": 8}, "chosen by their 2 best"),
        ("deepseek_v3", {"n_group": 4, "topk_group": 5}, "of which 5 are chosen"),
    ],
)
def test_numbers_that_nothing_is_computed_with(
    name: str, fields: dict[str, Any], says: str, tmp_path: Path
) -> None:
    """They ended the run at its first step, in torch's words."""
    family_config(name, 3).save_pretrained(tmp_path)
    update("config.json", fields)(tmp_path)
    with pytest.raises(CheckpointError, match=says):
        open_model(EngineConfig(random_init=str(tmp_path)))


def test_published_counts_are_allowed() -> None:
    fields = {
        "num_hidden_layers": 126,
        "num_nextn_predict_layers": 0,
        "n_shared_experts": 0,
    }
    check_counts(
        fields | {"vocab_size": 1_000_000, "num_key_value_heads": None}, "config.json"
    )


@pytest.mark.parametrize("eos", [-1, [0, -1], "0", [[0]], {}, True, 1.5])
def test_ids_that_end_nothing_are_refused(eos: Any, demo: Path) -> None:
    """Answers went on until max_tokens without a word, or a set of dicts ended in a
    traceback."""
    put("generation_config.json", ("eos_token_id",), eos)(demo)
    assert re.search("m has the eos_token_id .* an id|the id of a token", refusal(demo))


def test_an_end_beyond_the_vocabulary_is_told(demo: Path) -> None:
    put("generation_config.json", ("eos_token_id",), [500, 10**6])(demo)
    config = EngineConfig(str(demo))
    assert (
        "no eos_token_id of m is one of its 407"
        in load_tokenizer(config, open_model(config)).note
    )
    # one of them ends answers
    put("generation_config.json", ("eos_token_id",), [500, 0])(demo)
    assert not load_tokenizer(config, open_model(config)).note


def test_a_tokenizer_that_panics_is_refused_as_it_loads(demo: Path) -> None:
    """Each line's text ended the run: the probe ends in spaces, with which nothing panics."""
    replaces = {"type": "Replace", "pattern": {"String": ""}, "content": "aaaa"}
    put("tokenizer.json", ("normalizer",), replaces)(demo)
    assert re.search(r"the tokenizer in .*m is broken \(PanicException", refusal(demo))


def test_a_tokenizer_that_pads_is_tried_without(demo: Path) -> None:
    """The probe of a file with this padding would have had a billion tokens."""
    padding = {
        "strategy": {"Fixed": 10**9},
        "direction": "Right",
        "pad_to_multiple_of": None,
    }
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    put("tokenizer.json", ("padding",), padding)(demo)
    config = EngineConfig(str(demo))
    assert len(load_tokenizer(config, open_model(config)).encode("a b").ids) < 9


EOS = "tokenizer.ggml.eos_token_id"
ODD = (
    "config.json",
    "tokenizer.json",
    "chat_template.jinja",
    "model.safetensors",
    "vocab.json",
)


@pytest.mark.parametrize("name", ODD)
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(name: str, demo: Path) -> None:
    (demo / name).unlink(missing_ok=True)
    os.mkfifo(demo / name)
    assert f"{name} is a pipe, and no file" in refusal(demo)
    assert not is_gguf(demo / name)
    assert demo / name not in find_weight_files(str(demo))  # a thread read it ahead


def test_devices_in_the_place_of_files(demo: Path) -> None:
    (demo / "modules.json").symlink_to("/dev/zero")
    assert "modules.json is a device" in refusal(demo)
    with pytest.raises(CheckpointError, match="is a device"):
        check_no_impostor(demo / "modules.json")


def test_a_chat_template_that_is_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "t.jinja")
    with pytest.raises(CheckpointError, match=r"t\.jinja is a pipe"):
        EngineConfig(None, chat_template=str(tmp_path / "t.jinja"))


@more
@pytest.mark.parametrize("command", ["check", "run", "serve", "quantize"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_all_commands_refuse_alike(
    command: str, name: str, demo: Path, tmp_path: Path
) -> None:
    (demo / name).unlink()
    os.mkfifo(demo / name)
    (tmp_path / "r.jsonl").write_text('{"prompt": "a", "max_tokens": 1}\n')
    words: dict[str, list[object]] = {
        "check": [tmp_path / "r.jsonl", "--model-name", demo],
        "run": ["--prompt", "a", "--model-name", demo],
        "serve": ["--port", "0", demo],
        "quantize": ["--model-name", demo, "--output", tmp_path / "q", "--to", "int8"],
    }
    done = run_forked([command, *words[command]], timeout=60)
    assert done.returncode == 1
    assert (
        done.stderr
        == f"Error: {demo / name} is a pipe, and no file. Give a plain file instead\n"
    )


class PanicException(BaseException):
    """As that of Rust's libraries, which is no Exception."""


def fault(error: BaseException) -> BaseException:
    """Return what naming_faults makes of an error."""
    with (
        pytest.raises(BaseException) as caught,
        naming_broken_files("m/tokenizer.json"),
    ):
        raise error
    return caught.value


@pytest.mark.parametrize(
    "error", [KeyError("x"), RecursionError(), PanicException("index")]
)
def test_what_libraries_raise_names_the_files(error: BaseException) -> None:
    said = fault(error)
    assert type(said) is CheckpointError and said.__cause__ is error
    assert str(said).startswith(f"m/tokenizer.json is broken ({type(error).__name__}")


def test_what_is_not_the_files_fault_keeps_its_meaning() -> None:
    for error in (
        MemoryError(),
        KeyboardInterrupt(),
        SystemExit(1),
        CheckpointError("a"),
    ):
        assert fault(error) is error
    for number in (errno.EIO, errno.EINTR, errno.EAGAIN, errno.ENOSPC):
        assert type(fault(OSError(number, "no"))) is MachineError
    assert type(fault(FileNotFoundError(errno.ENOENT, "no"))) is CheckpointError


def test_an_error_quotes_some_of_a_file() -> None:
    said = str(CheckpointError("a" * 5000 + "b" * 5000 + "; fetch it again"))
    assert (
        len(said) < 2000
        and said.startswith("aaa")
        and said.endswith("b; fetch it again")
    )
    assert "… 8,216 characters …" in said


@pytest.mark.parametrize(
    "name", [name for name in pickles() if "doubl" in name or "long" in name]
)
def test_pickles_that_grow(name: str, tmp_path: Path) -> None:
    """Some hundred bytes named what is as long as a library; its name was told."""
    with zipfile.ZipFile(tmp_path / "m.bin", "w") as archive:
        archive.writestr("m/data.pkl", pickles()[name])
    start_s = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        read_torch_file(tmp_path / "m.bin")
    assert len(str(caught.value)) < 2000
    assert time.process_time() - start_s < 2


def test_a_list_is_read_as_a_dict_once(tmp_path: Path) -> None:
    """A list that many calls share was read by each."""
    pairs = b"]q\x00(" + b"]q\x01(K\x01K\x02e" * 3000 + b"e"
    calls = b"ccollections\nOrderedDict\nq\x02" + b"h\x02h\x00\x85R" * 3000
    with zipfile.ZipFile(tmp_path / "m.bin", "w") as archive:
        archive.writestr("m/data.pkl", b"\x80\x02" + pairs + calls + b"}.")
    start_s = time.process_time()
    with pytest.raises(CheckpointError, match="no dict of tensors"):
        read_torch_file(tmp_path / "m.bin")
    assert time.process_time() - start_s < 1


def header_of_sizes() -> bytes:
    entry = {"dtype": "F32", "shape": [1] * 100_000, "data_offsets": [0, 4]}
    return json.dumps({"a": entry}).encode()


def header_of_doubles() -> bytes:
    return b'{"a":1,' + b",".join(b'"%d":1' % n for n in range(200_000)) + b',"a":1}'


@pytest.mark.parametrize(
    ("make", "says"),
    [(header_of_sizes, "sizes, at most 16,"), (header_of_doubles, "'a' is there")],
)
def test_headers_that_took_quadratic_time(
    make: Callable[[], bytes], says: str, tmp_path: Path
) -> None:
    header = make()
    (file := tmp_path / "m.safetensors").write_bytes(
        struct.pack("<Q", len(header)) + header + bytes(4)
    )
    start_s = time.process_time()
    with pytest.raises(CheckpointError, match=says):
        read_safetensors(file)
    assert time.process_time() - start_s < 3


@pytest.mark.parametrize(
    "name", ["special_tokens_map.json", "added_tokens.json", "modules.json"]
)
def test_a_file_that_is_cut_off_is_named(name: str, demo: Path) -> None:
    """The error named tokenizer.json; a broken modules.json was passed over in silence."""
    (demo / name).write_text('{"eos_token": ')
    assert re.search(rf"m/{name} is broken \(no JSON", refusal(demo))


@pytest.mark.parametrize("eos", [4_000_000_000, -1])
def test_an_end_that_a_gguf_file_does_not_have(
    eos: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers went on until max_tokens, and nothing was told."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kind = 5 if eos < 0 else 4  # of numbers with a sign, and without
    changed = copy(
        "llama", tmp_path / "m.gguf", lambda keys, _: keys.update({EOS: (kind, eos)})
    )
    config = EngineConfig(str(changed))
    if eos < 0:
        with pytest.raises(
            CheckpointError, match=r"m\.gguf has the eos_token_id \[-1\]"
        ):
            open_model(config)
    else:
        assert "no eos_token_id of" in load_tokenizer(config, open_model(config)).note
