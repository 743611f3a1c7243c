"""A bad line costs its own line, never the batch; and what is refused before there is a
batch."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest

import fminfer
from fminfer.server.batches.batch_run import MOST_UNNAMED
from tests.server.batch_calls import (
    CHAT,
    COMPLETIONS,
    batch_line,
    content,
    create,
    long_lines,
    texts_of,
    try_upload,
    upload,
    wait_for_end,
    wait_until,
)
from tests.server.running import Running, running
from tests.server.server_needs import needs_server

pytestmark = needs_server(
    engine={"max_rows": 4}, has_state=True, max_upload_bytes=100_000
)
FEW_LINES = needs_server(engine={"max_rows": 4}, has_state=True, max_batch_lines=8)

WISH = {"input_file_id": "x", "endpoint": COMPLETIONS, "completion_window": "24h"}


def error_of(record: dict[str, Any]) -> dict[str, Any]:
    """Return the error of a line, of whatever shape it is."""
    error: dict[str, Any] = record["response"]["body"]["error"]
    return error


def test_slashes_to_spare_in_a_url_are_passed_over(server: Running) -> None:
    """A base URL that ends with a slash made them, and each line was refused."""
    fields = json.loads(batch_line("a"))
    urls = (COMPLETIONS, f"{COMPLETIONS}/", f"/{COMPLETIONS}", "/v1//completions//")
    lines = [
        json.dumps(fields | {"custom_id": str(number), "url": url}).encode()
        for number, url in enumerate(urls)
    ]
    batch = wait_for_end(server, create(server, lines))
    assert batch["request_counts"] == {
        "total": len(urls),
        "completed": len(urls),
        "failed": 0,
    }
    wish = {"input_file_id": batch["input_file_id"], "completion_window": "24h"}
    made = server.post("/v1/batches", wish | {"endpoint": f"{COMPLETIONS}/"})
    assert made.status == 200 and made.json["endpoint"] == COMPLETIONS


def test_bad_lines_cost_themselves(server: Running) -> None:
    good = batch_line("good")
    fields = json.loads(good)
    bad = {
        "invalid_json": b"{no json",
        "not_an_object": b"[1]",
        "duplicate_custom_id": good,
        "invalid_type": json.dumps(fields | {"custom_id": 7}).encode(),
        "unsupported_parameter": json.dumps(
            fields | {"custom_id": "a", "method": "GET"}
        ).encode(),
        "missing_prompt": json.dumps(fields | {"custom_id": "b", "body": {}}).encode(),
    }
    others = [
        batch_line("chat", CHAT, messages=[{"role": "user", "content": "Hello"}]),
        json.dumps({"prompt": "bare"}).encode(),
        json.dumps({"request": {"prompt": "wrapped"}}).encode(),
        json.dumps({name: fields[name] for name in ("method", "url", "body")}).encode(),
        json.dumps({"custom_id": "bare", "prompt": "bare"}).encode(),
        json.dumps(
            {"custom_id": "lacks", "method": "POST", "url": COMPLETIONS}
        ).encode(),
        json.dumps({"custom_id": "two", "request": {}, "body": {}}).encode(),
    ]
    lines = [good, *bad.values(), b"", *others, batch_line("last")]
    batch = wait_for_end(server, create(server, lines))
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 15, "completed": 2, "failed": 13}
    assert set(texts_of(server, batch)) == {"good", "last"}
    errors = content(server, batch["error_file_id"])
    assert [error_of(each)["code"] for each in errors[:6]] == list(bad)
    for each in errors:  # lines that are no Batch lines had another form
        assert [*each] == ["id", "custom_id", "response", "error"] and each[
            "error"
        ] is None
        assert (
            each["id"].startswith("batch_req_")
            and each["response"]["status_code"] == 400
        )
    assert len({each["id"] for each in errors}) == len(errors)
    assert error_of(errors[0])["message"].startswith("line 2: the line is not JSON")
    assert error_of(errors[9])["message"].startswith("line 12: custom_id of line 12 is")
    told = [error_of(each)["message"] for each in errors[6:]]
    assert CHAT in told[0] and COMPLETIONS in told[0]
    assert "no request of a batch" in told[1] and "no request of a batch" in told[2]
    assert "custom_id" in told[3]
    assert [each["custom_id"] for each in errors] == [
        None,
        None,
        "good",
        7,
        "a",
        "b",
        "chat",
        None,
        None,
        None,
        "bare",
        "lacks",
        "two",
    ]


def test_a_batch_of_bad_lines_alone_is_completed(server: Running) -> None:
    batch = wait_for_end(server, create(server, [b"no"] * 100))
    assert batch["status"] == "completed" and batch["output_file_id"] is None
    assert batch["request_counts"] == {"total": 100, "completed": 0, "failed": 100}
    assert len(content(server, batch["error_file_id"])) == 100


@pytest.mark.parametrize(
    "data",
    [b"", b"\n\n  \n", b"[]", gzip.compress(b"\n"), gzip.compress(b"")],
    # gzip's bytes hold the time
    ids=["empty", "blank", "array", "packed-blank", "packed-empty"],
)
def test_a_file_without_lines_fails(server: Running, data: bytes) -> None:
    """One that was packed or an array was completed, with no line and no file."""
    sent = try_upload(server, data)
    answer = server.post("/v1/batches", WISH | {"input_file_id": sent.json["id"]})
    batch = wait_for_end(server, answer.json)
    assert batch["status"] == "failed" and batch["failed_at"] is not None
    (error,) = batch["errors"]["data"]
    assert error["code"] == "empty_file"


@FEW_LINES
@pytest.mark.parametrize(
    "pack", [gzip.compress, lambda data: b"[" + data.replace(b"\n", b",") + b"]"]
)
def test_a_packed_file_or_an_array_has_lines(
    server: Running, pack: Callable[[bytes], bytes]
) -> None:
    """How many they are is known once they are read; until then they counted as none."""
    lines = [batch_line("a"), batch_line("b")]
    sent = try_upload(server, pack(b"\n".join(lines)))
    answer = server.post("/v1/batches", WISH | {"input_file_id": sent.json["id"]})
    batch = wait_for_end(server, answer.json)
    assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}, batch[
        "errors"
    ]
    plain = wait_for_end(server, create(server, lines))
    assert texts_of(server, batch) == texts_of(server, plain)


def test_a_packed_file_is_not_finalizing_before_its_end(server: Running) -> None:
    """Once all lines read so far had their record it was, and could not be cancelled
    any more."""
    equal = [
        batch_line(f"{n}", prompt="a", temperature=0, max_tokens=1) for n in range(200)
    ]
    lines = equal + [
        json.dumps(json.loads(each) | {"custom_id": f"l{n}"}).encode()
        for n, each in enumerate(long_lines(200))
    ]
    sent = try_upload(server, gzip.compress(b"\n".join(lines)))
    answer = server.post("/v1/batches", WISH | {"input_file_id": sent.json["id"]})
    batch = wait_until(
        server, answer.json, lambda found: found["request_counts"]["completed"] >= 200
    )
    assert batch["status"] == "in_progress", batch["request_counts"]
    assert server.post(f"/v1/batches/{batch['id']}/cancel", None).status == 200
    batch = wait_for_end(server, batch)
    assert batch["status"] == "cancelled" and batch["request_counts"]["completed"] < 400


def test_brackets_in_brackets_cost_their_line(server: Running) -> None:
    """The custom_id of a line that is refused was written again, and the batch paused
    for ever."""
    deep = b"[" * 1000 + b"]" * 1000
    batch = wait_for_end(
        server,
        create(server, [b'{"custom_id":%s,"prompt":"a"}' % deep, batch_line("a")]),
    )
    assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}, batch[
        "errors"
    ]
    (error,) = content(server, batch["error_file_id"])
    assert error["custom_id"] is None and error_of(error)["message"].startswith(
        "line 1: "
    )


def test_models_are_checked_as_live_requests_are(
    engine: fminfer.Engine, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """By the names that clients know, which are not always the model's own."""
    engine = fminfer.Engine(dtype="float32", check_model=True)
    state = tmp_path_factory.mktemp("names") / "state"
    try:
        with running(engine, state=state, served_model_names=("mine",)) as server:
            lines = [
                batch_line("a", model="mine"),
                batch_line("b", model="other"),
                batch_line("c"),
            ]
            batch = wait_for_end(server, create(server, lines))
            records = content(server, batch["output_file_id"])
            assert [record["custom_id"] for record in records] == ["a", "c"]
            assert all(
                record["response"]["body"]["model"] == "mine" for record in records
            )
            (error,) = content(server, batch["error_file_id"])
            assert error["custom_id"] == "b" and "mine" in error_of(error)["message"]
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"input_file_id": "file-0"}, 404, "input_file_id"),
        ({"input_file_id": "../../etc/passwd"}, 404, "input_file_id"),
        ({"input_file_id": None}, 400, "input_file_id"),
        ({"endpoint": "/v1/images"}, 400, "endpoint"),
        ({"endpoint": 5}, 400, "endpoint"),
        ({"completion_window": "soon"}, 400, "completion_window"),
        ({"completion_window": "1.5h"}, 400, "completion_window"),
        ({"completion_window": "0h"}, 400, "completion_window"),
        ({"completion_window": "24h\n"}, 400, "completion_window"),
        ({"completion_window": "999999d"}, 400, "completion_window"),
        ({"metadata": {"a": 1}}, 400, "metadata"),
        ({"metadata": {"a" * 65: "b"}}, 400, "metadata"),
        ({"metadata": {"a": "b" * 513}}, 400, "metadata"),
        ({"metadata": {str(n): "" for n in range(17)}}, 400, "metadata"),
        ({"metadata": "a"}, 400, "metadata"),
        ({"output_expires_after": {"seconds": 3600}}, 400, "output_expires_after"),
    ],
)
def test_a_batch_is_refused_by_field(
    server: Running, changes: dict[str, Any], status: int, param: str
) -> None:
    file_id = upload(server, [batch_line("a")])
    answer = server.post("/v1/batches", WISH | {"input_file_id": file_id} | changes)
    assert answer.status == status, answer.body
    assert answer.error["param"] == param


