"""What a new user stumbled over."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

import fminfer
from fminfer.models.checkpoint import DEMO_MODEL
from fminfer.server.service import LEVELS, ServerLog
from tests.server.running import running, until

SHORT = {"prompt": [5] * 20, "max_tokens": 2}


def test_a_second_ctrl_c_is_no_fault_of_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clients were told that the engine failed: KeyboardInterrupt."""
    engine = fminfer.Engine(dtype="float32")
    with running(engine) as server:
        open_one = server.start_post("/v1/completions", SHORT | {"max_tokens": 900})
        until(lambda: engine.state.num_running == 1, "it runs")

        def interrupt() -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(engine, "step", interrupt)
        received = b""
        while piece := open_one.recv(65536):
            received += piece
        assert b"503" in received and b"shutting_down" in received
    engine.close()


def test_other_parameters_of_run_are_refused_by_name() -> None:
    """A seed was dropped in silence."""
    engine = fminfer.Engine(dtype="float32")
    with running(engine) as server:
        answer = server.get("/run/den?max_seq_length=9&seed=3")
        assert answer.status == 400 and answer.error["param"] == "seed"
        assert server.get("/run/").error["param"] == "text"
        ids = server.post("/detokenize", {"tokens": [99_999]}).error
        assert ids["param"] == "tokens" and ids["message"].startswith("tokens holds")
    engine.close()


def test_a_template_with_an_error_of_syntax_ends_the_start(tmp_path: Path) -> None:
    """It was found with the first request, whose messages were blamed."""
    template = tmp_path / "broken.jinja"
    template.write_text("{% for message in messages %}\n{{ message.content }")
    with pytest.raises(
        fminfer.UsageError, match="--chat-template has an error in line 2"
    ):
        fminfer.Engine(chat_template=str(template))
    template.write_text("{{ messages[3].content }}")  # which one message cannot show
    fminfer.Engine(chat_template=str(template)).close()


def test_a_models_folder_has_a_name(tmp_path: Path) -> None:
    """With --check-model, a client had to know the path on the server."""
    folder = tmp_path / "rooms"
    shutil.copytree(DEMO_MODEL, folder)
    engine = fminfer.Engine(str(folder), check_model=True)
    with running(engine) as server:
        for name, status in (("rooms", 200), (str(folder), 200), ("other", 404)):
            assert (
                server.post("/v1/completions", SHORT | {"model": name}).status == status
            )
    engine.close()


def test_a_file_with_chats_that_may_fill_the_context_says_so() -> None:
    """One such line took minutes, and nothing told why."""
    engine = fminfer.Engine(dtype="float32")
    chat = {
        "messages": [
            {"role": "user", "content": "How do you go from the den to the porch?"}
        ]
    }
    list(engine.run([chat | {"max_tokens": 3}, chat | {"max_completion_tokens": 3}]))
    assert not engine.warnings
    list(engine.run([chat]))
    assert "until they end or the context is full" in str(engine.warnings)
    engine.close()


def test_a_default_for_the_tokens_of_chats_is_no_filled_context(tmp_path: Path) -> None:
    """A run was warned of chats that fill the context, though the model's default ended them."""
    folder = tmp_path / "rooms"
    shutil.copytree(DEMO_MODEL, folder)
    (folder / "generation_config.json").write_text('{"max_new_tokens": 3}')
    chat = {
        "messages": [
            {"role": "user", "content": "How do you go from the den to the porch?"}
        ]
    }
    by_model = fminfer.EngineConfig(str(folder), generation_config="model")
    by_command = fminfer.EngineConfig(request_args={"max_tokens": 3})
    for config in (by_model, by_command):
        engine = fminfer.Engine(config)
        (record,) = engine.run([chat])
        assert record.result is not None
        assert record.result["usage"]["completion_tokens"] <= 3
        assert not engine.warnings
        engine.close()


def told_at(
    level: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> str:
    """Return what a server tells of an odd request, a fault and its work."""

    ticks: list[float] = []

    async def tick(seconds: float) -> None:
        ticks.append(seconds)
        await asyncio.sleep(seconds / 20)

    quick = SimpleNamespace(**vars(asyncio) | {"sleep": tick})
    monkeypatch.setattr("fminfer.server.http.asyncio", quick)
    monkeypatch.setattr("fminfer.server.http.REPORT_S", 1)
    monkeypatch.setattr("fminfer.server.model_routes.__version__", object())  # no JSON
    engine = fminfer.Engine(dtype="float32")
    with running(engine, log_level=level, is_quiet=False) as server:
        assert server.post("/v1/completions", SHORT | {"odd": 1}).status == 200
        assert server.get("/version").status == 500
        num_before = ticks.count(1)
        until(lambda: ticks.count(1) > num_before + 2, "it has looked twice")
    engine.close()
    return capfd.readouterr().err


def test_each_log_level_tells_what_its_help_says(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warnings came with all of them, and three levels told the same."""
    kinds = (
        ("error", "failed by a fault of fminfer"),
        ("warning", "Warning: unknown parameters are kept and not acted on: odd"),
        ("info", "KV cache"),
        ("debug", "POST /v1/completions 200"),
    )
    levels = ("critical", *(level for level, _ in kinds))
    for number, level in enumerate(levels):
        told = told_at(level, capfd, monkeypatch)
        assert [words in told for _, words in kinds] == [
            at < number for at in range(4)
        ], level


def test_quiet_tells_errors_alone() -> None:
    log = ServerLog("debug", is_quiet=True)
    assert [log.is_shown(level) for level in LEVELS] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert not ServerLog("critical", is_quiet=True).is_shown("error")
