"""--config and FMINFER_ variables: which one counts, what is refused, and others' keys."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.core import ParameterSource
from click.testing import CliRunner

from fminfer.cli.app import main
from fminfer.cli.config_file import NOTICES
from fminfer.cli.config_keys import flags_by_key
from fminfer.cli.submit_command import accept_run_flags
from fminfer.core.errors import UsageError
from tests.forked import run_forked

QUERIES = Path(__file__).parent.parent.parent / "examples" / "queries" / "plain.jsonl"
# Of seeds 001 and 003: the keys of EnergonAI's files, with what its examples import around them.
PYTHON = """
import os
from energonai.model import opt_125M
from opt_server import launch_engine

model_class = opt_125M
checkpoint = "/model_checkpoint"
tokenizer_path = 'facebook/opt-125m'
tp_init_size = 2
pp_init_size = 2
host = "127.0.0.1"
port = 29400
half = True
engine_server = launch_engine
server_host = "0.0.0.0"
server_port = 8020
executor_max_batch_size = 16
executor_max_queue_size = 0
cache_size = 50
cache_list_size = 1
log_level = os.environ.get("LEVEL", open("touched", "w").name)
allow_cors = True
timeout_keep_alive = 180
favourite_colour = "blue"
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "fminfer.toml"


def context(command: str, flags: str = "") -> click.Context:
    return main.commands[command].make_context(command, flags.split())


def params(command: str, flags: str = "--config fminfer.toml") -> dict[str, Any]:
    """Return what a command has from its file, variables and flags, defaults left out."""
    found = context(command, flags)
    given = {
        name for name in found.params if found.get_parameter_source(name) is not None
    }
    default = ParameterSource.DEFAULT
    return {
        n: found.params[n]
        for n in given
        if found.get_parameter_source(n) is not default
    }


def test_flags_of_every_kind(file: Path) -> None:
    file.write_text(
        'model-name = "m"\nmax_rows = 4\nrank-timeout = 1.5\nstrict = '
        "true\ncheck_model = false\n"
        'cuda-id = [0, 2]\nstage_layers = "3,4"\ngrace = "0:00:30"\ndtype = "bf16"\n'
        'prefix-cache = false\n[serve]\nport = 8123\napi-key = ["a", '
        '"b,c"]\nallow-origin = "*"\n'
        'max-body-size = "2M"\n[run]\ninfer-data = ["x.jsonl", "y.jsonl"]\nstop = "\\n, "\n'
        "quiet = true\ntop-k = 3\n"
    )
    both = {
        **{
            "model": "m",
            "max_rows": 4,
            "rank_timeout_s": 1.5,
            "strict": True,
            "grace_s": 30.0,
        },
        **{
            "check_model": False,
            "cuda_ids": (0, 2),
            "stage_layers": (3, 4),
            "dtype": "bfloat16",
        },
        "prefix_cache": False,
    }
    assert params("serve") == both | {
        **{"port": 8123, "api_keys": ("a", "b,c"), "allowed_origins": ("*",)},
        "max_body_bytes": 2 * 2**20,
    }
    assert params("run") == both | {
        **{"infer_data": (Path("x.jsonl"), Path("y.jsonl")), "stop": ("\n, ",)},
        **{"is_quiet": True, "top_k": 3},
    }


def test_every_flag_of_both_commands_is_a_key() -> None:
    """But for help, and for the file itself."""
    for name in ("run", "serve"):
        flags = {
            flag.removeprefix("--").replace("-", "_")
            for param in main.commands[name].params
            if isinstance(param, click.Option) and not param.hidden
            for flag in (*param.opts, *param.secondary_opts)
            if flag.startswith("--")
        }
        assert flags - flags_by_key(name).keys() == {
            "config",
            "attention",
            "fp16",
            "help_all",
        }
        assert {"model_name", "no_prefix_cache", "grace"} <= flags_by_key(name).keys()


def test_the_command_line_goes_before_variables_and_these_before_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(
        "port = 1\nqueue-size = 1\nmax-rows = 1\nseed = 1\n[serve]\nqueue-size = 2\n"
    )
    monkeypatch.setenv("FMINFER_PORT", "3")
    monkeypatch.setenv("FMINFER_MAX_ROWS", "3")
    monkeypatch.setenv("FMINFER_SEED", "")  # as if it were not set
    found = params("serve", "--config fminfer.toml --port 4")
    assert found == {"port": 4, "max_rows": 3, "queue_size": 2, "seed": 1}
    monkeypatch.setenv("FMINFER_CONFIG", "fminfer.toml")
    assert params("serve", "--port 4") == found
    (file.parent / "other.toml").write_text("seed = 9")
    assert params("run", "--config other.toml") == {"max_rows": 3, "seed": 9}