@pytest.mark.parametrize(
    ("window", "seconds"), [("90m", 5400), ("2h", 7200), ("7d", 604800)]
)
def test_other_windows(server: Running, window: str, seconds: int) -> None:
    batch = create(server, [batch_line("a")], window=window)
    assert batch["expires_at"] - batch["created_at"] == seconds
    assert batch["completion_window"] == window
    assert wait_for_end(server, batch)["status"] == "completed"


def test_an_answer_is_no_input(server: Running) -> None:
    batch = wait_for_end(server, create(server, [batch_line("a")]))
    answer = server.post(
        "/v1/batches", WISH | {"input_file_id": batch["output_file_id"]}
    )
    assert answer.status == 400 and "batch_output" in answer.error["message"]


def test_an_input_in_use_is_kept(server: Running) -> None:
    batch = create(server, long_lines(60, 400))
    path = f"/v1/files/{batch['input_file_id']}"
    answer = server.call("DELETE", path)
    assert answer.status == 409 and "cancel" in answer.error["message"]
    assert server.post(f"/v1/batches/{batch['id']}/cancel", b"").status == 200
    wait_for_end(server, batch)
    assert server.call("DELETE", path).json["deleted"] is True


def test_uploads_are_refused_and_leave_nothing(server: Running) -> None:
    line = batch_line("a")
    too_large = try_upload(server, b"x" * 100_001)
    assert too_large.status == 413 and "--max-upload-size" in too_large.error["message"]
    assert try_upload(server, b"x" * 100_000).status == 200, "the limit is the file's"
    fine_tune = try_upload(server, line, purpose="fine-tune")
    assert fine_tune.status == 400 and "fine-tune" in fine_tune.error["message"]
    for body, headers, told in (
        (b"{}", {"Content-Type": "application/json"}, "multipart"),
        (b"{}", {"Content-Type": "multipart/form-data"}, "multipart"),
        (b"rubbish", {"Content-Type": "multipart/form-data; boundary=a"}, "form"),
        (b"", {"Content-Type": "multipart/form-data; boundary=a"}, "breaks off"),
        (part("file", line, "a.jsonl"), FORM, "purpose is absent"),
        (part("purpose", b"batch"), FORM, "file is absent"),
        (part("file", line), FORM, "a file, with a filename"),
        (part("purpose", b"batch", "a"), FORM, "not a file"),
        (part("purpose", b"x" * 2000), FORM, "1024 bytes"),
        (
            part("expires", b"3600"),
            FORM,
            "there are file, purpose, expires_after[anchor]",
        ),
        (part("file", line, "a") + part("file", line, "b"), FORM, "twice"),
    ):
        end = b"--a--\r\n" if headers is FORM else b""
        answer = server.call("POST", "/v1/files", body + end, headers)
        assert answer.status == 400 and told in answer.error["message"], answer.body
    assert not [*server.batches.uploads.iterdir()]


