"""Runs with `--quantize`, and folders that `fminfer quantize` has written."""

from __future__ import annotations

import json
import shutil
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner

import fminfer
from fminfer.cli.app import main
from fminfer.core.config import EngineConfig
from fminfer.core.errors import CheckpointError, UsageError
from fminfer.models.checkpoint import open_checkpoint
from fminfer.plan.planning import plan_ahead
from tests.conftest import make_model, more, save_byte_tokenizer
from tests.forked import fork_server
from tests.gguf_building import SAMPLES

# Joined, of heads in turns, stacked experts, transposed and tied, transposed experts, latent.
NAMES = ["llama", "gpt_neox", "mixtral", "gpt2", "gpt_oss", "deepseek_v3", "gemma2"]
NAMES += ["apertus"]  # some of its tensors have no dimension
PROMPTS = [[3 + (7 * i + n) % 200 for i in range(9 + 3 * n)] for n in range(5)]
LINES = [
    {"prompt": ids, "max_tokens": 6, "ignore_eos": True, "logprobs": 2}
    for ids in PROMPTS
]
LINES = [
    line | {"temperature": 0.7 * (number % 2), "seed": number, "return_token_ids": True}
    for number, line in enumerate(LINES)
]


def save(name: str, folder: Path) -> Path:
    make_model(name).bfloat16().save_pretrained(folder)
    save_byte_tokenizer(folder)
    return folder


def answers(
    model: Path, lines: list[dict[str, Any]] = LINES, **options: Any
) -> list[Any]:
    """Return the choices of lines, in their order."""
    told = {"dtype": "float32", "budget": 1024} | options
    engine = fminfer.Engine(str(model), **told)
    records = sorted(engine.run(lines), key=lambda record: record.line.number)
    engine.close()
    return [record.to_dict()["result"]["choices"] for record in records]


