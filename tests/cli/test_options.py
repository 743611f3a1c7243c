"""The options of the commands: each in a group of the help, each default written once."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import fminfer
from fminfer.cli.app import main
from fminfer.cli.config_file import read_settings
from fminfer.cli.flags import GroupedCommand, GroupedOption
from fminfer.cli.old_command_lines import COMMANDS, FLAGS
from fminfer.cli.option_table import COMMON
from fminfer.core.config import EngineConfig, make_config
from fminfer.core.errors import UsageError
from fminfer.core.option import GROUPS
from fminfer.files.journal_rows import describe_changes
from fminfer.models.checkpoint import open_model
from fminfer.pipeline.ranks import RankConfig
from fminfer.plan.planning import plan_ahead
from fminfer.server.settings import ServerSettings

GROUPED = {
    name: each
    for name, each in main.commands.items()
    if isinstance(each, GroupedCommand)
}
MANY = 8  # options from which a flat list is hard to read


def options_of(command: click.Command) -> list[click.Option]:
    return [param for param in command.params if isinstance(param, click.Option)]


def sections_of(name: str, flag: str = "") -> dict[str, list[str]]:
    """Return the flags of each section of a command's help, whole if it has more."""
    found: dict[str, list[str]] = {}
    flag = flag or ("--help-all" if name in COMMON else "--help")
    for line in CliRunner().invoke(main, [name, flag]).output.splitlines():
        if re.fullmatch(r"\w.*:", line):
            found[line[:-1]] = []
        elif found and (flags := re.match(r"  (-.*?)(  |$)", line)):
            found[[*found][-1]] += re.findall(r"(?<!\w)--?[a-z][\w-]*", flags[1])
    return found


def test_every_command_with_many_options_shows_groups() -> None:
    assert {"run", "serve", "check", "bench", "submit"} <= GROUPED.keys()
    flat = main.commands.keys() - GROUPED.keys()
    assert not [name for name in flat if len(options_of(main.commands[name])) > MANY]


@pytest.mark.parametrize("name", GROUPED)
def test_every_option_belongs_to_a_group(name: str) -> None:
    options = options_of(GROUPED[name])
    assert not [each.name for each in options if not isinstance(each, GroupedOption)]
    assert not [each.name for each in options if not each.help]
    options = [each for each in options if not each.hidden]
    sections = sections_of(name)
    assert [*sections] == [group for group in GROUPS if group in sections]
    # click keeps the option of whoever asked first, and only `fminfer` itself has -h.
    assert sections["Help"][-1] == "--help"
    sections["Help"] = [f for f in sections["Help"] if f not in ("-h", "--help")]
    shown = sorted(flag for flags in sections.values() for flag in flags)
    assert shown == sorted(
        f for each in options for f in (*each.opts, *each.secondary_opts)
    )
    for option in options:
        assert (
            isinstance(option, GroupedOption)
            and option.opts[0] in sections[option.group]
        )


def test_the_groups_of_a_run() -> None:
    sections = sections_of("run")
    for group, flag in {
        "Input and output": "--output",
        "Requests": "--strict",
        "Model": "--model-name",
        "Speed and memory": "--kernels",
        "Kept answers": "--result-cache",
        "Ranks": "--world-size",
        "Made-up requests and --prompt": "--temperature",
        "Old command lines": "--attention",
    }.items():
        assert flag in sections[group], group


def test_the_first_help_names_a_first_try_chats_and_the_server() -> None:
    """It spoke of files of completions only, and of times that `check` did not tell."""
    shown = CliRunner().invoke(main, ["--help"]).output
    text = " ".join(shown.split())
    assert (
        "completions and chat requests with a language model: of files, or as a server"
        in text
    )
    assert "fminfer run --prompt" in text and "a page to chat on" in text
    assert "predict memory and time" not in text
    run_help = " ".join(CliRunner().invoke(main, ["run", "--help-all"]).output.split())
    assert "as a completion's prompt, also for a chat model" in run_help


@pytest.mark.parametrize("name", ["", *main.commands])
def test_a_help_fits_a_screen(name: str) -> None:
    """That of a run had 363 lines."""
    words = [name, "--help"] if name else ["--help"]
    lines = CliRunner().invoke(main, words).output.splitlines()
    assert len(lines) <= 45
    if name in COMMON:
        flags = sections_of(name, "--help")["Common flags"]
        assert len(flags) == len(COMMON[name]) == 10
        whole = {flag for flags in sections_of(name).values() for flag in flags}
        assert {*flags} <= whole and len(whole) > 15
        num_shown = sum(not each.hidden for each in options_of(main.commands[name]))
        assert lines[-1].startswith(f"All {num_shown} flags: ")
        assert lines[-1].endswith(f" {name} --help-all")


def test_a_bench_needs_a_tokenizer() -> None:
    assert not [
        each
        for each in options_of(GROUPED["bench"])
        if each.name == "skip_tokenizer_init"
    ]


