"""`fminfer serve`: its flags, what it refuses or warns of, and the start lines of others."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from fminfer.cli import serve_command
from fminfer.cli.app import main
from fminfer.cli.config_file import NOTICES
from fminfer.core.config import EngineConfig
from fminfer.core.errors import UsageError
from fminfer.server.settings import ServerSettings

ROOT = Path(__file__).parent.parent.parent
# Seed 000's.
OLD = (
    "--name M --tp {tp} --http_host H --http_port 7070 --dtype fp16 --max_batchsize 4 "
    "--random_init True --random_model_size 7b1"
)


def parse(flags: str | list[str]) -> dict[str, Any]:
    """Return the parameters of `fminfer serve`."""
    words = flags.split() if isinstance(flags, str) else flags
    return main.commands["serve"].make_context("serve", words).params


def notices(flags: str) -> list[str]:
    told: list[str] = (
        main.commands["serve"].make_context("serve", flags.split()).meta[NOTICES]
    )
    return told


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record what would be served, and serve nothing; the extra need not be installed."""
    found: list[Any] = []
    monkeypatch.setattr(serve_command, "_require_extra", lambda: None)
    monkeypatch.setattr(
        serve_command, "_run_server", lambda *told: found.extend(told[:4])
    )
    return found


def serve(flags: str | list[str]) -> Any:
    return CliRunner().invoke(
        main, ["serve", *(flags.split() if isinstance(flags, str) else flags)]
    )


def test_the_old_line_with_int8_starts_a_server_of_8_bits(started: list[Any]) -> None:
    """Weights of 8 bits were refused by name."""
    done = serve(OLD.format(tp=1).replace("fp16", "int8"))
    assert done.exit_code == 0, done.output
    _, config, *_ = started
    assert (config.quantized_to, config.random_init, config.max_rows) == (
        "int8",
        "7b1",
        4,
    )


def test_every_setting_has_a_flag_and_reaches_the_server(
    started: list[Any], tmp_path: Path
) -> None:
    cert = tmp_path / "cert.pem"
    key = tmp_path / "key.pem"
    cert.touch(), key.touch()
    done = serve(
        "m --host ::1 --port 0 --served-model-name a --served-model-name b --api-key k "
        f"--api-key l --queue-size 0 --max-body-size 2M --allow-origin https://x.org "
        "--allow-host x.org --allowed-host y.org:8443 "
        f"--ssl-certfile {cert} --ssl-keyfile {key} --keep-alive 1m --log-level DEBUG -q -v "
        f"--grace 0:00:30 --result-cache {tmp_path} --result-cache-size 10G --cache-size 50 "
        f"--cache-list-size 2 --state {tmp_path} --max-upload-size 3G --max-rows 3 "
        "--max-batch-lines 7 --strict --check-model --fp16"
    )
    assert (done.exit_code, done.output) == (0, "")
    settings, config, role, _ = started
    assert settings == ServerSettings(
        host="::1",
        port=0,
        served_model_names=("a", "b"),
        api_keys=("k", "l"),
        queue_size=0,
        max_body_bytes=2 * 2**20,
        state=tmp_path,
        max_upload_bytes=3 * 2**30,
        max_batch_lines=7,
        allowed_origins=("https://x.org",),
        allowed_hosts=("x.org", "y.org:8443"),
        ssl_certfile=cert,
        ssl_keyfile=key,
        keep_alive_s=60.0,
        result_cache=tmp_path,
        result_cache_bytes=10 * 2**30,
        cache_size=50,
        cache_list_size=2,
        log_level="debug",
        grace_s=30.0,
        is_quiet=True,
        is_verbose=True,
    )
    default = ServerSettings()
    assert not [
        f
        for f in fields(default)
        if getattr(settings, f.name) == getattr(default, f.name)
    ]
    assert config == EngineConfig(
        "m", dtype="float16", max_rows=3, strict=True, check_model=True
    )
    assert role.kind == "alone"


def test_the_model_is_an_argument_or_a_flag() -> None:
    assert parse("m")["model"] == parse("--model m")["model"] == "m"
    assert parse("m --model-name m")["model"] == "m"
    assert parse("")["model"] is None
    with pytest.raises(
        click.UsageError, match="m and --model-name n contradict each other"
    ):
        parse("m --model-name n")


