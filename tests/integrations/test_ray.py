"""The engine under Ray Data: two actors on this machine, and what rows of a dataset may be."""

from __future__ import annotations

import datetime
import json
import math
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")
import pyarrow
import pyarrow.parquet
import ray
import ray.data
from click.testing import CliRunner

from fminfer.cli.app import main
from fminfer.contract.envelope import Line
from fminfer.core.errors import UsageError
from fminfer.integrations.ray import Answer, _read_files, answer, read_lines
from tests.conftest import more

REPO = Path(__file__).parent.parent.parent
PROMPT = "Question: How do you go from the bathroom to the office?\nAnswer:"
# In bfloat16 a neighbour more or less can round a sampled token to another one.
EXACT: dict[str, Any] = {"dtype": "float32"}
SAMPLED = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 2.0}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        configure_logging=False,
        log_to_driver=False,
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def stage() -> Answer:
    return Answer(**EXACT)


def without_times(text: str | bytes) -> Any:
    """Parse a record; what depends on the hour and on neighbours is left out."""
    record = json.loads(text)
    for result in (record.get("result"), (record.get("response") or {}).get("body")):
        for name in ("request_time", "created", "usage"):
            (result or {}).pop(name, None)
    return record


def test_the_example_gives_the_records_of_a_run(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampled rows that come again and again too: they draw by their number in the file.

    A line may hold U+2028, which Ray's own read_text takes for the end of a line.
    """
    queries = REPO / "examples" / "queries"
    lines = [
        *(json.dumps(SAMPLED) for _ in range(100)),
        *(queries / "mixed.jsonl").read_text().splitlines(),
        '{"prompt": "A\u2028B", "max_tokens": 2, "temperature": 0}',
        "",
        *(queries / "bad_lines.jsonl").read_text().splitlines(),
        *(queries / "batch.jsonl").read_text().splitlines(),
        *(json.dumps({"id": i, "request": SAMPLED}) for i in range(100)),
    ]
    path, whole, answers = (
        tmp_path / name for name in ("a.jsonl", "run.jsonl", "ray.jsonl")
    )
    path.write_text("\n".join(lines) + "\n")
    found = CliRunner().invoke(
        main, ["run", "-q", str(path), "--output", str(whole), "--dtype", "float32"]
    )
    assert found.exit_code == 3, found.output
    monkeypatch.setattr(sys, "argv", ["ray_data.py", str(answers), str(path)])
    runpy.run_path(str(REPO / "examples" / "ray_data.py"), run_name="__main__")
    for ending in (".jsonl", ".errors.jsonl"):
        ours, theirs = (
            [
                without_times(line)
                for line in file.with_suffix(ending).read_bytes().splitlines()
            ]
            for file in (answers, whole)
        )
        assert ours == theirs
    assert not ray.data.DataContext.get_current().execution_options.preserve_order
    assert not list(tmp_path.glob("*.ordered"))


@more  # files in parts and ranks of an actor; the example above runs two actors
def test_parquet_in_batches(cluster: None, stage: Answer, tmp_path: Path) -> None:
    """Every row comes back once; with a number it gets what one engine answers alone.

    An engine of several ranks could not be made in somebody's process.
    """
    rows = [SAMPLED | {"number": i, "label": f"row {i}"} for i in range(1, 41)]
    rows[3]["prompt"] = None
    rows += [SAMPLED | {"number": None, "label": None}] * 40
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows), tmp_path / "in.parquet"
    )
    dataset = ray.data.read_parquet(str(tmp_path / "in.parquet"))
    answered = answer(dataset, batch_size=8, world_size=2, **EXACT)
    answered.write_parquet(str(tmp_path / "out"))
    found = pyarrow.parquet.read_table(tmp_path / "out").to_pylist()
    assert set(found[0]) == {*rows[0], "record", "is_error"} and len(found) == 80
    assert len(texts_of(found)) > 75, (
        "equal rows draw differently, in whichever batch they are"
    )
    numbered = sorted(
        (row for row in found if row["number"]), key=lambda row: int(row["number"])
    )
    assert [{name: row[name] for name in rows[0]} for row in numbered] == rows[:40]
    assert [row["number"] for row in numbered if row["is_error"]] == [4]
    alone = stage(pyarrow.Table.from_pylist(rows[:40]))
    assert [without_times(row["record"]) for row in numbered] == [
        without_times(record) for record in alone["record"].to_pylist()
    ]


@pytest.mark.parametrize("is_overwriting", [False, True])
def test_lines_that_say_the_same_but_for_their_seed(
    stage: Answer, tmp_path: Path, is_overwriting: bool
) -> None:
    """One with a seed was counted, and those after it drew otherwise than in a run.

    With `request_args` lines that differed in what these replace drew the same.
    """
    seeds = ({"seed": 7}, {}, {"seed": 8}, {}, {})
    rows = [
        SAMPLED | {"max_tokens": 8 + n * is_overwriting} | s
        for n, s in enumerate(seeds)
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (table,) = _read_files(pyarrow.table({"path": [str(path)]}))
    if is_overwriting:
        stage = Answer(request_args={"max_tokens": 8}, **EXACT)
    found = texts_of(stage(table).to_pylist())
    assert len(found) == 5
    if not is_overwriting:
        lines = [
            Line(0, n, json.dumps(row).encode()) for n, row in enumerate(rows, start=1)
        ]
        records = stage._engine.run(lines)
        assert {r.result["choices"][0]["text"] for r in records if r.result} == found


def test_chat_lines_draw_as_in_a_run(stage: Answer, tmp_path: Path) -> None:
    """Equal ones are counted where no template is at hand."""
    chat = {
        "messages": [{"role": "user", "content": "Once"}],
        "max_tokens": 8,
        "temperature": 2.0,
    }
    batch = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": chat,
    }
    other = chat | {"messages": [{"content": "Twice", "role": "user"}]}
    rows = [chat, other, chat, batch, chat | {"seed": 1}, other]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (table,) = _read_files(pyarrow.table({"path": [str(path)]}))
    assert table["num_equal"].to_pylist() == [0, 0, 1, 2, 0, 1]
    found = [without_times(row["record"]) for row in stage(table).to_pylist()]
    lines = [
        Line(0, n, json.dumps(row).encode()) for n, row in enumerate(rows, start=1)
    ]
    records = sorted(stage._engine.run(lines), key=lambda record: record.line.number)
    assert found == [without_times(record.to_json()) for record in records]


def texts_of(rows: list[dict[str, Any]]) -> set[str]:
    records = [json.loads(row["record"]) for row in rows if not row["is_error"]]
    return {record["result"]["choices"][0]["text"] for record in records}


def answered(stage: Answer, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    table = stage(pyarrow.Table.from_pylist(rows))
    assert table.column_names[-2:] == ["record", "is_error"] and table.num_rows == len(
        rows
    )
    return [json.loads(row["record"]) for row in table.to_pylist()]


def test_values_of_a_table_become_json(stage: Answer) -> None:
    """A column of whole numbers with a null in it stays whole; members that are absent
    stay so."""
    first, second = answered(
        stage,
        [
            {
                "prompt": [65, 66, 67],
                "max_tokens": 2,
                "logit_bias": {"11": 5},
                "seed": None,
            },
            {
                "prompt": [68],
                "max_tokens": None,
                "logit_bias": {"12": -5},
                "seed": 2**62 + 1,
            },
        ],
    )
    assert first["request"] == {
        "prompt": [65, 66, 67],
        "max_tokens": 2,
        "logit_bias": {"11": 5},
    }
    assert second["request"] == {
        "prompt": [68],
        "logit_bias": {"12": -5},
        "seed": 2**62 + 1,
    }
    assert "result" in first and "result" in second


def test_shapes_of_rows(stage: Answer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0}
    (wrapped,) = answered(stage, [{"request": body, "id": "x"}])
    assert wrapped["id"] == "x" and wrapped["request"] == body
    batch = {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": body}
    (found,) = answered(stage, [batch])
    assert found["custom_id"] == "c" and found["response"]["status_code"] == 200
    for line in (json.dumps(body), json.dumps(body).encode()):
        (found,) = answered(stage, [{"line": line, "other": 7}])
        assert found["request"] == body and "other" not in found


def test_a_row_that_is_no_request_costs_itself_only(stage: Answer) -> None:
    rows = [
        {"prompt": "A", "max_tokens": 1, "temperature": 0.0, "day": None},
        {"prompt": "A", "max_tokens": 1, "temperature": math.nan, "day": None},
        {
            "prompt": "A",
            "max_tokens": 1,
            "temperature": 0.0,
            "day": datetime.date(2026, 1, 2),
        },
        {"prompt": "A", "max_tokens": 1, "temperature": 0.0, "day": None},
    ]
    found = answered(stage, rows)
    assert ["error" in record for record in found] == [False, True, True, False]
    assert "NaN is not JSON" in found[1]["error"]["message"]
    assert "date" in found[2]["error"]["message"] and found[2]["line"] == 3
    (found[1],) = answered(stage, [{"line": b'{"prompt": "\xff"}'}])
    assert found[1]["error"]["code"] == "invalid_utf8"


def test_a_line_that_is_too_long_is_out_of_range_as_in_a_run(
    stage: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code was invalid_json; a row whose own line was as long was parsed and answered."""
    monkeypatch.setattr("fminfer.files.json_values.MAX_VALUE_BYTES", 500)
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"prompt": "A" * 600, "max_tokens": 1}) + "\n"
    )
    (table,) = _read_files(pyarrow.table({"path": [str(tmp_path / "a.jsonl")]}))
    for batch in (
        table,
        pyarrow.table({"line": [(tmp_path / "a.jsonl").read_bytes().strip()]}),
    ):
        (row,) = stage(batch).to_pylist()
        error = json.loads(row["record"])["error"]
        assert error["code"] == "out_of_range"
        assert "631 bytes, and at most 500 are read" in error["message"]