@pytest.mark.parametrize("name", ["run", "serve"])
def test_defaults_are_those_of_the_configs(name: str) -> None:
    context = main.commands[name].make_context(name, [])
    compared = 0
    configs: list[Any] = [EngineConfig(), RankConfig()]
    for config in [*configs, ServerSettings()] if name == "serve" else configs:
        for field in fields(config):
            if field.name in context.params:
                assert context.params[field.name] == getattr(config, field.name), (
                    field.name
                )
                compared += 1
    assert compared > 30


@pytest.mark.parametrize("command", ["run", "serve", "check", "bench"])
@pytest.mark.parametrize(
    ("flags", "meant"),
    [
        ("", "auto"),
        ("--attention auto", "auto"),
        ("--attention eager", "off"),
        ("--attention compiled", "require"),
        ("--kernels off", "off"),
        ("--attention eager --kernels off", "off"),
        ("--kernels require --attention compiled", "require"),
    ],
)
def test_attention_is_the_old_name_of_kernels(
    command: str, flags: str, meant: str
) -> None:
    params = main.commands[command].make_context(command, flags.split()).params
    assert params["kernels"] == meant
    assert "attention" not in params


@pytest.mark.parametrize(
    "flags", ["--attention eager --kernels auto", "--kernels require --attention auto"]
)
def test_the_old_and_the_new_name_may_not_differ(flags: str) -> None:
    found = CliRunner().invoke(main, ["run", *flags.split()])
    assert found.exit_code == 2
    assert (
        "contradict each other" in found.stderr
        and "Give --kernels alone" in found.stderr
    )
    found = CliRunner().invoke(main, ["run", "--attention", "off"])
    assert found.exit_code == 2 and "'--attention': 'off' is not one of" in found.stderr


def test_in_python_the_old_name_is_refused_with_the_new_one() -> None:
    old: Any = {"attention": "eager"}
    for make in (make_config, fminfer.Engine):
        for model in (None, EngineConfig()):
            with pytest.raises(
                UsageError, match=r"is called kernels now; give .*'off' \(it was"
            ):
                make(model, **old)
    wrong: Any = "eager"
    with pytest.raises(
        UsageError, match="kernels is 'eager'; it must be one of auto, off, req"
    ):
        EngineConfig(kernels=wrong)


def test_a_journal_does_not_record_the_kernels() -> None:
    """So runs begun with --attention go on with --kernels, whichever it is."""
    found = []
    for kernels in ("auto", "off"):
        config = make_config(None, kernels=kernels)  # type: ignore[arg-type]
        found.append(plan_ahead(config, open_model(config)).fingerprint())
    assert not describe_changes(*found) and not describe_changes(*reversed(found))
    assert found[0] == found[1]
    assert not [name for name in found[0] if "kernels" in name or "attention" in name]


def test_flags_that_contradict_each_other_are_called_by_their_names() -> None:
    """It said skip_tokenizer_init, which is not what people typed."""
    flags = ["--prompt", "a", "--tokenizer", "x", "--skip-tokenizer-init"]
    found = CliRunner().invoke(main, ["run", *flags])
    assert found.exit_code == 2
    assert "--tokenizer and --skip-tokenizer-init contradict each other" in found.stderr
    flags = ["--prompt", "a", "--model-name", "x", "--random-init", "llama-160m"]
    found = CliRunner().invoke(main, ["run", *flags])
    assert "--model-name and --random-init contradict each other" in found.stderr


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("model", "a path or hub id"),
        ("random_init", "a path, hub id or size"),
        ("tokenizer", "a path or hub id"),
        ("model_config", "a path, hub id or size"),
    ],
)
def test_a_name_that_is_no_text_is_refused(name: str, remedy: str) -> None:
    """`Engine(model_config={…})` ended with a bare TypeError."""
    options: Any = {"model": "x"} | {name: {"hidden_size": 8}}
    with pytest.raises(UsageError, match=f"{name} is of type dict; give {remedy}"):
        fminfer.Engine(**options)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("budget", "64MiB", "budget is of type str; give int | None, not '64MiB'"),
        ("seed", None, "seed is of type NoneType; give int"),
        ("prefix_cache", "off", "prefix_cache is of type str; give bool"),
        ("stage_layers", ("a", "b"), "stage_layers is of type tuple; give tuple"),
        ("request_args", "{}", "request_args is of type str; give dict"),
        ("max_rows", 2.5, "max_rows is of type float; give int"),
        ("dtype", ["float32"], "dtype is .'float32'.; it must be one of"),
        (
            "chat_template",
            b"x",
            "chat_template is of type bytes; give the path of a file",
        ),
    ],
)
def test_an_option_of_the_wrong_type_is_refused_by_name(
    name: str, value: Any, told: str
) -> None:
    """A text where a number belongs ended with a bare TypeError; "off" was true."""
    with pytest.raises(UsageError, match=told):
        EngineConfig(**{name: value})


