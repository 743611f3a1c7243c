"""`fminfer run --prompt`: one text is answered, and the answer printed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from fminfer.answers.answer_store import FILE
from fminfer.cli.app import main
from fminfer.job.model_answering import _make_request

ROOMS = "How do you go from the den to the porch?"
PLAIN = f"Question: {ROOMS}\nAnswer:"


def test_a_prompt_is_answered_and_printed() -> None:
    found = CliRunner().invoke(main, ["run", "-q", "--prompt", PLAIN])
    assert found.exit_code == 0, found.output
    assert "south" in found.stdout and "{" not in found.stdout
    assert (
        CliRunner().invoke(main, ["run", "--prompt", PLAIN, "a.jsonl"]).exit_code == 2
    )
    found = CliRunner().invoke(
        main, ["run", "--prompt", PLAIN, "--stats", "s", "--limit", "0"]
    )
    assert found.exit_code == 2, "they were parsed and meant nothing"
    assert "leave out --limit, --stats" in found.stderr
    found = CliRunner().invoke(main, ["run", "-q", "--prompt", PLAIN, "--echo-prompt"])
    assert found.stdout.startswith(PLAIN)
    for flags in ([], ["--raw"]):
        found = CliRunner().invoke(main, ["run", "-q", "--prompt", PLAIN * 200, *flags])
        assert found.exit_code == 1 and "context_length_exceeded" in found.stderr


def test_a_prompt_takes_an_answer_of_an_earlier_run(tmp_path: Path) -> None:
    given = ["run", "--prompt", PLAIN, "--raw", "--result-cache", str(tmp_path)]
    first, second = (CliRunner().invoke(main, given) for _ in range(2))
    assert first.exit_code == second.exit_code == 0 and first.stdout == second.stdout
    assert (tmp_path / FILE).stat().st_size > 0


@pytest.mark.parametrize(
    ("flags", "answer", "says"),
    [
        ([ROOMS], " south\n", ["as a chat, by the model's template; --raw"]),
        (
            [PLAIN, "--raw"],
            " south\n",
            ["plain text (--raw), by at most 256 tokens (--gen"],
        ),
        (
            [PLAIN, "--raw", "--generate-seq-length", "1"],
            " s",
            ["by at most 1 token (", "limit of"],
        ),
        (
            [PLAIN, "--best-of", "2"],
            " south\n",
            ["(--echo-prompt and --best-of are not of chats)"],
        ),
        (
            [ROOMS, "--generate-seq-length", "1"],
            " s",
            ["cut at its limit of 1 token; --generate"],
        ),
        ([ROOMS, "--stop", " s"], "\n", ["has no words; --stop ' s' ended it."]),
        ([ROOMS, "--num-completions", "2"], " south\n\n south\n\n", ["as a chat"]),
        (
            [ROOMS, "--max-model-len", "17"],
            " s",
            ["cut: the context (17 tokens) or KV"],
        ),
        (
            [PLAIN, "--raw", "--max-model-len", "28"],
            " s",
            ["(--raw), by at most 12 tokens"],
        ),
        (
            [PLAIN, "--raw", "--budget", "32"],
            " south\n",
            ["(--raw), by at most 17 tokens"],
        ),
    ],
)
def test_a_prompt_is_asked_as_a_chat_and_says_so(
    flags: list[str], answer: str, says: list[str]
) -> None:
    """Instruct models got a bare text, ended it at once, and an empty line was all one saw."""
    given = ["run", "--prompt", *flags]  # the likeliest tokens: a first try is no dice
    found = CliRunner().invoke(main, given)
    assert found.exit_code == 0 and found.stdout.startswith(answer), found.output
    assert all(each in found.stderr for each in says), found.stderr
    assert "Warning" not in found.stderr
    assert ("cut" in found.stderr) is (
        "limit of" in found.stderr or "context (" in found.stderr
    )
    assert CliRunner().invoke(main, [*given, "-q"]).stderr == ""


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["hi", "ho"], "--prompt is given 2 times, and answers one text"),
        (["-"], "--prompt - reads no stdin"),
    ],
)
def test_a_prompt_that_would_be_dropped_is_refused(texts: list[str], says: str) -> None:
    """The last of several --prompt was answered, and "-" itself, without a word."""
    flags = [word for text in texts for word in ("--prompt", text)]
    found = CliRunner().invoke(main, ["run", *flags])
    assert found.exit_code == 2 and says in found.stderr


def test_a_prompt_that_names_a_file_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model went on with the name of the file, and nothing said that it was not read."""
    monkeypatch.chdir(tmp_path)
    note = "The prompt is the text r.jsonl"
    for is_there in (False, True):
        found = CliRunner().invoke(main, ["run", "--prompt", "r.jsonl"])
        assert found.exit_code == 0 and (note in found.stderr) == is_there
        (tmp_path / "r.jsonl").touch()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["a.jsonl"], "--raw needs --prompt or --prompt-template"),
        (
            ["--prompt", "x", "--chat-template", "x.jinja"],
            "--raw and --chat-template exclude each other",
        ),
    ],
)
def test_raw_is_refused_where_it_would_mean_nothing(
    flags: list[str], message: str
) -> None:
    found = CliRunner().invoke(main, ["run", "--raw", *flags])
    assert found.exit_code == 2
    assert message in found.stderr


def test_a_base_models_completion_is_not_cut_at_16_tokens(
    llama_checkpoint: tuple[Path, object],
) -> None:
    """A model without a chat template completes, and 16 tokens were all that it drew."""
    given = [
        "run",
        "--prompt",
        "x",
        "--seed",
        "7",
        "--model-name",
        str(llama_checkpoint[0]),
    ]
    found = CliRunner().invoke(main, given)
    assert "plain text (this model has no chat template), by at most " in found.stderr
    most = int(found.stderr.split("by at most ")[1].split()[0])
    assert most > 16 and f"cut at its limit of {most} tokens" in found.stderr


@pytest.mark.parametrize(("context", "most"), [(32_768, 1024), (64, 32)])
def test_a_chats_answer_ends_after_1024_tokens_or_half_the_context(
    context: int, most: int
) -> None:
    """Small models may go on and on. --generate-seq-length says otherwise."""

    def make_request(text: str, **fields: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}]} | fields

    engine: Any = SimpleNamespace(context_length=context, make_request=make_request)
    run: Any = SimpleNamespace(job=SimpleNamespace(is_raw=False, prompt_fields={}))
    assert _make_request(run, ROOMS[:20], engine)["max_tokens"] == most
    run.job.prompt_fields = {"max_tokens": 7}
    assert _make_request(run, ROOMS[:20], engine)["max_tokens"] == 7
