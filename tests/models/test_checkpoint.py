"""Loading: what is wrong with a checkpoint is named before the first row."""

from __future__ import annotations

import copy
import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import fminfer
from fminfer.core.errors import CheckpointError, UsageError
from fminfer.core.impostors import broken_file_error
from fminfer.core.partition import Part
from fminfer.models.checkpoint import open_checkpoint, open_random_checkpoint
from fminfer.models.holding import Holding
from fminfer.models.known_sizes import DEMO_MODEL, short_name
from fminfer.models.layer_source import open_weights
from fminfer.models.origins import check_tensors
from tests.conftest import make_model, save_byte_tokenizer
from tests.encoder_families import make_encoder, save
from tests.forward.test_transformer import logits_of

CPU = torch.device("cpu")
IDS = [list(range(20)), [7, 3]]


def load(folder: Path) -> list[torch.Tensor]:
    """Load a model and return its logits of IDS, one row of (tokens, vocab)."""
    return logits_of(
        folder, [Part(0, 1, 0, len(open_checkpoint(str(folder)).model.layers))], IDS
    )


def own_logits(model: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(torch.tensor(row)[None]).logits[0] for row in IDS]


def damage(source: Path, target: Path, change: Any) -> Path:
    """Copy a checkpoint with its tensors changed."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((source / name).read_bytes())
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize(
    "name", ["/models/nope", "./nope", "a/b/c", "no such model", "-x-"]
)
def test_a_wrong_path_is_told_in_plain_words(name: str) -> None:
    """It ended with the hub's "Repo id must be in the form …"."""
    with pytest.raises(
        CheckpointError, match=r"is no folder here.*Give the folder"
    ) as caught:
        open_checkpoint(name)
    assert "epo id" not in str(caught.value)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"is a file; give its folder"):
        open_checkpoint(str(tmp_path / "model.safetensors"))


def test_a_file_of_requests_is_no_model(tmp_path: Path) -> None:
    """`fminfer serve r.jsonl` was told to give the folder of the requests."""
    (tmp_path / "r.jsonl").touch()
    with pytest.raises(CheckpointError, match=r"is a file; give a model's folder"):
        open_checkpoint(str(tmp_path / "r.jsonl"))


@pytest.mark.parametrize("name", ["0_BERT", "0_Transformer", "a model"])
def test_the_command_for_a_model_in_a_folder_below_helps(
    name: str, tmp_path: Path
) -> None:
    """Folders of sentence-transformers of 2020 had "no config.json", and no other remedy."""
    folder = tmp_path / "old one"
    save(make_encoder("bert"), folder / name)
    modules = [
        {"path": name, "type": "sentence_transformers.models.Transformer"},
        {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        '{"pooling_mode_mean_tokens": true}'
    )

    with pytest.raises(CheckpointError, match=f"Its model lies in {name}") as caught:
        open_checkpoint(str(folder))
    command = str(caught.value).partition("Move it up: ")[2]
    subprocess.run(["bash", "-c", command], check=True)
    sentence = open_checkpoint(str(folder)).sentence
    assert sentence is not None and sentence.pooling is not None
    check_tensors(open_checkpoint(str(folder)))


def test_models_in_folders_below_are_named(
    llama_checkpoint: Any, tmp_path: Path
) -> None:
    """A folder of training: its checkpoints hold the models."""
    shutil.copytree(llama_checkpoint[0], tmp_path / "checkpoint-500")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"has no config\.json") as caught:
        open_checkpoint(str(tmp_path))
    assert f"give one: --model-name {tmp_path}/checkpoint-500" in str(caught.value)


def test_a_model_that_was_saved_without_its_head(
    llama_checkpoint: Any, tmp_path: Path
) -> None:
    """It was to be fetched again, which brings no head."""
    folder = damage(
        llama_checkpoint[0], tmp_path, lambda tensors: tensors.pop("lm_head.weight")
    )
    with pytest.raises(CheckpointError, match="saved without its head") as caught:
        load(folder)
    assert "set tie_word_embeddings to true" in str(caught.value)


def test_a_file_that_may_not_be_read_is_not_to_be_fetched_again() -> None:
    error = broken_file_error(
        Path("m.safetensors"), PermissionError(13, "Permission denied")
    )
    assert "m.safetensors cannot be read" in str(error) and "chmod" in str(error)
    assert "fetch" not in str(error)