def test_a_budget_without_memory_is_refused_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was refused once all were in memory: minutes later, of a large model."""

    def load(*_: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr("fminfer.runtime.load.builder.load_part", load)
    with pytest.raises(UsageError, match=r"a KV cache of .* give a smaller --budget"):
        fminfer.Engine(device="cpu", budget=10**12)


def said(*arguments: str) -> str:
    """Return the last line that a wrong command line gets."""
    found = CliRunner().invoke(main, arguments)
    assert found.exit_code == 2, found.output
    return found.output.splitlines()[-1]


@pytest.mark.parametrize("command", ["run", "serve", "check", "bench"])
def test_flags_of_other_tools_lead_to_flags_that_exist(command: str) -> None:
    """`--tp` asked whether --stop was meant, `--quantization` whether --attention."""
    flags = {
        name: {flag for each in options_of(main.commands[name]) for flag in known(each)}
        for name in main.commands
    }
    for name, text in FLAGS.items():
        typed = f"--{name}" if len(name) > 1 else f"-{name}"
        if {typed, f"--{name}"} & flags[command]:
            continue
        told = said(command, typed, "x")
        assert told.startswith(f"Error: No such option '{typed}'. {text}"), told
        owner = re.search(r": of fminfer (\w+)\)", told)
        for flag in re.findall(r"--[a-z-]+", text):
            assert flag in flags[command] or (owner and flag in flags[owner[1]]), told
    assert len(FLAGS) > 90


def test_a_command_without_a_model_keeps_its_own_guess() -> None:
    """`split -o` is about --output-dir, not about --output of a run."""
    assert said("split", "--output", "x").endswith("Did you mean '--output-dir'?")
    assert said("split", "-o", "x") == "Error: No such option '-o'."
    assert said("serve", "--output", "x").endswith("It is a flag of fminfer run.")
    assert said("submit", "--model-name", "x").endswith(
        "run; give flags of run behind --."
    )


def known(option: click.Option) -> list[str]:
    return [*option.opts, *option.secondary_opts]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("run -tp 2", "'-tp'. Give --tp."),
        ("run -ngl 99", "'-ngl'. Give --device"),
        ("run -pp=2", "'-pp'. Give --pipeline-group-size."),
        ("run --num-shard 2", "'--num-shard'. Give --tensor-parallel-size."),
        ("run --model_name m", "'--model_name'. Give --model-name."),
        ("run --max_tokens 5", "'--max_tokens'. Give --generate-seq-length"),
        ("serve -o x", "Give --output (--output: of fminfer run)."),
        ("serve --load-in-8bit", "Give --quantize int8 (or int4)."),
        ("run --load-in-4bit", "Give --quantize int4."),
        ("serve --cpu-offload-gb 8", "Give --offload auto."),
        ("run x --dtype int3", "'int3' is not one of"),
        (
            "run x --dtype int8 --quantize int4",
            "--quantize int4 contradict each other; give one",
        ),
        (
            "submit --scheduler lsf --infer-data x -- --num-shard 2",
            "Give --tensor-parallel-size",
        ),
        ("chat", "'chat'. fminfer serve has a page to chat"),
        ("version", "It is fminfer --version."),
        ("pyproject.toml", "It is: fminfer run pyproject.toml."),
    ],
)
def test_what_other_tools_take_is_told_by_name(words: str, says: str) -> None:
    """A command was only unknown."""
    told = said(*words.split())
    assert says in told, told


def test_commands_of_other_tools_lead_to_commands_that_exist() -> None:
    for name, text in COMMANDS.items():
        assert f"No such command '{name}'. {text}." in said(name)
        assert not set(re.findall(r"fminfer (\w+)", text)) - main.commands.keys()


def test_keys_and_variables_of_other_tools_are_told_too() -> None:
    """They were asked about --device-memory and the like, by their spelling."""
    found = read_settings("serve", None, {"FMINFER_NUM_GPUS": "2"})
    assert "Give --world-size" in found.notices[0]


@pytest.mark.parametrize(
    "words",
    [
        ["run", ""],
        ["run", "--infer-data", ""],
        ["run", "r.jsonl", "--output", ""],
        ["run", "r.jsonl", "--model-name", ""],
        ["run", "r.jsonl", "--tokenizer", ""],
        ["run", "r.jsonl", "--revision", ""],
        ["run", "r.jsonl", "--stats", ""],
        ["check", ""],
        ["status", ""],
        ["report", ""],
        ["split", "--input-file", "", "--output-dir", "parts"],
        ["serve", ""],
        ["serve", "--api-key", "key", "--api-key", ""],
        ["serve", "--host", ""],
        ["quantize", "--model-name", "m", "--output", ""],
    ],
)
def test_an_empty_path_or_name_is_refused(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fminfer run "$FILE"` without FILE answered all files of the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.jsonl").write_text('{"prompt": "x", "max_tokens": 1}\n')
    result = CliRunner().invoke(main, words)
    assert (
        result.exit_code == 2 and "the value is empty; is a variable" in result.output
    )
    assert [path.name for path in tmp_path.iterdir()] == ["r.jsonl"]


def test_an_empty_prompt_may_be_completed() -> None:
    result = CliRunner().invoke(main, ["run", "--prompt", "", "--raw"])
    assert "the value is empty" not in result.output
