"""The benchmark of servers: its client, its phases and its figures; no peer is needed."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"
# scripts, not a package: they find each other like this
sys.path.insert(0, str(BENCHMARKS))

import serve_client  # noqa: E402
import serve_figures  # noqa: E402
import serve_sides  # noqa: E402

PAUSE_S = 0.05


class Answers(BaseHTTPRequestHandler):
    """Counts up to max_tokens, slowly where it streams."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        fields = json.loads(self.rfile.read(int(self.headers["content-length"])))
        num_tokens = fields["max_tokens"]
        if num_tokens == 0:
            self.send_error(400)
        elif fields.get("stream"):
            self._stream(num_tokens)
        else:
            text = "".join(f"{i} " for i in range(num_tokens))
            usage = {"completion_tokens": num_tokens}
            body = json.dumps({"choices": [{"text": text}], "usage": usage}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _stream(self, num_tokens: int) -> None:
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self._send(b": waiting\n\n")
        for i in range(num_tokens):
            time.sleep(PAUSE_S)
            self._send(
                f"data: {json.dumps({'choices': [{'text': f'{i} '}]})}\n\n".encode()
            )
        usage = {"choices": [], "usage": {"completion_tokens": num_tokens}}
        self._send(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())
        self._send(b"")

    def _send(self, data: bytes) -> None:
        """Send a chunk in two pieces, as a network may."""
        chunk = b"%x\r\n%s\r\n" % (len(data), data)
        self.wfile.write(chunk[:5])
        self.wfile.flush()
        self.wfile.write(chunk[5:])


@pytest.fixture
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def _job(
    port: int, max_tokens: list[int], num_clients: int, is_streamed: bool
) -> dict[str, Any]:
    rows = [{"prompt": [1], "max_tokens": number} for number in max_tokens]
    return {
        "port": port,
        "requests": rows,
        "num_clients": num_clients,
        "is_streamed": is_streamed,
    }


@pytest.mark.parametrize("is_streamed", [False, True])
def test_each_client_asks_again_when_it_has_its_answer(
    port: int, is_streamed: bool
) -> None:
    asked = [3, 1, 2, 4, 1]
    result = serve_client.run_job(_job(port, asked, 2, is_streamed))
    assert [answer["num_tokens"] for answer in result["answers"]] == asked
    texts = [answer["text"] for answer in result["answers"]]
    assert texts == ["".join(f"{i} " for i in range(number)) for number in asked]
    assert result["client_cpu_s"] < result["wall_s"] + 0.1


def test_events_have_the_times_at_which_they_came(port: int) -> None:
    (answer,) = serve_client.run_job(_job(port, [5], 1, True))["answers"]
    assert len(answer["event_s"]) == 5
    gaps = [
        b - a for a, b in zip(answer["event_s"], answer["event_s"][1:], strict=False)
    ]
    assert min(gaps) > PAUSE_S / 2 and answer["event_s"][0] >= PAUSE_S


def test_a_refused_request_ends_the_client(port: int) -> None:
    with pytest.raises(ValueError, match="request 1"):
        serve_client.run_job(_job(port, [1, 0], 1, False))


def test_a_stream_without_its_end_is_told() -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    event = b'data: {"choices": [{"text": "x"}]}\n\n'
    raw = head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event)
    with pytest.raises(ValueError, match="without its usage"):
        serve_client.read_answer(
            serve_client.Exchange(0, 0.0, [(1.0, raw)]), is_streamed=True
        )


def test_no_phase_has_the_prompts_of_another() -> None:
    rows = [{"prompt": [i, 31999], "max_tokens": 2} for i in range(64)]
    phases = serve_figures.make_phases(rows, [1, 8, 64])
    assert [(p.name, len(p.rows)) for p in phases] == [
        ("64", 64),
        ("64 streamed", 64),
        ("8 streamed", 64),
        ("1 streamed", 16),
    ]
    first = {str(row["prompt"]) for row in phases[0].rows}
    assert not first & {
        str(row["prompt"]) for row in phases[1].rows + phases[0].warm_up
    }
    assert phases[1].rows[0]["prompt"] == [1, 0]


def test_figures_are_of_the_rounds() -> None:
    phase = serve_figures.Phase(
        "1 streamed", 1, True, [{"prompt": [1], "max_tokens": 3}]
    )
    answer = {"number": 0, "text": "abc", "num_tokens": 3, "event_s": [0.5, 0.6, 0.9]}
    silent = answer | {"event_s": []}  # half of a character, again and again
    result = {"wall_s": 2.0, "client_cpu_s": 0.1, "server_cpu_s": 1.0, "num_wrong": 0}
    rounds = [
        result | {"answers": [answer]},
        result | {"answers": [silent], "wall_s": 4.0},
    ]
    found = serve_figures.sum_up(phase, rounds)
    assert found["requests_per_s"] == pytest.approx(1 / 3)
    assert found["tokens_per_s"] == pytest.approx(1)
    assert found["first_p50_ms"] == pytest.approx(500)
    assert (found["gap_p50_ms"], found["gap_p99_ms"]) == pytest.approx((100, 300))
    assert found["token_p50_ms"] == pytest.approx(200)
    assert found["tokens_per_event"] == 1


def test_ratios_are_those_of_the_targets() -> None:
    rows = [{"prompt": [1], "max_tokens": 3}] * 64
    phases = serve_figures.make_phases(rows, [64])
    figures = {
        name: {
            "64": {"requests_per_s": rate},
            "64 streamed": {"requests_per_s": rate / 1.1},
        }
        for name, rate in (("fminfer", 4.0), ("vllm", 2.0))
    }
    ratios = serve_figures.compare(figures, phases, [8.0])
    assert ratios["fminfer_to_file"] == pytest.approx(0.5)
    assert ratios["fminfer_to_vllm, 64"] == pytest.approx(2)
    assert ratios["fminfer_streaming_costs"] == pytest.approx(0.1)


def test_a_server_is_started_and_ended(tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    code += "import test_serve_benchmark as t\n"
    code += "t.ThreadingHTTPServer(('127.0.0.1', int(sys.argv[-1])), t.Answers).serve_forever()"
    side = serve_sides.Side("own", [sys.executable, "-c", code], {})
    with serve_sides.running(side, tmp_path) as (port, pid, took_s):
        result = serve_client.run_job(_job(port, [2], 1, False))
        assert result["answers"][0]["num_tokens"] == 2
        assert took_s > 0 and serve_sides.session_cpu_s(pid) > 0
    assert not serve_sides.is_healthy(port)


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    side = serve_sides.Side(
        "own", [sys.executable, "-c", "raise SystemExit('no model')"], {}
    )
    with pytest.raises(
        serve_sides.click.ClickException, match=r"own: .*status 1\nno model"
    ):
        serve_sides.running(side, tmp_path).__enter__()
