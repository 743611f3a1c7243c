"""Whose trouble a response is, and that each request has one event in the end."""

from __future__ import annotations

import threading
import time
import tracemalloc
from typing import Any

import pytest

from fminfer.client.remote_core import RemoteCore
from fminfer.core.errors import FminferError, RequestError, ServerError, UsageError
from tests.client.core_runs import answer, open_core, step_all
from tests.client.remote_requests import make_request
from tests.client.stand_in import StandIn


def run_fault(fault: str, *requests: str, **settings: Any) -> list[Any]:
    with StandIn("--fault", fault) as server, open_core(server.url, **settings) as core:
        return answer(core, *requests)


def test_requests_of_all_endpoints_are_answered() -> None:
    with StandIn() as server, open_core(server.url) as core:
        requests = [
            make_request("text"),
            make_request("words", "chat"),
            make_request("vector", "embeddings"),
            make_request("label", "classify"),
        ]
        assert answer(core, *requests) == ["<text>", "<words>", "vector", "label"]
        assert core.stats.num_prompt_tokens == 12
        assert core.stats.num_generated_tokens == 4
        assert core.stats.num_ended == core.stats.num_begun == 4
        assert core.num_without_usage == core.num_sent_again == 0


def test_a_connection_that_the_server_closed_is_no_trouble() -> None:
    """llama-server closes each after a hundred requests."""
    with StandIn("--closes-after", "3") as server, open_core(server.url) as core:
        texts = answer(core, *map(str, range(60)))
        assert texts == [f"<{number}>" for number in range(60)]
        assert core.num_sent_again == 0


def test_a_route_may_be_outside_of_v1() -> None:
    with StandIn("--routes", "completions,/classify") as server:
        with open_core(server.url) as core:
            request = make_request("label", "classify")
            assert answer(core, request, request) == ["label", "label"]
        assert server.read_counts()["requests"] <= 4


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 7, 50])
def test_a_stream_may_come_in_any_pieces(num_bytes: int) -> None:
    arguments = ["--frame-bytes", str(num_bytes)]
    with StandIn(*arguments) as server, open_core(server.url) as core:
        assert answer(core, "täxt ☃", "b") == ["<täxt ☃>", "<b>"]


@pytest.mark.parametrize(
    "fault",
    [
        "408",
        "425",
        "429",
        "500",
        "502",
        "503",
        "529",
        "retry-after",
        "html",
        "html-502",
        "error-in-200",
        "error-in-stream",
        "cut",
        "clean-cut",
        "abort",
    ],
)
def test_trouble_of_the_machine_is_met_by_another_try(fault: str) -> None:
    with StandIn("--fault", f"{fault}:1") as server, open_core(server.url) as core:
        assert answer(core, "a", "b") == ["<a>", "<b>"]
        assert core.num_sent_again >= 1


@pytest.mark.parametrize("fault", ["hang", "hang-after-data", "drip", "ping"])
def test_an_answer_without_data_is_late(fault: str) -> None:
    """Neither bytes without the end of a line nor comments are progress."""
    server = StandIn("--fault", f"{fault}:1")
    with server, open_core(server.url, engine_timeout_s=1.0) as core:
        assert answer(core, "a") == ["<a>"]
        assert core.num_sent_again == 1


@pytest.mark.parametrize("fault", ["hang", "500", "html", "cut", "429", "drip"])
def test_trouble_without_end_ends_the_run(fault: str) -> None:
    with pytest.raises(
        ServerError, match=r"has answered anything for 2 s .*127\.0\.0\.1"
    ):
        run_fault(fault, "a", "b", engine_timeout_s=0.5, engine_patience_s=2.0)


def test_retry_after_is_honoured() -> None:
    begin_s = time.monotonic()
    assert run_fault("retry-after:1", "a") == ["<a>"]
    assert time.monotonic() - begin_s >= 1.0


@pytest.mark.parametrize("fault", ["400", "413", "422", "501", "403-content_filter"])
def test_a_refused_row_is_its_own_error(fault: str) -> None:
    with StandIn() as server, open_core(server.url) as core:
        results = answer(core, "a", f"!{fault}!", "b")
    assert results[::2] == ["<a>", "<b>"]
    assert results[1].code == "refused_by_server"
    assert f"answered {fault[:3]}: status {fault[:3]}" in results[1].message


