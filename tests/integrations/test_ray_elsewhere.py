"""Ray's stage over servers elsewhere: actors have clients, and no model."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
import pyarrow
import pyarrow.parquet
import ray
import ray.data
from ray.data.checkpoint import CheckpointConfig

import fminfer
from fminfer.core.errors import ServerError, UsageError
from fminfer.integrations.ray import Answer, answer
from tests.conftest import more
from tests.server.running import Running, running, until

KEY = "sk-of-a-test"
PROMPT = "Question: How do you go from the bathroom to the office?\nAnswer:"


@pytest.fixture(scope="module")
def engine() -> Iterator[fminfer.Engine]:
    with fminfer.Engine(dtype="float32") as engine:
        yield engine


@pytest.fixture
def server(engine: fminfer.Engine) -> Iterator[Running]:
    with running(engine, api_keys=(KEY,)) as server:
        yield server


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Three CPUs: going on takes one more than the first run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FMINFER_ENGINE_KEY", KEY)
        ray.init(
            num_cpus=3,
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            configure_logging=False,
            log_to_driver=False,
        )
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


def make_rows(num: int, **fields: Any) -> list[dict[str, Any]]:
    fields = {"max_tokens": 5, "temperature": 0.0, **fields}
    return [{"id": n, "prompt": f"{n} {PROMPT}", **fields} for n in range(num)]


def find_text(record: str) -> str:
    text: str = json.loads(record)["result"]["choices"][0]["text"]
    return text


def test_two_actors_have_a_server_answer(cluster: None, server: Running) -> None:
    """Rows come back as with a model; the key is in the actors' environment alone."""
    rows = make_rows(40)
    rows[3]["prompt"] = None
    answered = answer(
        ray.data.from_items(rows, override_num_blocks=4),
        engine=f"{server.url}/v1",
        concurrency=2,
        num_cpus=0.5,
        batch_size=10,
    )
    results = sorted(answered.take_all(), key=lambda row: int(row["id"]))
    assert [row["id"] for row in results] == list(range(40))
    assert {*results[0]} == {*rows[0], "record", "is_error"}
    assert [row["id"] for row in results if row["is_error"]] == [3]
    for number in (0, 39):
        fields = {name: value for name, value in rows[number].items() if name != "id"}
        key = {"Authorization": f"Bearer {KEY}"}
        response = server.post("/v1/completions", fields, key).json
        text = find_text(results[number]["record"])
        assert text == response["choices"][0]["text"]


def test_a_stage_needs_the_key_of_its_environment(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{server.url}/v1"
    monkeypatch.delenv("FMINFER_ENGINE_KEY", raising=False)
    with pytest.raises(UsageError, match="FMINFER_ENGINE_KEY"):
        Answer(engine=url)
    monkeypatch.setenv("FMINFER_ENGINE_KEY", KEY)
    stage = Answer(engine=url, max_in_flight=2, request_args={"max_tokens": 2})
    rows = stage(pyarrow.Table.from_pylist(make_rows(3))).to_pylist()
    records = [json.loads(row["record"]) for row in rows]
    assert [r["result"]["usage"]["completion_tokens"] for r in records] == [2, 2, 2]
    assert KEY not in json.dumps(records)


def test_options_of_the_other_engine_are_refused_before_actors_start() -> None:
    url = "http://127.0.0.1:9/v1"
    for options, reason in (
        ({"engine": url, "dtype": "float32"}, "dtype"),
        ({"engine": "host:8000"}, "base URLs"),
        ({"engine": url, "max_in_flight": 0}, "at least 1"),
        ({"engine": url, "price_in": 1.0}, "no option price_in"),
        ({"max_in_flight": 4}, "no option max_in_flight"),
    ):
        with pytest.raises(UsageError, match=reason):
            answer(None, **options)


def test_a_stage_without_a_server_ends(server: Running) -> None:
    with pytest.raises(ServerError, match="no server of --engine was reached"):
        Answer(engine="http://127.0.0.1:9/v1", engine_patience_s=0.1)


@more  # it waits for Ray: 10 s
def test_a_checkpoint_goes_on_after_a_failure(
    cluster: None, engine: fminfer.Engine, tmp_path: Path
) -> None:
    """As docs/running.md shows it: what a failed job has written is not asked again."""
    rows = make_rows(200, max_tokens=60, ignore_eos=True)
    inputs = tmp_path / "in.parquet"
    outputs = tmp_path / "out"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), inputs)

    def run(url: str) -> None:
        requests = ray.data.read_parquet(str(inputs))
        requests.context.checkpoint_config = CheckpointConfig(
            id_column="id", checkpoint_path=str(tmp_path / "checkpoint")
        )
        # the failed run's actor may still have its part of a CPU
        options: dict[str, Any] = {"num_cpus": 0.5, "engine_patience_s": 1.0}
        answered = answer(requests, engine=f"{url}/v1", batch_size=16, **options)
        answered.write_parquet(str(outputs))

    with running(engine, api_keys=(KEY,)) as server:
        port = server.address[1]

        def end_once_rows_are_written() -> None:
            until(lambda: len([*outputs.glob("*.parquet")]) > 1, "rows are written")
            server.thread.end()

        ending = threading.Thread(target=end_once_rows_are_written)
        ending.start()
        with pytest.raises(Exception, match="no server has answered anything"):
            run(server.url)
        ending.join()
    num_kept = pyarrow.parquet.read_table(outputs).num_rows
    assert 0 < num_kept < 200

    before = engine.stats.num_ended
    with running(engine, api_keys=(KEY,), port=port) as server:
        run(server.url)
    results = pyarrow.parquet.read_table(outputs).to_pylist()
    assert sorted(row["id"] for row in results) == list(range(200))
    assert engine.stats.num_ended - before < 200, "kept rows were asked again"