FORM = {"Content-Type": "multipart/form-data; boundary=a"}


def part(name: str, value: bytes, filename: str | None = None) -> bytes:
    also = "" if filename is None else f'; filename="{filename}"'
    head = f'--a\r\nContent-Disposition: form-data; name="{name}"{also}\r\n\r\n'
    return head.encode() + value + b"\r\n"


def test_a_broken_upload_leaves_nothing(server: Running) -> None:
    num_before = len(server.batches.files.list_of_owner(""))
    head = "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50000\r\n"
    head += "Content-Type: multipart/form-data; boundary=a\r\n\r\n"
    connection = server.send_raw(head.encode() + part("file", b"x" * 20000, "a.jsonl"))
    connection.close()
    assert server.get("/health").status == 200
    from tests.server.running import until

    until(lambda: not [*server.batches.uploads.iterdir()], "the part is removed")
    assert len(server.batches.files.list_of_owner("")) == num_before


@pytest.mark.parametrize(
    "filename",
    ["../../../evil.jsonl", "/etc/passwd", "a\x01b", "ü" * 400, "", "x.json"],
)
def test_a_clients_filename_is_no_path(server: Running, filename: str) -> None:
    answer = try_upload(server, batch_line("a"), filename=filename)
    assert answer.status == 200, answer.body
    assert answer.json["filename"] == filename[:255]
    path = server.batches.require_bytes(answer.json["id"], "")
    assert path.parent == server.batches.uploads.parent / "files"


