"""Live requests go first, whatever batches are behind them; and batches share what is left."""

from __future__ import annotations

import threading
import time

import pytest

from tests.server.batch_calls import (
    Clock,
    create,
    get,
    long_lines,
    wait_for_end,
    wait_until,
)
from tests.server.running import Running, until
from tests.server.server_needs import needs_server

pytestmark = needs_server(
    engine={"max_rows": 4}, has_state=True, is_fresh=True, queue_size=6
)

LIVE = {"prompt": [40, 41, 42], "max_tokens": 3, "ignore_eos": True}
NUM_WAITING = 40  # lines of a batch that are read


def has_begun(batch: dict[str, object]) -> bool:
    return batch["status"] == "in_progress"


def test_a_live_request_takes_few_steps_beside_a_batch(server: Running) -> None:
    """All rows are a batch's, each for 400 steps more; a live one needs its own steps
    and two."""
    batch = create(server, long_lines(300, 400))
    until(lambda: server.engine.state.num_running == 4, "the batch has all rows")
    num_steps = []
    for _ in range(10):
        before = server.engine.stats.num_steps
        assert server.post("/v1/completions", LIVE).status == 200
        num_steps.append(server.engine.stats.num_steps - before)
    # Three draws, two steps in flight when it comes, and those until its answer is sent.
    assert sorted(num_steps)[5] <= 9, num_steps
    assert get(server, batch)["status"] == "in_progress"


def test_the_queue_counts_live_requests_alone(server: Running) -> None:
    create(server, long_lines(300, 400))
    until(lambda: server.engine._core.num_waiting_behind > 20, "its prompts wait")
    dispatcher = server.thread.service.dispatcher
    assert dispatcher.num_waiting == 0
    assert server.get("/stats").json["num_waiting"] == 0
    metrics = server.get("/metrics").body.decode()
    assert 'vllm:num_requests_waiting{model_name="fminfer-demo"} 0.0' in metrics
    assert 'fminfer:batches_open{model_name="fminfer-demo"} 1.0' in metrics
    assert server.post("/v1/completions", LIVE).status == 200, "no 429"
    # The bound is still there: ten long ones at once are too many for four rows and six places.
    long = {"prompt": [5], "max_tokens": 400, "ignore_eos": True}
    connections = [server.start_post("/v1/completions", long) for _ in range(4)]
    until(
        lambda: dispatcher.num_open == 4 and not dispatcher.num_waiting, "four rows run"
    )
    connections += [server.start_post("/v1/completions", long) for _ in range(6)]
    until(lambda: dispatcher.num_waiting >= 6, "the queue is full")
    assert server.post("/v1/completions", LIVE).status == 429
    for connection in connections:
        connection.close()


def test_a_batch_that_gets_no_row_expires(server: Running, clock: Clock) -> None:
    """Nothing comes of the engine that could wake it."""
    lanes = server.engine.runs.lanes
    lanes.is_closed = True
    batch = create(server, long_lines(NUM_WAITING, 1), window="1h")
    until(
        lambda: [lane.num_waiting for lane in lanes.all] == [NUM_WAITING],
        "its lines wait",
    )
    time.sleep(0.05)  # until it waits as well
    clock.ahead_s = 3600
    batch = wait_for_end(server, batch)
    assert (
        batch["status"] == "expired"
        and batch["request_counts"]["failed"] == NUM_WAITING
    )
    lanes.is_closed = False


def test_a_short_batch_does_not_wait_for_a_long_one(server: Running) -> None:
    long = create(server, long_lines(600, 60))
    wait_until(server, long, has_begun)
    until(lambda: server.engine._core.num_waiting_behind > 20, "its prompts wait")
    short = wait_for_end(server, create(server, long_lines(10, 20)))
    assert short["status"] == "completed"
    counts = get(server, long)["request_counts"]
    assert counts["completed"] < 300, "the long one goes on"


def test_batches_share(server: Running) -> None:
    """Three begin together; when one is over, the others are not far behind."""
    server.engine.runs.lanes.is_closed = True
    batches = [create(server, long_lines(60, 20)) for _ in range(3)]
    for batch in batches:
        wait_until(server, batch, has_begun)
    # A lane that is alone for a moment may have as many prompts in the engine as wait there.
    lanes = server.engine.runs.lanes.all
    until(
        lambda: len(lanes) == 3 and all(lane.num_waiting >= 32 for lane in lanes),
        "all wait",
    )
    server.engine.runs.lanes.is_closed = False
    found = batches
    while all(batch["status"] != "completed" for batch in found):
        time.sleep(0.02)
        found = [get(server, batch) for batch in batches]
    assert all(batch["request_counts"]["completed"] >= 30 for batch in found), found
    for batch in batches:
        assert wait_for_end(server, batch)["status"] == "completed"


def test_more_batches_than_are_answered_at_once(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fminfer.server.batches.batch_work.MOST_AT_ONCE", 2)
    batches = [create(server, long_lines(10, 20)) for _ in range(6)]
    threads = [
        thread for thread in threading.enumerate() if thread.name.startswith("batch_")
    ]
    assert len(threads) <= 2
    for batch in batches:
        assert wait_for_end(server, batch)["status"] == "completed"


def test_nothing_is_left_of_ended_batches(server: Running) -> None:
    for _ in range(3):
        wait_for_end(server, create(server, long_lines(8, 4)))
    until(server.is_idle, "all is free")
    time.sleep(0.05)
    lanes = server.engine.runs.lanes
    assert not lanes.all
    assert not [t for t in threading.enumerate() if t.name.startswith("batch_")]
    assert 'kind="answer"' in server.get("/metrics").body.decode()