def test_what_is_wrong_is_told_before_actors_start(
    stage: Answer, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="already"):
        stage(pyarrow.Table.from_pylist([{"prompt": "A", "record": "x"}]))
    with pytest.raises(UsageError, match="at least 1"):
        answer(None, max_rows=0)
    with pytest.raises(UsageError, match="attention is called kernels now"):
        answer(None, attention="eager")
    with pytest.raises(UsageError, match="does not exist"):
        read_lines(tmp_path / "none.jsonl")
    with pytest.raises(UsageError, match="no stdin"):
        read_lines("-")


def test_numpy_and_mixed_columns(cluster: None, stage: Answer) -> None:
    """Ray keeps equal lists as tensors, and columns of several types as objects."""
    import numpy as np

    rows = [
        {"prompt": np.array([65, 66]), "max_tokens": np.int64(1)},
        {"prompt": np.array([67, 68]), "max_tokens": np.int64(2)},
    ]
    mixed = [{"prompt": "A", "max_tokens": 1}, {"prompt": [65, 66], "max_tokens": 1}]
    for given in (rows, mixed):
        dataset = ray.data.from_items(given, override_num_blocks=1)
        table = dataset.take_batch(2, batch_format="pyarrow")
        records = [json.loads(row["record"]) for row in stage(table).to_pylist()]
        for record, row in zip(records, given, strict=True):
            assert record["request"]["prompt"] == np.array(row["prompt"]).tolist()
        assert all("result" in record for record in records)


def test_the_ranks_of_an_actor_share_its_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank computed with as many threads as the actor has CPUs."""
    found: list[dict[str, Any]] = []

    def make_engine(model: str | None, **options: Any) -> Any:
        found.append(options)
        return SimpleNamespace(config=SimpleNamespace(request_args=None))

    monkeypatch.setattr("fminfer.integrations.ray.Engine", make_engine)
    for sizes in ({"tensor_parallel_size": 2}, {"world_size": 4, "threads": 3}, {}):
        Answer(num_cpus=4, **sizes)
    assert [options.get("threads") for options in found] == [2, 3, None]