@pytest.mark.parametrize(
    ("dtype", "value", "says", "never"),
    [
        (
            "float32",
            math.nan,
            "hold nan or infinity, as in 'model.layers.1.mlp.up",
            "--dtype",
        ),
        (
            "float16",
            math.inf,
            "hold nan or infinity, as in 'model.layers.1.mlp.up",
            "--dtype",
        ),
        ("float32", 3e38, "overflow even in float32", "--dtype"),
        ("float16", 65504.0, "Try --dtype float32 or bfloat16", "nan or infinity,"),
    ],
)
def test_the_remedy_for_nan_can_help(
    dtype: str,
    value: float,
    says: str,
    never: str,
    llama_checkpoint: Any,
    tmp_path: Path,
) -> None:
    """In float32, and for weights that hold nan, `--dtype float32` was the remedy."""

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][:] = value

    folder = damage(llama_checkpoint[0], tmp_path, spoil)
    options: dict[str, Any] = {"dtype": dtype, "kernels": "off"}
    with fminfer.Engine(str(folder), **options) as engine:
        (record,) = engine.run([{"prompt": [1, 2, 3], "max_tokens": 1}])
    assert record.error is not None and record.error.code == "nan_logits"
    assert says in record.error.message and never not in record.error.message


def test_a_missing_tensor_is_fatal_and_named(
    llama_checkpoint: Any, tmp_path: Path
) -> None:
    """The ancestor said "randomly initialized" and went on."""
    name = "model.layers.1.mlp.up_proj.weight"
    folder = damage(llama_checkpoint[0], tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=name):
        load(folder)


def test_an_unexpected_tensor_is_fatal_and_named(
    llama_checkpoint: Any, tmp_path: Path
) -> None:
    extra = {"model.layers.9.mlp.up_proj.weight": torch.zeros(2)}
    folder = damage(
        llama_checkpoint[0], tmp_path, lambda tensors: tensors.update(extra)
    )
    with pytest.raises(CheckpointError, match=r"model\.layers\.9"):
        load(folder)


def test_a_wrong_shape_is_fatal_and_named(
    llama_checkpoint: Any, tmp_path: Path
) -> None:
    extra = {"model.norm.weight": torch.zeros(2)}
    folder = damage(
        llama_checkpoint[0], tmp_path, lambda tensors: tensors.update(extra)
    )
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*\(2,\).*\(64,\)"):
        load(folder)


def test_a_truncated_file_is_fatal_and_named(
    llama_checkpoint: Any, tmp_path: Path
) -> None:
    folder = damage(llama_checkpoint[0], tmp_path, lambda tensors: None)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is broken"):
        load(folder)


def test_headers_alone_tell_what_loading_refuses(
    llama_checkpoint: Any, tmp_path: Path
) -> None:
    """`check` passed such folders, and a run failed once gigabytes were read."""
    weights = load_file(llama_checkpoint[0] / "model.safetensors")
    name = next(iter(weights))
    changed = {
        "lacks 1 of the model's tensors": {
            k: v for k, v in weights.items() if k != name
        },
        "does not have": weights | {"model.extra": torch.zeros(2)},
        "has shape": weights | {name: torch.zeros(3, 3)},
    }
    check_tensors(open_checkpoint(str(llama_checkpoint[0])))
    for number, (says, tensors) in enumerate(changed.items()):
        folder = tmp_path / str(number)
        shutil.copytree(llama_checkpoint[0], folder)
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=says):
            check_tensors(open_checkpoint(str(folder)))
        (folder / "model.safetensors").write_bytes(b"\x08")
        with pytest.raises(CheckpointError, match="is broken"):
            check_tensors(open_checkpoint(str(folder)))


def test_no_weights_no_config_no_tokenizer(
    llama_checkpoint: Any, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="config"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "config.json").write_bytes(
        (llama_checkpoint[0] / "config.json").read_bytes()
    )
    with pytest.raises(CheckpointError, match=r"no \.safetensors"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match="tokenizer"):
        fminfer.Engine(str(tmp_path))


def test_another_models_tokenizer(tmp_path: Path) -> None:
    """One with more tokens cannot be the model's own; tokens added later may lack a row."""
    config = transformers.LlamaConfig(
        vocab_size=200,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    save_byte_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match=r"has 256 tokens.*the model 200"):
        fminfer.Engine(str(tmp_path))
    config.vocab_size = 256
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.add_tokens(["<|later|>"]) == 1
    tokenizer.save_pretrained(tmp_path)
    engine = fminfer.Engine(str(tmp_path))
    records = list(
        engine.run([{"prompt": "a", "max_tokens": 1}, {"prompt": "a<|later|>"}])
    )
    codes = {
        record.line.number: record.error and record.error.code for record in records
    }
    assert codes == {1: None, 2: "token_out_of_range"}
    engine.close()