def equal_up_to(found: list[Any], expected: list[Any], error: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[0]["token_ids"] == theirs[0]["token_ids"]
        values = (each[0]["logprobs"]["token_logprobs"] for each in (ours, theirs))
        assert [*map(float, next(values))] == pytest.approx([*next(values)], abs=error)


@pytest.mark.parametrize(
    ("name", "to"),  # each name with one of both, in turns
    [(name, ("int8", "int4")[n % 2]) for n, name in enumerate(NAMES)]
    + [
        pytest.param(name, ("int4", "int8")[n % 2], marks=more)
        for n, name in enumerate(NAMES)
    ],
)
def test_a_written_folder_answers_as_the_model_quantized_at_load(
    name: str, to: str, tmp_path: Path
) -> None:
    """Our tensors are stored by our names, joined and laid out."""
    model = save(name, tmp_path / "model")
    folder = tmp_path / "quantized"
    told = CliRunner().invoke(
        main,
        ["quantize", "--model-name", str(model), "--output", str(folder), "--to", to],
    )
    assert told.exit_code == 0, told.output
    equal_up_to(answers(folder), answers(model, quantize=to), 1e-6)
    plan = plan_ahead(
        EngineConfig(str(folder), dtype="float32", budget=256), open_at(folder)
    )
    assert plan.held_in.startswith(to) and plan.formats["head"].name.startswith("int8")


def open_at(folder: Path) -> Any:
    return open_checkpoint(str(folder))


def test_ranks_rows_put_back_and_plain_torch_answer_alike(tmp_path: Path) -> None:
    model = save("llama", tmp_path)
    expected = answers(model, quantize="int4")
    equal_up_to(answers(model, quantize="int4", world_size=2), expected, 1e-5)
    equal_up_to(
        answers(model, quantize="int4", budget=64, chunk_size=16), expected, 1e-5
    )
    equal_up_to(answers(model, quantize="int4", kernels="off"), expected, 1e-5)
    equal_up_to(
        answers(model, dtype="int4"), answers(model, dtype="auto", quantize="int4"), 0
    )
    assert answers(model) != expected, "bits change answers"


def test_random_weights_are_quantized_as_well(tmp_path: Path) -> None:
    folder = tmp_path / "random"
    config = transformers.AutoConfig.for_model(
        "llama",
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        vocab_size=256,
    )
    config.save_pretrained(tmp_path / "config")
    flags = [
        "--random-init",
        str(tmp_path / "config"),
        "--output",
        str(folder),
        "--to",
        "int4",
    ]
    assert CliRunner().invoke(main, ["quantize", *flags]).exit_code == 0
    (choices, *_) = answers(folder, skip_tokenizer_init=True)
    assert len(choices[0]["token_ids"]) == 6


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    model = save("llama", tmp_path / "model")
    folder = tmp_path / "quantized"

    def quantize(name: Path, output: Path) -> tuple[int, str]:
        flags = ["quantize", "--model-name", str(name), "--output", str(output)]
        told = CliRunner().invoke(main, flags)
        return told.exit_code, told.output

    assert quantize(model, folder)[0] == 0
    status, told = quantize(model, folder)
    assert status == 0 and f"{folder} is already there" in told
    for change in (lambda c: c.update(to="int4"), lambda c: c.update(source="another")):
        with_note = json.loads((folder / "config.json").read_text())
        change(note := dict(with_note["quantization_config"]))
        text = json.dumps(with_note | {"quantization_config": note})
        other = shutil.copytree(
            folder, tmp_path / f"of_{note['to']}_{note['source'][:7]}"
        )
        (other / "config.json").write_text(text)
        status, told = quantize(model, other)
        assert status == 2 and "is there already; name a folder" in told
    status, told = quantize(folder, tmp_path / "twice")
    assert status == 1 and "is quantized already" in told
    assert not (tmp_path / "twice").exists() and not [*tmp_path.glob(".*")], (
        "no draft is left"
    )
    file = folder / "model-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert quantize(model, folder)[0] == 2, "it is not there, but broken"
    with pytest.raises(CheckpointError, match="is broken"):
        answers(folder)


def test_a_folder_has_the_tokenizer_that_was_named_and_all_templates(
    tmp_path: Path,
) -> None:
    """The model's own files were written over those of --tokenizer; further templates
    were not."""
    model = save("llama", tmp_path / "model")
    named = tmp_path / "named"
    (model / "added_tokens.json").write_text('{"<mine>": 256}')
    named.mkdir()
    save_byte_tokenizer(named)
    (named / "additional_chat_templates").mkdir()
    (named / "additional_chat_templates" / "tool_use.jinja").write_text("x")
    (named / "tokenizer.json").write_text((named / "tokenizer.json").read_text() + " ")
    flags = [
        "--model-name",
        str(model),
        "--tokenizer",
        str(named),
        "--output",
        str(tmp_path / "q"),
    ]
    assert CliRunner().invoke(main, ["quantize", *flags]).exit_code == 0
    for name in ("tokenizer.json", "additional_chat_templates/tool_use.jinja"):
        assert (tmp_path / "q" / name).read_bytes() == (named / name).read_bytes()
    assert not (tmp_path / "q" / "added_tokens.json").exists()


def test_an_adapter_that_was_left_out_is_not_in_the_folder(tmp_path: Path) -> None:
    """Its config was copied, so that the folder was refused."""
    model = save("llama", tmp_path / "model")
    folder = tmp_path / "q"
    (model / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    flags = ["quantize", "--model-name", str(model), "--output", str(folder)]
    assert CliRunner().invoke(main, flags).exit_code == 1
    assert CliRunner().invoke(main, [*flags, "--without-adapter"]).exit_code == 0
    expected = answers(model, quantize="int8", without_adapter=True)
    equal_up_to(answers(folder), expected, 1e-6)


def test_a_gguf_file_in_floats_is_quantized(tmp_path: Path) -> None:
    file = SAMPLES / "llama.gguf"
    folder = tmp_path / "q"
    flags = ["--model-name", str(file), "--output", str(folder), "--quantize", "int4"]
    assert CliRunner().invoke(main, ["quantize", *flags]).exit_code == 0
    equal_up_to(answers(folder), answers(file, quantize="int4"), 1e-6)
    flags = [
        "--model-name",
        str(SAMPLES / "kforms-q2_k.gguf"),
        "--output",
        str(tmp_path / "no"),
    ]
    told = CliRunner().invoke(main, ["quantize", *flags])
    assert told.exit_code == 1 and "is quantized already" in told.output


@pytest.mark.parametrize("to", ["int8", "int4"])
def test_values_that_are_quantized_stay_so_beside_queries(to: str) -> None:
    """Of one matrix, some rows are quantized and some were."""
    file = SAMPLES / "kforms-q3_k_m.gguf"  # of few tokens
    lines = [
        line | {"prompt": [each % 20 for each in line["prompt"]]} for line in LINES
    ]
    found = answers(file, lines, quantize=to)
    assert answers(file, lines) != found
    equal_up_to(found, answers(file, lines, quantize=to, kernels="off"), 1e-4)


def test_a_folder_with_another_config_is_told_of(tmp_path: Path) -> None:
    model = save("llama", tmp_path / "model")
    folder = tmp_path / "q"
    flags = ["quantize", "--model-name", str(model), "--output"]
    missing = CliRunner().invoke(main, flags[:-1])
    assert missing.exit_code == 2 and "Missing option '--output'" in missing.output
    assert CliRunner().invoke(main, [*flags, str(folder)]).exit_code == 0
    with pytest.raises(
        CheckpointError, match=r"int8-32' as U8: fminfer quantize wrote it\. Run it"
    ):
        answers(folder, model_config=str(model))


def test_what_stays_in_floats_is_as_exact_as_it_was(tmp_path: Path) -> None:
    """Norms and biases of a float32 checkpoint were rounded to the config's dtype."""
    model = make_model("llama-biases")
    model.config.dtype = torch.bfloat16
    model.save_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text()) | {
        "dtype": "bfloat16"
    }
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    save_byte_tokenizer(tmp_path / "model")
    flags = ["--model-name", str(tmp_path / "model"), "--output", str(tmp_path / "q")]
    assert CliRunner().invoke(main, ["quantize", *flags]).exit_code == 0
    equal_up_to(
        answers(tmp_path / "q"), answers(tmp_path / "model", quantize="int8"), 1e-6
    )


def test_a_quantize_that_changes_nothing_is_refused(tmp_path: Path) -> None:
    model = save("llama", tmp_path / "model")
    folder = tmp_path / "q"
    flags = [
        "quantize",
        "--model-name",
        str(model),
        "--output",
        str(folder),
        "--to",
        "int8",
    ]
    assert CliRunner().invoke(main, flags).exit_code == 0
    with pytest.raises(
        UsageError, match=r"int4 changes no weight of .*they are quantized already"
    ):
        answers(folder, quantize="int4")
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"]["version"] = 2
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(
        CheckpointError, match=r"a later fminfer has quantized .*upgrade fminfer"
    ):
        answers(folder)


def test_an_output_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    model = save("llama", tmp_path / "model")
    (tmp_path / "file").write_text("")
    flags = ["--model-name", str(model), "--output", str(tmp_path / "file" / "q")]
    told = CliRunner().invoke(main, ["quantize", *flags])
    assert told.exit_code == 1 and "cannot be written" in told.output, told.output


def test_the_fingerprint_knows_the_bits(tmp_path: Path) -> None:
    """Answers of a model in 4 bits are kept for it alone, whatever option named them."""
    model = save("llama", tmp_path)

    def fingerprint(**options: Any) -> dict[str, str]:
        config = EngineConfig(str(model), budget=256, **options)
        return plan_ahead(config, open_checkpoint(str(model))).fingerprint()

    plain = fingerprint()
    eight = fingerprint(dtype="int8")
    four = fingerprint(quantize="int4")
    assert "--quantize" not in plain
    assert (eight["--quantize"], four["--quantize"]) == ("int8", "int4")
    assert fingerprint(quantize="int8") == eight
    with pytest.raises(
        UsageError, match="--dtype int8 and --quantize int4 contradict each other"
    ):
        EngineConfig(str(model), dtype="int8", quantize="int4")


def tell_peak(folder: Path, options: dict[str, Any], to: Connection) -> None:
    told: dict[str, Any] = {
        "dtype": "float32",
        "budget": 256,
        "skip_tokenizer_init": True,
    }
    engine = fminfer.Engine(str(folder), **told, **options)
    status = Path("/proc/self/status").read_text()
    to.send(
        (
            int(status.split("VmHWM:")[1].split()[0]) * 1024,
            engine.facts.measured.weight_bytes,
        )
    )
    engine.close()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a model of 53 million parameters in bfloat16."""
    folder = tmp_path_factory.mktemp("large")
    config = transformers.AutoConfig.for_model(
        "llama",
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        vocab_size=1024,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16
        )
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    model.save_pretrained(folder)
    return folder


def test_loading_8_bits_takes_no_more_memory_than_16(large: Path) -> None:
    """Each tensor is quantized as it is read: at no time are all there in 16 bits."""

    def peak(**options: Any) -> tuple[int, int]:
        ours, theirs = Pipe(duplex=False)
        process = fork_server().Process(target=tell_peak, args=(large, options, theirs))
        process.start()
        theirs.close()
        found: tuple[int, int] = ours.recv()
        process.join()
        return found

    (of_16, held_16), (of_8, held_8), (of_4, held_4) = (
        peak(**each) for each in ({}, {"quantize": "int8"}, {"quantize": "int4"})
    )
    assert held_8 < 0.55 * held_16 and held_4 < 0.35 * held_16
    most = of_16 - 0.3 * held_16
    assert of_8 < most and of_4 < most, "half of what 16 bits take is not there"


def test_check_and_a_summary_tell_the_format(tmp_path: Path) -> None:
    model = save("llama", tmp_path / "model")
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    flags = [
        str(lines),
        "--model-name",
        str(model),
        "--quantize",
        "int4",
        "--dtype",
        "float32",
    ]
    checked = CliRunner().invoke(main, ["check", *flags])
    assert "float32 with int4 weights" in checked.output, checked.output
    ran = CliRunner().invoke(main, ["run", *flags])
    assert "float32 with int4 weights" in ran.output, ran.output