def test_flags_of_files_are_not_there() -> None:
    """Nor what a server has no use for."""
    names = {param.name for param in main.commands["serve"].params}
    files = {
        "paths",
        "infer_data",
        "output",
        "restart",
        "limit",
        "stats",
        "trace",
        "prompt",
    }
    assert not names & (files | {"temperature", "max_steps", "pp_mode", "deadline_s"})


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--port 70000", "port is 70000; it must be 0 (any free one) to 65535"),
        ("--queue-size -1", "queue_size is -1; it must be at least 0"),
        ("--grace -1", "'--grace'"),
        ("--max-body-size 0", "'0' is no size"),
        ("--ssl-certfile setup.cfg", "without ssl_keyfile; give both, or neither"),
        (
            "--ssl-certfile no --ssl-keyfile setup.cfg",
            "ssl_certfile is no, where there is no file",
        ),
        ("--log-level loud", "'loud' is not one of"),
        ("--allow-origin example.org", "give scheme, host and port without a path"),
        (
            "--allow-origin https://example.org/",
            "give scheme, host and port without a path",
        ),
        ("--allow-host https://x.org", "give a name, or name:port, such as"),
        ("--allow-host *", "give a name, or name:port, such as"),
        ("--max-rows 0", "max_rows is 0; it must be at least 1"),
        ("--rank 0", "--world-size"),
        ("--dtype int3", "'int3' is not one of"),
        ("--dtype int8 --quantize int4", "--dtype int8 and --quantize int4 contradict"),
    ],
)
def test_wrong_values_are_refused(flags: str, says: str, started: list[Any]) -> None:
    done = serve(flags)
    assert done.exit_code == 2, done.output
    assert says in done.stderr and not started


@pytest.mark.parametrize("key", ["a b", "schlüssel", "a\n"])
def test_a_key_that_no_client_can_send_is_refused_and_not_shown(
    key: str, started: list[Any]
) -> None:
    done = serve(["--api-key", "good", "--api-key", key])
    assert done.exit_code == 2 and "api_keys: key 2 of 2" in done.stderr
    assert "good" not in done.stderr and "schl" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "is_warned"),
    [
        ("--host 0.0.0.0", True),
        ("--host example.org", True),
        ("--host ::", True),
        ("--host 0.0.0.0 --quiet", True),
        ("--host 0.0.0.0 --api-key k", False),
        ("--host localhost", False),
        ("--host 127.0.0.2", False),
        ("--host ::1", False),
        ("", False),
    ],
)
def test_an_open_door_without_a_key_is_warned_of(
    flags: str, is_warned: bool, started: list[Any]
) -> None:
    done = serve(flags)
    assert done.exit_code == 0 and started
    assert ("without a key" in done.stderr) == is_warned
    assert ("Set FMINFER_API_KEY, or leave --host out" in done.stderr) == is_warned


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = serve("")
    assert done.exit_code == 2
    assert "fminfer serve needs fastapi, uvicorn" in done.stderr
    assert "pip install" in done.stderr and "[serve]'" in done.stderr


def test_what_is_looked_for_is_what_the_extra_installs() -> None:
    text = (ROOT / "setup.cfg").read_text()
    block = re.search(r"^serve =\n((?:    .*\n)+)", text, re.M)
    assert block is not None
    packages = re.findall(r"^ +([\w-]+)", block[1], re.M)
    assert tuple(name.replace("-", "_") for name in packages) == serve_command.EXTRA


def test_the_start_line_of_the_bloom_service_starts_it_whole(
    started: list[Any],
) -> None:
    done = serve(OLD.format(tp=1))
    assert done.exit_code == 0, done.output
    settings, config, role, _ = started
    assert (settings.host, settings.port) == ("H", 7070)
    assert config == EngineConfig(
        random_init="7b1", tokenizer="M", dtype="float16", max_rows=4
    )
    assert role.kind == "alone" and "tensor" not in done.stderr