@pytest.mark.parametrize("fault", ["endless", "endless-line"])
def test_the_bytes_of_an_answer_are_bounded(fault: str) -> None:
    with StandIn() as server, open_core(server.url, max_answer_bytes=1 << 20) as core:
        answer(core, "a")
        tracemalloc.start()
        refused, answered = answer(core, f"!{fault}!", "b")
        most_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert most_bytes < 8 << 20
    assert answered == "<b>"
    assert refused.code == "out_of_range" and "--max-answer-size" in refused.message


@pytest.mark.parametrize(
    "fault, words",
    [
        ("401", "FMINFER_ENGINE_KEY"),
        ("403", "FMINFER_ENGINE_KEY"),
        ("429-insufficient_quota", "429"),
        ("redirect", "localhost:1"),
        ("redirect-here", "/v1/moved"),
    ],
)
def test_trouble_of_the_run_ends_it_at_once(fault: str, words: str) -> None:
    with pytest.raises(ServerError, match=words):
        run_fault(fault, "a")


def test_another_model_ends_the_run() -> None:
    with StandIn() as server, open_core(server.url) as core:
        assert answer(core, "a") == ["<a>"]
        with pytest.raises(
            ServerError, match="another-model; at the start it was stand-in"
        ):
            answer(core, "!other-model!")


def test_rows_that_are_all_refused_alike_end_the_run() -> None:
    with pytest.raises(ServerError, match="first 20 requests were all refused"):
        run_fault("400", *"abcdefghijklmnopqrstuvwxyz")


def test_rows_that_are_all_refused_alike_have_no_records() -> None:
    """The run ends for no fault of theirs, so that the next one asks again."""
    with StandIn("--fault", "400") as server, open_core(server.url) as core:
        for number in range(40):
            core.add(make_request(str(number)))
        events = []
        with pytest.raises(ServerError, match="first 20"):
            while core.has_work:
                events += core.step()
    assert events == []


def test_an_endpoint_that_is_missing_is_the_rows_trouble() -> None:
    with StandIn("--routes", "completions") as server, open_core(server.url) as core:
        refused, answered = answer(core, make_request("a", "embeddings"), "b")
    assert refused.code == "refused_by_server" and "404" in refused.message
    assert answered == "<b>"


def test_the_last_request_that_only_fails_is_an_error_of_its_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fminfer.client.remote_core.FIRST_PAUSE_S", 0.001)
    patience = {"engine_patience_s": 3.0}
    with StandIn() as server, open_core(server.url, **patience) as core:
        assert answer(core, "a") == ["<a>"]
        (poison,) = answer(core, "!html!")
    assert poison.code == "server_failed" and "Bad gateway" in poison.message
    assert poison.is_retryable


def test_rows_may_be_refused_behind_an_answer() -> None:
    with StandIn() as server, open_core(server.url) as core:
        assert answer(core, "a") == ["<a>"]
        results = answer(core, *["!400!"] * 30)
    assert all(isinstance(each, RequestError) for each in results)


def test_a_request_that_fails_while_others_are_answered_is_an_error_of_its_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fminfer.client.remote_core.FIRST_PAUSE_S", 0.001)
    with StandIn("--service-s", "0.01") as server, open_core(server.url) as core:
        poison, *others = answer(core, "!500!", *map(str, range(400)))
    assert others == [f"<{number}>" for number in range(400)]
    assert poison.code == "server_failed" and "8 times" in poison.message


def test_an_answer_whose_response_does_not_end_is_whole() -> None:
    assert run_fault("no-end:1", "a") == ["<a>"]


def test_an_answer_without_done_or_usage_counts() -> None:
    with StandIn() as server, open_core(server.url) as core:
        assert answer(core, "!no-done!", "!no-usage!") == [
            "<!no-done!>",
            "<!no-usage!>",
        ]
        assert core.num_without_usage == 1


def test_the_key_is_sent_and_never_quoted() -> None:
    with StandIn("--key", "secret-key") as server:
        with open_core(server.url, key="secret-key") as core:
            assert answer(core, "a") == ["<a>"]
            (refused,) = answer(core, "!echo-key!")
            assert "Bearer [key]" in refused.message
        with pytest.raises(UsageError, match="FMINFER_ENGINE_KEY"):
            open_core(server.url, key="other-key").__enter__()


def test_a_revoked_key_ends_the_run() -> None:
    server = StandIn("--key", "k", "--revoke-after", "3")
    with (
        server,
        open_core(server.url, key="k") as core,
        pytest.raises(ServerError, match="401"),
    ):
        answer(core, *"abcdefgh")