def test_variables_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        **{"MODEL_NAME": "m", "API_KEY": "a, b,", "CUDA_ID": "0,1", "STRICT": "1"},
        **{
            "NO_PREFIX_CACHE": "true",
            "STOP": "a, b",
            "INFER_DATA": "s3://x/y,z",
            "FP16": "yes",
        },
        **{"ATTENTION": "eager", "GRACE": "1m", "QUIET": "no"},
    }.items():
        monkeypatch.setenv(f"FMINFER_{name}", value)
    both = {
        **{"model": "m", "cuda_ids": (0, 1), "strict": True, "prefix_cache": False},
        **{"dtype": "float16", "kernels": "off", "grace_s": 60.0, "is_quiet": False},
    }
    assert params("serve", "") == both | {"api_keys": ("a", "b")}
    files = ("s3://x/y", Path("z"))
    assert params("run", "") == both | {"stop": ("a, b",), "infer_data": files}


@pytest.mark.parametrize(
    ("lower", "flags", "counts"),
    [
        ('model-name = "m"', "--random-init llama-160m", {"random_init": "llama-160m"}),
        ('random-init = "llama-160m"', "--model-name m", {"model": "m"}),
        ('random-init = "llama-160m"', "m", {"model": "m"}),
        ('model-name = "n"', "m", {"model": "m"}),
        ("fp16 = true", "--dtype float32", {"dtype": "float32"}),
        ('dtype = "float32"', "--fp16", {"dtype": "float16"}),
        ('attention = "eager"', "--kernels auto", {"kernels": "auto"}),
        ('kernels = "auto"', "--attention eager", {"kernels": "off"}),
        ("tp_init_size = 4", "--tp 2", {"tensor_parallel_size": 2}),
        ("prefix-cache = false", "--prefix-cache", {"prefix_cache": True}),
    ],
)
def test_a_flag_goes_before_what_it_contradicts_in_the_file(
    lower: str, flags: str, counts: dict[str, Any], file: Path
) -> None:
    """Otherwise nothing on the command line could undo what a file says."""
    file.write_text(lower)
    assert params("serve", f"--config fminfer.toml {flags}") == counts


def test_a_variable_goes_before_what_it_contradicts_in_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text('model-name = "m"\ndtype = "float32"')
    monkeypatch.setenv("FMINFER_RANDOM_INIT", "llama-160m")
    monkeypatch.setenv("FMINFER_FP16", "1")
    assert params("serve") == {"random_init": "llama-160m", "dtype": "float16"}


@pytest.mark.parametrize("command", ["run", "serve"])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "modle-name = 1",
            "modle-name in fminfer.toml is no flag .*; did you mean model-name",
        ),
        ("zzz = 1", "zzz in fminfer.toml is no flag of fminfer run or serve$"),
        ("config = 'x'", "config in fminfer.toml is no flag"),
        (
            "[server]\nport = 1",
            r"\[server\] in fminfer.toml is no table of ours; there are \[run",
        ),
        (
            "[run]\nport = 1",
            r"port in \[run\] of fminfer.toml is a flag of the other command",
        ),
        (
            "[serve]\noutput = 'x'",
            r"output in \[serve\] of .* is a flag of the other command",
        ),
        ("[run]\nprot = 1", r"prot in \[run\] of fminfer.toml is no flag"),
        ("max-rows = 1.5", "max-rows in fminfer.toml: '1.5' is not a valid integer"),
        ("max_rows = true", "max_rows in fminfer.toml: 'true' is not a valid integer"),
        ("max-rows = [1]", "max-rows in fminfer.toml is a list; give one value"),
        ("max-rows = 2020-01-01", "max-rows in fminfer.toml is of type date"),
        ("strict = 'maybe'", "strict in fminfer.toml is 'maybe'; give true or false"),
        ("dtype = 'int3'", r"dtype in fminfer.toml: 'int3' is not one of"),
        (
            "max-rows = 1\nmax_rows = 1",
            "max-rows and max_rows in fminfer.toml are one flag",
        ),
        ("model = 'a'\nmodel-name = 'b'", "contradict each other; give one of them"),
        (
            "fp16 = true\ndtype = 'float32'",
            "fp16 in fminfer.toml and dtype in .* contradict",
        ),
        ("a = = 1", "--config fminfer.toml is no TOML: .* line 1"),
    ],
)
def test_mistakes_in_the_file(command: str, text: str, says: str, file: Path) -> None:
    file.write_text(text)
    with pytest.raises((UsageError, click.UsageError)) as error:
        params(command)
    told = error.value
    message = told.format_message() if isinstance(told, click.UsageError) else str(told)
    assert re.search(says, message), message