def test_tp_is_so_many_ranks_that_share_each_layer(started: list[Any]) -> None:
    """They were the stages of a pipeline."""
    done = serve(OLD.format(tp=2))
    assert done.exit_code == 0, done.output
    _, config, role, *_ = started
    sizes = (role.spread.num_stages, role.spread.num_shards, role.spread.num_pipelines)
    assert (role.kind, sizes, config.tensor_parallel_size) == ("starter", (1, 2, 1), 2)


def test_its_booleans_take_a_value() -> None:
    assert parse("--name M --random_init False")["model"] == "M"
    found = parse("--name M --random_init true")
    assert (found["random_init"], found["tokenizer"], found["model"]) == (
        "560m",
        "M",
        None,
    )
    assert notices("--name M --random_model_size 7b1") == [
        "--random_model_size means nothing without --random_init True"
    ]
    with pytest.raises(click.BadParameter):
        parse("--random_init maybe")


def test_its_other_names() -> None:
    assert parse("--max_batch_size 8")["max_rows"] == 8
    assert parse("--queue_size 0")["queue_size"] == 0
    assert not [name for name in parse(OLD.format(tp=1)) if name.startswith("old_")]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--http_port 1 --port 2", "--http_port 1 and --port 2 contradict each other"),
        (
            "--name M --model-name N",
            "--name M and --model-name N contradict each other",
        ),
        (
            "--name M --random_init True --model-name N",
            "--random_init True and --model-name",
        ),
        (
            "--name M --random-init llama-160m",
            "--name and --random-init contradict each other",
        ),
    ],
)
def test_an_old_and_a_new_flag_may_not_differ(flags: str, says: str) -> None:
    with pytest.raises(click.UsageError, match=says):
        parse(flags)
    assert parse("--http_port 2 --port 2")["port"] == 2


def test_service_init_is_serve_with_a_file(started: list[Any], tmp_path: Path) -> None:
    """`energon service init --config_file=x` of seed 001."""
    file = tmp_path / "x.toml"
    file.write_text("server_port = 8005\n[serve]\nmax-rows = 5\n")
    done = CliRunner().invoke(main, ["service", "init", f"--config_file={file}"])
    assert done.exit_code == 0, done.output
    assert (started[0].port, started[1].max_rows) == (8005, 5)
    assert "service" not in CliRunner().invoke(main, ["--help"]).output


def test_the_example_starts_a_server_whose_flags_are_known(tmp_path: Path) -> None:
    shim = tmp_path / "fminfer"
    shim.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    shim.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", ROOT / "examples" / "serve.sh", "--queue-size", "7"],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    name, *flags = done.stdout.splitlines()
    assert name == "serve"
    found = parse(flags)
    assert (
        found["queue_size"] == 7
        and found["port"] == 7070
        and found["host"] == "127.0.0.1"
    )
    body = json.loads((ROOT / "examples" / "test.json").read_text())
    assert body["max_new_tokens"] == 60 and body.keys() == {
        "prompt",
        "top_p",
        "top_k",
        "max_new_tokens",
    }


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"host": " "}, "host is empty"),
        ({"max_body_bytes": 0}, "max_body_bytes is 0; it must be at least 1"),
        ({"keep_alive_s": float("nan")}, "keep_alive_s is nan"),
        ({"grace_s": -1.0}, "grace_s is -1.0"),
        ({"served_model_names": ("",)}, "served_model_names: the value is empty"),
        ({"cache_size": -1}, "cache_size is -1; it must be at least 0"),
        ({"cache_list_size": 0}, "cache_list_size is 0; it must be at least 1"),
        (
            {"cache_list_size": 2},
            "cache_size is 0: no answer is kept. Give --cache-size",
        ),
        ({"result_cache_bytes": 2**30}, "has no effect without --result-cache"),
        (
            {"max_upload_bytes": 2**20},
            "--max-upload-size and --max-batch-lines have no effect",
        ),
        (
            {"max_batch_lines": 7},
            "--max-upload-size and --max-batch-lines have no effect",
        ),
        ({"result_cache": "s3://a/b"}, "is a URL"),
    ],
)
def test_the_settings_check_themselves(value: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        ServerSettings(**value)