@pytest.mark.parametrize(
    "path", ["/v1/files/x", "/v1/files/..%2f..%2fsalt", "/v1/files/file-%00/content"]
)
def test_odd_ids_are_not_found(server: Running, path: str) -> None:
    assert server.get(path).status == 404
    assert server.call("DELETE", path).status in (404, 405)


def test_without_a_state_folder(engine: fminfer.Engine) -> None:
    with running(engine) as server:
        for method, path in (
            ("POST", "/v1/files"),
            ("GET", "/v1/files"),
            ("GET", "/v1/files/file-1/content"),
            ("POST", "/v1/batches"),
            ("GET", "/v1/batches"),
            ("DELETE", "/v1/files/file-1"),
            ("POST", "/v1/batches/batch_1/cancel"),
        ):
            answer = server.call(method, path, {})
            assert answer.status == 404 and "--state FOLDER" in answer.error["message"]


@FEW_LINES
@pytest.mark.parametrize("lines", [[b""] * 10, [b"1"] * 9, [b"1"] * 8 + [b"1\n1"]])
def test_a_file_has_so_many_lines(server: Running, lines: list[bytes]) -> None:
    """60,000 lines of two bytes became 25 MB on the disk."""
    assert try_upload(server, b"\n".join(lines[:8])).status == 200
    answer = try_upload(server, b"\n".join(lines))
    assert answer.status == 413 and answer.error["code"] == "file_too_large"
    assert "8 lines" in answer.error["message"]
    assert "--max-batch-lines" in answer.error["message"]


@FEW_LINES
@pytest.mark.parametrize(
    "pack",
    [
        lambda num: gzip.compress(b"1\n" * num),
        lambda num: b"[" + b"1," * (num - 1) + b"1]",
    ],
    ids=["gzip", "array"],
)
@pytest.mark.parametrize("num_lines", [8, 3000])
def test_a_packed_file_has_so_many_lines(
    server: Running, pack: Callable[[int], bytes], num_lines: int
) -> None:
    """132 bytes of gzip became 49,000 lines, and 7 MB on the disk; a megabyte, any number."""
    sent = try_upload(server, pack(num_lines))
    answer = server.post("/v1/batches", WISH | {"input_file_id": sent.json["id"]})
    batch = wait_for_end(server, answer.json)
    if num_lines == 8:
        assert batch["status"] == "completed" and batch["request_counts"]["total"] == 8
    else:
        assert batch["status"] == "failed"
        [error] = batch["errors"]["data"]
        assert (
            error["code"] == "file_too_large"
            and "--max-batch-lines" in error["message"]
        )
    assert not [*server.batches.uploads.parent.rglob("*.journal*")]


@pytest.mark.parametrize("line", [b"1", b"{}", b"[]"])
def test_short_wrong_lines_make_few_records(server: Running, line: bytes) -> None:
    """Each had a record of hundreds of bytes, in the journal and in the error file."""
    num_lines = 3000
    batch = wait_for_end(server, create(server, [line] * num_lines))
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {
        "total": num_lines,
        "completed": 0,
        "failed": num_lines,
    }
    records = content(server, batch["error_file_id"])
    assert len(records) == MOST_UNNAMED
    assert "only counted" in error_of(records[-1])["message"]
    assert "only counted" not in error_of(records[-2])["message"]