def test_a_file_that_cannot_be_read(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = CliRunner().invoke(main, ["run", "--config", "fminfer.toml"])
    assert done.exit_code == 2
    assert "Error: --config fminfer.toml cannot be read: No such file" in done.stderr
    monkeypatch.setenv("FMINFER_CONFIG", str(file.parent))
    with pytest.raises(
        UsageError, match=r"FMINFER_CONFIG .* cannot be read: Is a directory"
    ):
        params("run", "")
    file.write_bytes(b"a = '\xff'")
    with pytest.raises(UsageError, match=r"--config fminfer.toml is no TOML: .*utf-8"):
        params("run")
    assert (
        CliRunner()
        .invoke(main, ["run", "--config", "fminfer.toml", "--help"])
        .exit_code
        == 0
    )


def test_a_wrong_value_of_a_variable_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FMINFER_MAX_ROWS", "many")
    done = CliRunner().invoke(main, ["run"])
    assert done.exit_code == 2
    assert (
        "Invalid value for FMINFER_MAX_ROWS: 'many' is not a valid integer"
        in done.stderr
    )
    monkeypatch.setenv("FMINFER_MAX_ROWS", "1")
    monkeypatch.setenv("FMINFER_STRICT", "perhaps")
    with pytest.raises(
        UsageError, match="FMINFER_STRICT is 'perhaps'; give true or false"
    ):
        params("serve", "")


@pytest.mark.parametrize("value", ["", ",", " ", " , ,"])
def test_a_variable_of_keys_that_holds_none(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server started without a key, and so open to all."""
    monkeypatch.setenv("FMINFER_API_KEY", value)
    with pytest.raises(UsageError, match="FMINFER_API_KEY is set, and holds no value"):
        params("serve", "")
    assert params("run", "") == {}, "it has no keys"


def test_an_unknown_variable_is_only_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may use the beginning of the name; variables that are no flags are ours."""
    for name in ("CPU", "SECRET", "TEST_ALL", "PORT"):
        monkeypatch.setenv(f"FMINFER_{name}", "1")
    assert context("run").meta[NOTICES] == []
    monkeypatch.setenv("FMINFER_MODELNAME", "x")
    monkeypatch.delenv("FMINFER_CPU")
    done = CliRunner().invoke(main, ["run"])
    told = (
        "FMINFER_MODELNAME is no flag of fminfer, and is ignored; did you mean "
        "FMINFER_MODEL_NAME?"
    )
    assert done.exit_code == 2 and f"{told}\n" in done.stderr  # there is no input
    assert f"{told}\n" in CliRunner().invoke(main, ["check"]).stderr
    assert "FMINFER" not in CliRunner().invoke(main, ["run", "-q"]).stderr


@pytest.mark.parametrize("command", ["check", "bench"])
def test_check_and_bench_take_what_run_takes(
    command: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`check` told of the demo model where FMINFER_MODEL_NAME named another."""
    file.write_text(
        'limit = 3\nport = 1\nmax-rows = 5\n[run]\nmodel-name = "in-file"\n'
    )
    assert params(command) == {"model": "in-file", "max_rows": 5}
    monkeypatch.setenv("FMINFER_MODEL_NAME", "in-variable")
    assert params(command, "")["model"] == "in-variable"


def test_keys_of_energonai(file: Path) -> None:
    file.write_text(
        'model_class = "opt_6B7"\ncheckpoint = "/c"\ntokenizer_path = "t"\ntp_init_size = 2\n'
        'pp_init_size = 3\nhalf = true\nserver_host = "0.0.0.0"\nserver_port = 8020\n'
        "executor_max_batch_size = 16\nexecutor_max_queue_size = 0\ncache_size = 50\n"
        'cache_list_size = 2\nlog_level = "info"\nallow_cors = true\ntimeout_keep_alive = 180\n'
    )
    assert params("serve") == {
        **{"model_config": "opt-6.7b", "model": "/c", "tokenizer": "t"},
        **{"tensor_parallel_size": 2, "pipeline_group_size": 3},
        **{
            "dtype": "float16",
            "host": "0.0.0.0",
            "port": 8020,
            "max_rows": 16,
            "queue_size": 0,
        },
        **{"log_level": "info", "allowed_origins": ("*",), "keep_alive_s": 180.0},
        **{"cache_size": 50, "cache_list_size": 2},
    }
    assert params("run").keys() == {
        "model_config",
        "model",
        "tokenizer",
        "dtype",
        "max_rows",
        "tensor_parallel_size",
        "pipeline_group_size",
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("half = 'no way'", "half in fminfer.toml is 'no way'; give true or false"),
        (
            "model_class = 'bert_large'",
            "whose shape is not known. .* one of bert-base, bloom-",
        ),
        (
            "port = 1\nserver_port = 2",
            "port in .* and server_port in .* contradict each other",
        ),
        ("tp_init_size = 2\ntp = 4", "tp_init_size in .* and tp in .* contradict"),
        ("attention = 'off'", "attention in fminfer.toml is 'off'; give kernels"),
    ],
)
def test_keys_that_are_refused(text: str, says: str, file: Path) -> None:
    file.write_text(text)
    with pytest.raises(UsageError, match=says):
        params("serve")


def test_the_class_of_hugging_faces_gpt2(file: Path) -> None:
    """Seed 001 has only weights and tokenizer; the config is a public one."""
    file.write_text('model_class = "hf_gpt2"\nallow_cors = false\nhalf = false\n')
    expected = {"model_config": "openai-community/gpt2", "dtype": "float32"}
    assert params("serve") == expected


def test_a_python_file_is_refused_with_the_toml_to_write(file: Path) -> None:
    """It is read, never executed."""
    python = file.with_name("opt_config.py")
    python.write_text(PYTHON)
    with pytest.raises(
        UsageError, match=r"opt_config.py is Python, which is never executed"
    ) as e:
        params("serve", "--config opt_config.py")
    assert not (file.parent / "touched").exists()
    text = str(e.value)
    assert "Write this into opt_config.toml, and give --config opt_config.toml:" in text
    assert "# port = 29400: of EnergonAI's own processes, not needed here" in text
    assert "# favourite_colour = 'blue': not known here" in text
    assert "# log_level = os.environ.get(" in text
    toml = text.partition("\n\n")[2]
    file.write_text(toml)
    assert params("serve") == {
        **{"model_config": "opt-125m", "model": "/model_checkpoint"},
        **{"tensor_parallel_size": 2, "pipeline_group_size": 2},
        **{
            "tokenizer": "facebook/opt-125m",
            "dtype": "float16",
            "host": "0.0.0.0",
            "port": 8020,
        },
        **{
            "max_rows": 16,
            "queue_size": 0,
            "allowed_origins": ("*",),
            "keep_alive_s": 180.0,
        },
        **{"cache_size": 50, "cache_list_size": 1},
    }


def test_what_is_no_python_either(file: Path) -> None:
    file.with_name("x.py").write_text("model_class = = 1")
    with pytest.raises(UsageError, match=r"x.py is no TOML, and no Python either"):
        params("serve", "--config x.py")


def test_submit_checks_the_file_before_a_job_waits(file: Path) -> None:
    file.write_text("modle = 1")
    with pytest.raises(UsageError, match=r"modle in fminfer.toml is no flag"):
        accept_run_flags.make_context("run", ["--config", "fminfer.toml"])
    file.write_text("model = 'm'")
    found = accept_run_flags.make_context("run", ["--config", "fminfer.toml"])
    assert found.params["model"] == "m"


def test_a_run_takes_its_flags_from_the_file(file: Path) -> None:
    file.write_text(
        f'device = "cpu"\ninfer-data = "{QUERIES}"\noutput = "out.jsonl"\nport = 1\n[run]\n'
        "limit = 2\n"
    )
    done = run_forked(["run", "--config", file.name], folder=file.parent)
    assert done.returncode == 0, done.stderr
    assert len((file.parent / "out.jsonl").read_text().splitlines()) == 2
