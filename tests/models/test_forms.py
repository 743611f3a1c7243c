"""Weights in every form that people have them in give what they give as safetensors."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fminfer.compute.formats.dense import Dense
from fminfer.core.config import EngineConfig
from fminfer.core.partition import Part, make_parts
from fminfer.models.checkpoint import open_checkpoint, open_model
from fminfer.models.fingerprint import digest_weight_files, name_different_files
from fminfer.models.holding import Holding
from fminfer.models.layer_source import LayerSource, open_weights
from fminfer.models.model_folder import find_weight_files
from fminfer.models.origins import check_tensors, find_stored_model
from fminfer.models.stored.tensor_table import TensorFiles
from fminfer.models.stored.weight_folder import find_weights
from fminfer.models.tensor_specs import Weights
from fminfer.plan.planning import plan_ahead
from tests.conftest import (
    FEW,
    IS_ALL,
    make_model,
    more,
    save_byte_tokenizer,
    some_families,
)
from tests.forked import fork_server, run_forked
from tests.forms import FORMS, TOPS, Files, save
from tests.forward.test_transformer import logits_of

CPU = torch.device("cpu")
SPLITS = ([3], [1, 2], [1, 1, 1])
STORED = ("safetensors", "bin", "bin-old", "metaseq-parts")  # read each in another way
IDS = [list(range(20)), [7, 3]]


def load(folder: Path, part: Part, dtype: torch.dtype = torch.float32) -> LayerSource:
    checkpoint = open_checkpoint(str(folder))
    return open_weights(checkpoint, part, holding=Holding(dtype), device=CPU, seed=0)


def own_logits(model: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(torch.tensor(row)[None]).logits[0] for row in IDS]


def assert_equal(mine: Path, other: Path) -> None:
    """Compare two folders tensor by tensor, in 1, 2 and 3 stages."""
    for sizes in SPLITS:
        for part in make_parts(sizes):
            found = load(mine, part)
            expected = load(other, part)
            for weights, others in zip(
                groups_of(found), groups_of(expected), strict=True
            ):
                assert weights.keys() == others.keys()
                for name, weight in weights.items():
                    assert weight.equals(others[name]), name


def groups_of(source: LayerSource) -> list[Weights]:
    entry = source.load_entry()
    return [entry, *source.load_layers(), source.load_exit(entry)]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_opt(form: str, tmp_path: Path) -> None:
    model = make_model("opt")
    folder = save(form, model, tmp_path / "form")
    assert_equal(folder, save("safetensors", model, tmp_path / "safetensors"))
    for sizes in SPLITS:
        torch.testing.assert_close(
            logits_of(folder, make_parts(sizes), IDS), own_logits(model)
        )


# Pickles have the names of modules: those of granitemoe changed in transformers 5.23.
@pytest.mark.parametrize("family", some_families((*FEW, "granitemoe")))
@pytest.mark.parametrize("form", ["bin", "bin-old"])
def test_every_family_as_pickles(form: str, family: str, tmp_path: Path) -> None:
    model = make_model(family)
    torch.testing.assert_close(
        logits_of(save(form, model, tmp_path), make_parts([1, 2]), IDS),
        own_logits(model),
    )


@pytest.mark.parametrize("family", TOPS)
def test_a_folder_with_a_file_for_each_layer(family: str, tmp_path: Path) -> None:
    """Those of the older FM Inference hold the masks and tables of old releases, too."""

    def add_buffers(files: Files) -> None:
        for name in ("pytorch_0.pt", "pytorch_2.pt"):
            files[name]["attn.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.uint8)
            files[name]["attn.masked_bias"] = torch.tensor(-1e9)
            files[name]["attention.rotary_emb.inv_freq"] = torch.ones(4)

    model = make_model(family)
    folder = save("layers", model, tmp_path / "form", add_buffers)
    assert_equal(folder, save("safetensors", model, tmp_path / "safetensors"))
    torch.testing.assert_close(
        logits_of(folder, make_parts([2, 1]), IDS), own_logits(model)
    )


@pytest.mark.parametrize(
    ("family", "old", "new"),
    [
        ("opt", "model.decoder.", "decoder."),
        ("opt", "model.decoder.", ""),
        ("llama", "model.", ""),
        ("llama", "", "language_model."),
        ("llama", "model.", "model.language_model."),
        ("gpt2", "transformer.", ""),
        ("bloom", "transformer.", ""),
        ("gpt_neox", "gpt_neox.", ""),
        ("mpt", "transformer.", "model."),
    ],
)
@pytest.mark.parametrize("form", ["bin", "safetensors"])
def test_what_names_begin_with(
    form: str, family: str, old: str, new: str, tmp_path: Path
) -> None:
    def rename(files: Files) -> None:
        for tensors in files.values():
            for name in [name for name in tensors if name.startswith(old)]:
                tensors[new + name.removeprefix(old)] = tensors.pop(name)

    model = make_model(family)
    folder = save(form, model, tmp_path, rename)
    torch.testing.assert_close(
        logits_of(folder, make_parts([3]), IDS), own_logits(model)
    )


def test_old_names_and_buffers(tmp_path: Path) -> None:
    def age(files: Files) -> None:
        (tensors,) = files.values()
        for name in [name for name in tensors if ".ln_" in name]:
            old = name.replace("ln_1.weight", "ln_1.gamma").replace(
                "ln_1.bias", "ln_1.beta"
            )
            tensors[old] = tensors.pop(name)
        tensors["transformer.position_ids"] = torch.arange(8)
        tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.bool)

    model = make_model("gpt2")
    folder = save("bin", model, tmp_path, age)
    torch.testing.assert_close(
        logits_of(folder, make_parts([3]), IDS), own_logits(model)
    )


@pytest.mark.parametrize("form", ["bin", "bin-old"])
def test_tensors_that_lie_otherwise(form: str, tmp_path: Path) -> None:
    """Transposed ones, parts of larger ones, parameters, dicts around them, several
    protocols."""
    model = make_model("gpt2-untied")
    tensors: dict[str, Any] = dict(model.state_dict())
    for name, tensor in tensors.items():
        if name.endswith("c_fc.weight"):
            tensors[name] = tensor.t().contiguous().t()
        elif name.endswith("c_proj.weight"):
            tensors[name] = torch.cat([torch.zeros(3, tensor.shape[1]), tensor])[3:]
        elif "ln_1" in name:
            tensors[name] = torch.nn.Parameter(tensor)
    optimizer = {
        "state": {0: {"step": 3, "exp_avg": torch.zeros(5)}},
        "param_groups": [{}],
    }
    saved = {"state_dict": tensors, "optimizer": optimizer, "epoch": 2.0, "args": None}
    for protocol in (2, 4, 5):
        folder = tmp_path / str(protocol)
        model.config.save_pretrained(folder)
        torch.save(
            saved,
            folder / "pytorch_model.bin",
            pickle_protocol=protocol,
            _use_new_zipfile_serialization=form == "bin",
        )
        torch.testing.assert_close(
            logits_of(folder, make_parts([3]), IDS), own_logits(model)
        )


@pytest.mark.parametrize("form", ["safetensors", *FORMS])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_form_tells_its_type_and_size(
    form: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = save(form, make_model("opt").to(dtype), tmp_path)
    stored = find_stored_model(open_checkpoint(str(folder))).list_formats()
    assert {each for parts in stored.values() for each, _ in parts} == {Dense(dtype)}
    files = find_weights(folder).files
    assert {file.name for file in files} == {
        file.name for file in folder.iterdir() if file.suffix != ".json"
    }
    assert find_weight_files(str(folder)) == {
        file: file.stat().st_size for file in files
    }
    found = load(folder, make_parts([3])[0], dtype)
    assert all(
        w.plain.dtype == dtype for layer in found.load_layers() for w in layer.values()
    )


@pytest.mark.parametrize("form", FORMS)
def test_a_stage_reads_only_its_own_tensors(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(form, make_model("opt"), tmp_path)
    read: list[str] = []
    own = TensorFiles.read

    def spying(files: TensorFiles, name: str) -> torch.Tensor:
        read.append(name)
        return own(files, name)

    def spying_on_copies(files: TensorFiles, name: str, target: torch.Tensor) -> None:
        read.append(name)
        own_copy(files, name, target)

    own_copy = TensorFiles.copy
    monkeypatch.setattr(TensorFiles, "read", spying)
    monkeypatch.setattr(TensorFiles, "copy", spying_on_copies)
    list(load(folder, make_parts([1, 1, 1])[1]).load_layers())
    assert read and all(re.search(r"decoder\.layers\.1\.", name) for name in read)


def test_safetensors_count_where_a_folder_has_both(tmp_path: Path) -> None:
    model = make_model("llama")
    save("safetensors", model, tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"of another model")
    torch.testing.assert_close(
        logits_of(tmp_path, make_parts([3]), IDS), own_logits(model)
    )


@pytest.mark.parametrize("form", FORMS)
def test_one_value_makes_other_weights(form: str, tmp_path: Path) -> None:
    def change(files: Files) -> None:
        changed = [n for n in files if "1" in n] or [*files]
        tensors = files[changed[0]]
        name = next(name for name in tensors if "fc2.weight" in name)
        middle = tensors[name].flatten()
        middle[middle.numel() // 2] += 1
        tensors[name] = middle.view(tensors[name].shape)

    model = make_model("opt")
    pair = [
        save(form, model, tmp_path / "a"),
        save(form, model, tmp_path / "b", change),
    ]
    again = tmp_path / "c"
    shutil.copytree(pair[0], again)
    digests, others, equal = (
        digest_weight_files(open_checkpoint(str(folder))) for folder in (*pair, again)
    )
    assert digests == equal and name_different_files(digests, others).count(",") == 0
    assert name_different_files(digests, others) in digests
    config = EngineConfig(model=str(pair[0]))
    print_of = [
        plan_ahead(config, open_checkpoint(str(folder))).fingerprint()
        for folder in pair
    ]
    assert print_of[0]["the model"] != print_of[1]["the model"]
    assert open_model(config).folder == pair[0]


def test_a_run_over_ranks_answers_the_same(tmp_path: Path) -> None:
    """The command from end to end: check, then a run of three ranks, then one of safetensors."""
    model = make_model("opt")
    rows = tmp_path / "rows.jsonl"
    row = {"prompt": "abc", "max_tokens": 5, "temperature": 0, "logprobs": 1}
    rows.write_text(json.dumps(row))
    texts = []
    for form, ranks in (
        ("safetensors", 1),
        ("layers", 3),
        *[("bin-shards", 2)] * IS_ALL,
    ):
        folder = save(form, model, tmp_path / form)
        save_byte_tokenizer(folder)
        flags = [rows, "--model-name", folder, "--dtype", "float32", "--budget", "512"]
        checked = run_forked(["check", *flags, "--world-size", ranks])
        assert checked.returncode == 0, checked.stderr
        output = tmp_path / f"{form}.jsonl"
        run = run_forked(["run", *flags, "--world-size", ranks, "--output", output])
        assert run.returncode == 0, run.stderr
        texts.append(json.loads(output.read_text())["result"]["choices"][0]["text"])
    assert len(texts) > 1 and len({*texts}) == 1


@pytest.fixture(scope="module")
def large(tmp_path_factory: Any) -> Iterator[dict[str, Path]]:
    """Give an OPT of 38 million parameters in float16, in every form."""
    config = transformers.OPTConfig(
        vocab_size=512,
        hidden_size=512,
        ffn_dim=2048,
        num_hidden_layers=12,
        num_attention_heads=8,
        word_embed_proj_dim=512,
        max_position_embeddings=64,
    )
    model = transformers.OPTForCausalLM(config).half()
    top = tmp_path_factory.mktemp("large")
    yield {form: save(form, model, top / form) for form in ("safetensors", *FORMS)}


def _measure(folder: Path, part: Part, dtype: torch.dtype, told: Connection) -> None:
    """Load a part and touch all of it; tell the peak of memory it took, its size, its
    largest."""
    checkpoint = open_checkpoint(str(folder))
    # imports, and torch's own pages
    _touch(groups_of(load(folder, Part(0, 1, 0, 0), dtype)))
    for each in (torch.float32, torch.float16):  # threads
        torch.ones(1 << 20, dtype=torch.float16).to(each).sum()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is held
    before = _memory("VmRSS")
    found = open_weights(checkpoint, part, holding=Holding(dtype), device=CPU, seed=0)
    groups = groups_of(found)
    _touch(groups)
    largest = max(weight.num_bytes for each in groups for weight in each.values())
    told.send((_memory("VmHWM") - before, found.num_bytes, largest))


def _touch(groups: list[Weights]) -> None:
    for each in groups:
        assert all(bool(weight.plain.sum().isfinite()) for weight in each.values())


def _memory(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        pytest.param(form, torch.float32 if is_wider else torch.float16, marks=marks)
        for form in ("safetensors", *FORMS)
        for is_wider, marks in ((True, []), (False, [] if form in STORED else [more]))
    ],
)
def test_a_rank_takes_its_share_and_one_tensor(
    form: str, dtype: torch.dtype, large: dict[str, Path]
) -> None:
    """Joined and widened tensors left their part of the file in memory: twice the share."""
    context = fork_server()
    parts = [part for sizes in ([4, 4, 4], [12], [6, 6]) for part in make_parts(sizes)]
    # the outer stages, or an inner one
    some = parts[0:3:2] if form in STORED[:2] else parts[1:2]
    for part in parts if IS_ALL else some:
        mine, theirs = context.Pipe()
        process = context.Process(
            target=_measure, args=(large[form], part, dtype, theirs)
        )
        process.start()
        theirs.close()
        peak, share, largest = mine.recv()
        process.join()
        others = 2 << 20  # what Python and torch come to need meanwhile
        assert peak <= 1.1 * share + largest + others, (
            part,
            peak / share,
            largest / share,
        )


@pytest.mark.parametrize("form", ["safetensors", *FORMS])
def test_a_folder_may_be_named_from_where_one_is(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its tensors were said to be missing."""
    save(form, make_model("opt"), tmp_path / "here")
    monkeypatch.chdir(tmp_path)
    check_tensors(open_checkpoint("here"))
    check_tensors(open_checkpoint("./here"))