def test_a_cancelled_request_closes_its_connection() -> None:
    with StandIn() as server, open_core(server.url) as core:
        number = core.add(make_request("!hang!"))
        while server.read_counts()["requests"] == 0:
            core.step()
        core.cancel(number)
        assert not core.has_work
        end_s = time.monotonic() + 30
        while server.read_counts()["disconnects"] == 0 and time.monotonic() < end_s:
            core.step()
        assert server.read_counts()["disconnects"] == 1
        assert not core.is_computing
        assert answer(core, "a") == ["<a>"]


def test_nothing_begins_while_the_core_drains() -> None:
    with StandIn("--service-s", "0.3") as server, open_core(server.url) as core:
        ids = [core.add(make_request(str(number))) for number in range(20)]
        while server.read_counts()["requests"] == 0:
            core.step()
        core.drain(time.perf_counter() + 60)
        num_begun = core.stats.num_begun
        num_ended = 0
        while core.has_begun:
            num_ended += len(core.step())
        assert num_ended == num_begun == core.stats.num_begun < 20
        assert core.num_waiting == 20 - num_begun
        core.start_run()
        assert len(step_all(core)) == len(ids) - num_begun


def test_what_runs_longer_than_the_drain_is_cancelled() -> None:
    with StandIn() as server, open_core(server.url) as core:
        core.add(make_request("!hang!"))
        core.step()
        core.drain(time.perf_counter() + 0.1)
        end_s = time.monotonic() + 30
        while core.has_begun and time.monotonic() < end_s:
            core.step()
        assert not core.has_begun


def test_wake_ends_waits() -> None:
    with StandIn() as server, open_core(server.url) as core:
        threading.Timer(0.1, core.wake).start()
        assert core.wait(60.0) is False
        core.add(make_request("a"))
        assert core.wait(60.0) is True


def step_until(core: RemoteCore, num_events: int) -> int:
    num = 0
    while num < num_events:
        num += len(core.step())
    return num


def test_a_server_that_is_killed_and_started_again_goes_on() -> None:
    with StandIn("--service-s", "0.02") as server, open_core(server.url) as core:
        for number in range(300):
            core.add(make_request(str(number)))
        num_events = step_until(core, 20)
        server.kill()
        while core.num_sent_again == 0:
            num_events += len(core.step())
        server.start()
        assert num_events + len(step_all(core)) == 300


def test_a_server_that_comes_back_with_another_model_ends_the_run() -> None:
    with StandIn("--service-s", "0.02") as server, open_core(server.url) as core:
        for number in range(300):
            core.add(make_request(str(number)))
        step_until(core, 20)
        server.kill()
        server.start("--model", "another")
        with pytest.raises(FminferError, match="stand-in"):
            step_all(core)


def test_one_of_two_servers_may_die() -> None:
    arguments = ["--service-s", "0.02"]
    with StandIn(*arguments) as first, StandIn(*arguments) as second:
        urls = f"{first.url},{second.url}"
        with open_core(urls) as core:
            for number in range(300):
                core.add(make_request(str(number)))
            num_events = step_until(core, 20)
            assert first.read_counts()["requests"] > 0
            second.kill()
            assert num_events + len(step_all(core)) == 300


def test_a_request_that_failed_goes_to_another_server_at_once() -> None:
    arguments = ["--fault", "500", "--service-s", "0.02"]
    with StandIn(*arguments) as first, StandIn("--service-s", "0.02") as second:
        with open_core(f"{first.url},{second.url}", engine_patience_s=60.0) as core:
            assert answer(core, *"abcdefgh") == [f"<{each}>" for each in "abcdefgh"]
        assert second.read_counts()["answers"] == 8


def test_a_server_that_was_not_there_joins() -> None:
    arguments = ["--service-s", "0.05"]
    with StandIn(*arguments) as first, StandIn(*arguments) as second:
        second.kill()
        with open_core(f"{first.url},{second.url}") as core:
            for number in range(400):
                core.add(make_request(str(number)))
            num_events = step_until(core, 5)
            second.start()
            assert num_events + len(step_all(core)) == 400
            assert second.read_counts()["answers"] > 0


def test_requests_that_begin_alike_go_to_one_server() -> None:
    with StandIn("--keep-prompts") as first, StandIn("--keep-prompts") as second:
        with open_core(f"{first.url},{second.url}") as core:
            for number in range(8):
                answer(core, "a" * 40 + str(number), "b" * 40 + str(number))
        prompts = [first.read_counts()["prompts"], second.read_counts()["prompts"]]
    assert sorted(
        {each[0] for each in prompts[0]} | {each[0] for each in prompts[1]}
    ) == [
        "a",
        "b",
    ]
    assert all(len({each[0] for each in of_server}) == 1 for of_server in prompts)