def test_an_architecture_that_does_not_run_is_named_with_those_that_do(
    tmp_path: Path,
) -> None:
    transformers.MambaConfig().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"'mamba' has layers with a state"):
        open_checkpoint(str(tmp_path))


def test_shards_and_a_base_model_prefix(tmp_path: Path) -> None:
    """gpt2's own files leave `transformer.` out and hold masks; big models come in pieces."""
    model = make_model("gpt2")
    model.save_pretrained(tmp_path)
    tensors = {
        name.removeprefix("transformer."): tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 256, 256)
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    for piece in range(3):
        part = {name: tensors[name] for name in names[piece::3]}
        save_file(
            part,
            tmp_path / f"model-{piece}-of-3.safetensors",
            metadata={"format": "pt"},
        )
    torch.testing.assert_close(load(tmp_path), own_logits(model))


def test_a_link_to_a_file_that_is_gone(llama_checkpoint: Any, tmp_path: Path) -> None:
    """As in a cache of the hub of which something was deleted."""
    shutil.copytree(llama_checkpoint[0], tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(
        CheckpointError, match=r"model.safetensors is broken .*; fetch it again"
    ):
        check_tensors(open_checkpoint(str(tmp_path)))


def test_weights_that_a_folder_holds_twice(
    llama_checkpoint: Any, tmp_path: Path
) -> None:
    """Mistral's repositories hold consolidated.safetensors, in another format, beside
    the model."""
    folder = damage(llama_checkpoint[0], tmp_path, lambda tensors: None)
    save_file(
        {"tok_embeddings.weight": torch.zeros(2)}, folder / "consolidated.safetensors"
    )
    load(folder)
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    names = load_file(folder / "part.safetensors")
    index = {"weight_map": dict.fromkeys(names, "part.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    load(folder)
    (folder / "part.safetensors").unlink()
    with pytest.raises(
        CheckpointError,
        match=r"lacks part\.safetensors, which its model\.safetensors\.index",
    ):
        load(folder)


def test_old_names_of_gpt_neox(tmp_path: Path) -> None:
    """Published GPT-NeoX files call the head embed_out."""
    model = make_model("gpt_neox")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = [name for name in tensors if name in ("lm_head.weight", "embed_out.weight")]
    tensors["embed_out.weight"] = tensors.pop(head[0])
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(load(tmp_path), own_logits(model))


def test_tied_embeddings(tmp_path: Path) -> None:
    config = make_model("llama").config
    config.tie_word_embeddings = True
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    torch.testing.assert_close(load(tmp_path), own_logits(model))


def save_tied(folder: Path, family: str, *, num_shards: int, change: float) -> Any:
    """Save a tied model with a head of its own in the files, which differs by so much."""
    config = make_model(family).config
    config.tie_word_embeddings = True
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    head = model.get_output_embeddings().weight.detach().clone()
    head[7, 3] += change
    tensors["lm_head.weight"] = head
    (folder / "model.safetensors").unlink()
    for shard in range(num_shards):  # the head is in another than the embedding
        part = {name: tensors[name] for name in sorted(tensors)[shard::num_shards]}
        name = "model.safetensors" if num_shards == 1 else f"model-{shard}.safetensors"
        save_file(part, folder / name, metadata={"format": "pt"})
    return model


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_a_tied_head_that_differs_is_computed(
    family: str, num_shards: int, tmp_path: Path
) -> None:
    """It was dropped in silence: logprobs were off by 1.7 (llama), 1.8 (gpt2) and 2.4 (opt)."""
    model = save_tied(tmp_path, family, num_shards=num_shards, change=0.5)
    model.config.tie_word_embeddings = False
    head = copy.deepcopy(model.get_output_embeddings())
    head.weight.data[7, 3] += 0.5
    model.set_output_embeddings(head)
    torch.testing.assert_close(load(tmp_path), own_logits(model))


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_an_equal_copy_of_a_tied_head_is_fine(
    family: str, num_shards: int, tmp_path: Path
) -> None:
    model = save_tied(tmp_path, family, num_shards=num_shards, change=0.0)
    torch.testing.assert_close(load(tmp_path), own_logits(model))


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_shards_that_overlap_are_refused_by_name(family: str, tmp_path: Path) -> None:
    """Experts that came twice counted as two: others were left without values."""
    model = make_model(family)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    wanted = "experts.0" if family == "mixtral" else "up_proj"
    twice = next(name for name in names if wanted in name)
    cut = names.index(twice) + 1
    first = {name: tensors[name] for name in names[:cut]}
    second = {name: tensors[name] for name in names[cut:]} | {twice: tensors[twice] + 1}
    save_file(first, tmp_path / "a.safetensors", metadata={"format": "pt"})
    save_file(second, tmp_path / "b.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=f"{twice}.*a.safetensors and b.safetensors"
    ):
        load(tmp_path)
    homes = dict.fromkeys(first, "a.safetensors") | dict.fromkeys(
        second, "b.safetensors"
    )
    index = {"weight_map": homes | {twice: "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    torch.testing.assert_close(load(tmp_path), own_logits(model))


def test_progress_ends_at_the_whole(llama_checkpoint: Any) -> None:
    seen: list[tuple[int, int]] = []
    checkpoint = open_checkpoint(str(llama_checkpoint[0]))
    found = open_weights(
        checkpoint,
        Part(0, 1, 0, 3),
        holding=Holding(torch.float32),
        device=CPU,
        seed=1,
        on_progress=lambda done, total: seen.append((done, total)),
    )
    found.load_exit(found.load_entry())
    assert len([*found.load_layers()]) == 3
    assert len(seen) > 10 and seen[-1][0] == seen[-1][1]
    assert seen == sorted(seen)


def test_random_weights_from_a_size_a_file_or_a_folder(tmp_path: Path) -> None:
    fields = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "vocab_size": 256,
    }
    fields |= {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    drawn = []
    for name, seed in [(tmp_path, 1), (tmp_path / "config.json", 1), (tmp_path, 2)]:
        checkpoint = open_random_checkpoint(str(name))
        part = Part(0, 1, 0, 2)
        found = open_weights(
            checkpoint, part, holding=Holding(torch.float32), device=CPU, seed=seed
        )
        drawn.append([*found.load_layers()][1]["qkv.weight"].plain)
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert float(drawn[0].std()) == pytest.approx(0.02, rel=0.1)
    assert open_random_checkpoint("bloom-560m").config.num_hidden_layers == 24
    with pytest.raises(CheckpointError, match="llama-160m"):
        open_random_checkpoint("no-such-size")
    with pytest.raises(UsageError, match="--model-name and --random-init contradict"):
        fminfer.Engine("x", random_init="y")


def test_a_generation_config_may_name_several_ends(
    llama_checkpoint: Any, tmp_path: Path
) -> None:
    folder = damage(llama_checkpoint[0], tmp_path, lambda tensors: None)
    assert open_checkpoint(str(folder)).eos_ids == frozenset()
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert open_checkpoint(str(folder)).eos_ids == {3, 4}


def test_a_device_that_is_not_here(llama_checkpoint: Any) -> None:
    save_byte_tokenizer(llama_checkpoint[0])
    with pytest.raises(UsageError, match="cuda:77"):
        fminfer.Engine(str(llama_checkpoint[0]), device="cuda:77")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("models/llama-x", "llama-x"),
        ("models/llama-x/", "llama-x"),
        ("models/../models/./llama-x", "llama-x"),
        ("link", "link"),
        ("hub/models--org--a-b/snapshots/0123", "org/a-b"),
        ("models/llama-x/config.json", "llama-x"),
        ("org/of-the-hub", "org/of-the-hub"),
        ("llama-160m", "llama-160m"),
    ],
)
def test_what_a_model_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, name: str
) -> None:
    """Records, reports and /v1/models had a folder's whole path, such as /home/me/llama-x."""
    for folder in ("models/llama-x", "hub/models--org--a-b/snapshots/0123"):
        shutil.copytree(DEMO_MODEL, tmp_path / folder)
    (tmp_path / "link").symlink_to("models/llama-x")
    monkeypatch.chdir(tmp_path)
    assert short_name(path) == name
    if path.startswith("/") or (tmp_path / path).is_dir():
        assert (
            open_checkpoint(path).name
            == open_checkpoint(str(tmp_path / path)).name
            == name
        )
    monkeypatch.chdir("models/llama-x")
    assert open_checkpoint(".").name == "llama-x"
