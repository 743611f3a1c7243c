"""Loads that one client puts on a server, each a function; others should not feel them."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from tests.text.hostile_constraints import HOSTILE

HOST = "127.0.0.1"
TIMEOUT_S = 60.0
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
MARK = "zebra-7731"  # in texts of requests; no line of the log may have it
LOADS: dict[str, Callable[[int], None]] = {}


def load(function: Callable[[int], None]) -> Callable[[int], None]:
    """List a load by its name; it gets the server's port."""
    LOADS[function.__name__] = function
    return function


def call(
    port: int, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, bytes]:
    """Return status and body of a response; 0: there was none."""
    connection = http.client.HTTPConnection(HOST, port, timeout=TIMEOUT_S)
    raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    try:
        connection.request(method, path, raw, headers)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def post(port: int, fields: Any, path: str = COMPLETIONS) -> tuple[int, bytes]:
    return call(port, "POST", path, fields)


def at_once(port: int, bodies: list[Any], path: str = COMPLETIONS) -> None:
    """Send requests, each over a connection and from a thread of its own."""
    threads = [
        threading.Thread(target=post, args=(port, body, path)) for body in bodies
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextmanager
def connections(
    port: int, number: int, data: bytes = b""
) -> Iterator[list[socket.socket]]:
    """Open connections, send the same bytes over each, and close them in the end."""
    with ExitStack() as stack:
        opened = []
        for _ in range(number):
            with suppress(OSError):
                connection = socket.create_connection((HOST, port), 2)
                opened.append(stack.enter_context(connection))
                connection.sendall(data)
        yield opened


def announced(fields: Any, more: int = 0) -> bytes:
    """Return a request as it goes over the wire, with a length beyond its body's."""
    body = json.dumps(fields).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n" % (len(body) + more) + body


def send_batch(port: int, data: bytes, wait_s: float) -> dict[str, Any]:
    """Upload lines and have them answered for a while; return the last that was told."""
    parts = [
        b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch',
        b'Content-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
        + data,
    ]
    body = b"".join(b"--bb\r\n%s\r\n" % part for part in parts) + b"--bb--\r\n"
    form = {"Content-Type": "multipart/form-data; boundary=bb"}
    told: dict[str, Any] = json.loads(
        call(port, "POST", "/v1/files", body, **form)[1] or b"{}"
    )
    if "id" not in told:
        return told
    wish = {
        "endpoint": COMPLETIONS,
        "completion_window": "24h",
        "input_file_id": told["id"],
    }
    told = json.loads(post(port, wish, "/v1/batches")[1] or b"{}")
    if "id" not in told:
        return told
    path = f"/v1/batches/{told['id']}"
    end_s = time.monotonic() + wait_s
    while time.monotonic() < end_s:
        told = json.loads(call(port, "GET", path)[1] or b"{}")
        if told.get("status") in ("completed", "failed"):
            return told
        time.sleep(0.2)
    post(port, None, f"{path}/cancel")
    return told


def line(number: int, **fields: Any) -> bytes:
    """Return a line of a batch."""
    body = {"prompt": "a", "max_tokens": 1} | fields
    entry = {
        "custom_id": str(number),
        "method": "POST",
        "url": COMPLETIONS,
        "body": body,
    }
    return json.dumps(entry).encode() + b"\n"


# Prompts and choices of one request.


@load
def many_prompts(port: int) -> None:
    post(port, {"prompt": ["a"] * 16384, "max_tokens": 1})


@load
def many_prompts_that_draw(port: int) -> None:
    post(
        port,
        {
            "prompt": [f"{n} a" for n in range(4096)],
            "max_tokens": 8,
            "ignore_eos": True,
        },
    )


@load
def many_prompts_of_ids(port: int) -> None:
    post(port, {"prompt": [[n % 200 + 5] * 40 for n in range(8192)], "max_tokens": 1})


@load
def many_choices(port: int) -> None:
    fields = {"prompt": ["a"] * 32, "n": 128, "max_tokens": 16, "ignore_eos": True}
    post(port, fields | {"temperature": 1})


@load
def many_long_choices(port: int) -> None:
    fields = {"n": 128, "max_tokens": 400, "ignore_eos": True, "temperature": 1}
    at_once(port, [fields | {"prompt": f"{n}"} for n in range(4)])


@load
def many_candidates(port: int) -> None:
    post(
        port,
        {
            "prompt": ["a"] * 32,
            "best_of": 128,
            "n": 1,
            "max_tokens": 16,
            "temperature": 1,
        },
    )


@load
def many_scored_prompts(port: int) -> None:
    post(
        port,
        {"prompt": ["a b c"] * 16384, "echo": True, "logprobs": 5, "max_tokens": 0},
    )


@load
def many_streamed_prompts(port: int) -> None:
    post(port, {"prompt": ["a"] * 16384, "max_tokens": 2, "stream": True})


@load
def long_prompts(port: int) -> None:
    at_once(port, [{"prompt": [n + 5] * 900, "max_tokens": 1} for n in range(64)])


@load
def long_prompts_of_one_request(port: int) -> None:
    post(port, {"prompt": [[n + 5] * 900 for n in range(128)], "max_tokens": 1})


@load
def many_logprobs(port: int) -> None:
    fields = {
        "prompt": ["a"] * 64,
        "n": 8,
        "logprobs": 20,
        "max_tokens": 32,
        "ignore_eos": True,
    }
    post(port, fields | {"temperature": 1})


@load
def a_thousand_requests(port: int) -> None:
    at_once(port, [{"prompt": f"{n}", "max_tokens": 4} for n in range(1000)])


@load
def many_prompts_with_biases(port: int) -> None:
    biases = {str(token_id): 0.5 for token_id in range(400)}
    # one token, spelled again and again
    biases |= {"0" * n + "7": 0.5 for n in range(2, 300)}
    post(port, {"prompt": ["a"] * 16384, "max_tokens": 4, "logit_bias": biases})


@load
def many_choices_with_biases(port: int) -> None:
    biases = {str(token_id): 0.5 for token_id in range(400)}
    fields = {"n": 128, "max_tokens": 16, "ignore_eos": True, "temperature": 1}
    post(port, fields | {"prompt": ["a"] * 8, "logit_bias": biases})


@load
def a_long_bias(port: int) -> None:
    biases = {str(token_id): 0.5 for token_id in range(50_000)}
    post(port, {"prompt": ["a"] * 1000, "max_tokens": 4, "logit_bias": biases})


@load
def scored_long_prompts(port: int) -> None:
    fields = {"echo": True, "logprobs": 20, "max_tokens": 0}
    post(port, fields | {"prompt": [[n % 100 + 5] * 900 for n in range(60)]})


@load
def penalties_of_long_prompts(port: int) -> None:
    fields = {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "max_tokens": 60}
    post(port, fields | {"prompt": [[n % 300 + 5 for n in range(900)]] * 64, "n": 4})


# Constraints, templates, and other work on texts.


def add_constraints(name: str, kinds: tuple[str, ...]) -> None:
    """List constraints that are hostile as one load."""

    def send(port: int) -> None:
        for each in kinds:
            post(port, {"prompt": "a", "max_tokens": 4} | HOSTILE[each]())

    LOADS[name] = send


add_constraints(
    "hostile_grammars", ("more blank lines", "quotes", "one long name", "odd heads")
)
add_constraints(
    "more_hostile_grammars",
    (
        "rules, each the next",
        "terminals, doubled",
        "an ambiguous grammar",
        "many alternatives",
    ),
)
add_constraints(
    "hostile_patterns",
    ("a regex of bounds", "a regex with a window", "Unicode classes", "nested bounds"),
)
add_constraints(
    "hostile_schemas",
    ("oneOf of products", "doubled allOf", "doubled properties", "crossed unions"),
)
add_constraints(
    "hostile_lists", ("an enum", "equal choices", "long choices", "one long choice")
)


def constrained(**constraint: Any) -> dict[str, Any]:
    return {"prompt": "a", "max_tokens": 4, "structured_outputs": constraint}


@load
def a_grammar_of_blank_lines(port: int) -> None:
    post(port, constrained(grammar="\n" * 24000))


@load
def two_branches_of_many_fields(port: int) -> None:
    def make(ref: str) -> dict[str, Any]:
        names = [f"p{n}" for n in range(100)]
        fields = {name: {"$ref": f"#/$defs/{ref}"} for name in names}
        kind = {"type": "object", "properties": fields}
        return kind | {"required": names, "additionalProperties": False}

    defs = {"B": make("C"), "C": make("D"), "D": {"type": "object"}}
    post(port, constrained(json={"$defs": defs, "oneOf": [make("B"), make("B")]}))


@load
def many_new_patterns(port: int) -> None:
    at_once(port, [constrained(regex=f"(a|b){{{n},99}}") for n in range(1, 65)])


@load
def large_template_arguments(port: int) -> None:
    for number in range(6):
        fields = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        post(
            port,
            fields | {"chat_template_kwargs": {"x": f"{number}" + "z" * (8 << 20)}},
            CHAT,
        )


@load
def many_messages(port: int) -> None:
    messages = [
        {"role": ("user", "assistant")[n % 2], "content": "hi"} for n in range(50_001)
    ]
    post(port, {"messages": messages, "max_tokens": 1}, CHAT)


@load
def messages_of_many_parts(port: int) -> None:
    parts = [{"type": "text", "text": f"{MARK} {n}"} for n in range(100_000)]
    post(
        port, {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}, CHAT
    )


@load
def many_tools(port: int) -> None:
    tools = [{"type": "function", "function": {"name": f"f{n}"}} for n in range(20_000)]
    message = {"role": "user", "content": MARK}
    post(port, {"messages": [message], "tools": tools, "max_tokens": 1}, CHAT)


@load
def nested_template_arguments(port: int) -> None:
    inner: Any = MARK
    for _ in range(200):
        inner = {"x": [inner]}
    many = {f"k{n}": inner for n in range(200)}
    fields = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    post(port, fields | {"chat_template_kwargs": many}, CHAT)


@load
def stop_strings_within_bounds(port: int) -> None:
    stops = [f"{MARK} {n}" * 10 for n in range(1000)]
    fields = {"max_tokens": 200, "ignore_eos": True, "n": 32, "temperature": 1}
    post(port, fields | {"prompt": "a", "stop": stops, "stream": True})


@load
def many_stop_prefixes(port: int) -> None:
    stops = ["a" * n + MARK for n in range(1, 500)]
    post(
        port,
        {"prompt": "a" * 300, "max_tokens": 200, "stop": stops, "stream": True, "n": 8},
    )


@load
def many_stop_strings(port: int) -> None:
    stops = ["x" * 200 + str(n) for n in range(20_000)]
    post(port, {"prompt": "a", "max_tokens": 64, "stop": stops, "ignore_eos": True})


@load
def many_bad_words(port: int) -> None:
    words = [f"{n:x} {n:o}" for n in range(16_384)]
    post(port, {"prompt": "a", "max_tokens": 16, "bad_words": words})


@load
def many_new_bad_words(port: int) -> None:
    for number in range(3):
        words = [f"{number} {n:x} {n:o}" for n in range(16_000)]
        post(port, {"prompt": "a", "max_tokens": 16, "bad_words": words})


@load
def many_unknown_fields(port: int) -> None:
    post(
        port,
        {"prompt": "a", "max_tokens": 1} | {f"unknown{n}": n for n in range(200_000)},
    )


@load
def a_long_text_to_tokenize(port: int) -> None:
    post(port, {"prompt": "a b " * 3_900_000}, "/tokenize")


@load
def long_texts(port: int) -> None:
    at_once(port, [{"prompt": "x y" * 1_000_000, "max_tokens": 1} for _ in range(8)])


@load
def many_ids_to_detokenize(port: int) -> None:
    post(port, {"tokens": [5] * 1_000_000}, "/detokenize")


# PartBuilder and connections.


@load
def large_bodies(port: int) -> None:
    body = b'{"prompt": "' + b"x" * (15 << 20) + b'", "max_tokens": 1}'
    at_once(port, [body] * 24)


@load
def large_lists(port: int) -> None:
    at_once(port, [b'{"prompt": [' + b"1," * (7 << 20) + b"1]}"] * 4)


@load
def nested_lists(port: int) -> None:
    at_once(port, [b'{"prompt": ' + b"[" * (4 << 20)] * 4)


@load
def small_chunks(port: int) -> None:
    body = b'{"prompt": "' + b"x" * 200_000
    data = (
        HEAD
        + b"Transfer-Encoding: chunked\r\n\r\n"
        + b"".join(b"1\r\n%c\r\n" % c for c in body)
    )
    with connections(port, 4, data):
        time.sleep(0.5)


@load
def idle_connections(port: int) -> None:
    with connections(port, 1200):
        time.sleep(1)


@load
def slow_heads(port: int) -> None:
    with connections(port, 500, HEAD) as opened:
        for number in range(3):
            for connection in opened:
                with suppress(OSError):
                    connection.sendall(b"x-%d: y\r\n" % number)
            time.sleep(0.3)


@load
def slow_bodies(port: int) -> None:
    with connections(port, 500, HEAD + b"Content-Length: 1000\r\n\r\n{") as opened:
        for _ in range(3):
            for connection in opened:
                with suppress(OSError):
                    connection.sendall(b" ")
            time.sleep(0.3)


@load
def unread_streams(port: int) -> None:
    fields = {
        "prompt": "a",
        "n": 64,
        "max_tokens": 64,
        "stream": True,
        "ignore_eos": True,
    }
    with connections(port, 16, announced(fields | {"logprobs": 20, "temperature": 1})):
        time.sleep(3)


@load
def unread_answers(port: int) -> None:
    fields = {"prompt": ["a b c"] * 512, "echo": True, "logprobs": 20, "max_tokens": 1}
    with connections(port, 16, announced(fields)):
        time.sleep(3)


@load
def leaving_clients(port: int) -> None:
    for _ in range(20):
        with connections(port, 20, announced({"prompt": ["a"] * 64, "max_tokens": 64})):
            time.sleep(0.02)


@load
def pipelined_requests(port: int) -> None:
    data = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3000
    with connections(port, 4, data):
        time.sleep(1)


@load
def many_scrapes(port: int) -> None:
    for _ in range(50):
        call(port, "GET", "/metrics")
        call(port, "GET", "/openapi.json")


@load
def long_paths(port: int) -> None:
    for _ in range(100):
        call(port, "GET", "/v1/" + "a/" * 20_000)


@load
def many_idle_connections(port: int) -> None:
    with connections(port, 6000):
        time.sleep(1)


@load
def slow_uploads(port: int) -> None:
    head = b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000000\r\n"
    head += b"Content-Type: multipart/form-data; boundary=bb\r\n\r\n"
    head += b'--bb\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    with connections(port, 200, head) as opened:
        for _ in range(4):
            for connection in opened:
                with suppress(OSError):
                    connection.sendall(b"1\n" * 100)
            time.sleep(0.3)


@load
def odd_heads(port: int) -> None:
    for data in (
        b"\0" * 60_000,
        b"GET /" + b"x" * 60_000,
        HEAD + b"a: " + b"b" * 60_000,
    ):
        with connections(port, 100, data):
            time.sleep(0.3)


# Files and batches.


@load
def a_batch_of_short_wrong_lines(port: int) -> None:
    send_batch(port, b"1\n" * 49_000, wait_s=6)


@load
def a_batch_of_60000_lines(port: int) -> None:
    send_batch(port, b'{"custom_id":"a"}\n' * 60_000, wait_s=4)


@load
def a_batch_of_equal_ids(port: int) -> None:
    send_batch(port, line(7, prompt=MARK, bogus=MARK) * 20_000, wait_s=4)


@load
def a_batch_of_hostile_lines(port: int) -> None:
    kinds = (
        "more blank lines",
        "a regex with a window",
        "oneOf of products",
        "long choices",
    )
    data = b"".join(line(n, **HOSTILE[each]()) for n, each in enumerate(kinds * 3))
    send_batch(port, data, wait_s=5)


@load
def a_batch_of_blank_lines(port: int) -> None:
    send_batch(port, b"\n" * (60 << 20), wait_s=3)


@load
def a_batch_of_good_lines(port: int) -> None:
    send_batch(port, b"".join(line(n) for n in range(20_000)), wait_s=5)


@load
def a_batch_of_many_prompts(port: int) -> None:
    send_batch(
        port, b"".join(line(n, prompt=["a"] * 16384) for n in range(3)), wait_s=5
    )


@load
def a_batch_of_long_lines(port: int) -> None:
    send_batch(
        port, b"".join(line(n, prompt="x y" * 1_000_000) for n in range(12)), wait_s=5
    )


@load
def many_uploads(port: int) -> None:
    for _ in range(30):
        send_batch(port, line(1), wait_s=0)


@load
def a_form_of_many_parts(port: int) -> None:
    part = b'--bb\r\nContent-Disposition: form-data; name="expires_after[anchor]"\r\n\r\nx\r\n'
    form = {"Content-Type": "multipart/form-data; boundary=bb"}
    call(port, "POST", "/v1/files", part * 100_000, **form)


@load
def a_form_with_an_endless_header(port: int) -> None:
    form = {"Content-Type": "multipart/form-data; boundary=bb"}
    call(port, "POST", "/v1/files", b"--bb\r\nX: " + b"y" * (60 << 20), **form)


@load
def odd_forms(port: int) -> None:
    head = b'--bb\r\nContent-Disposition: form-data; name="file"; filename="'
    bodies = (
        head + b"a" * 500 + b'"\r\n\r\n' + b"\r\n--b" * 3_000_000,
        head + b'\\"' * 500 + b'"\r\n\r\n' + b"-" * 9_000_000,
        head + b'a"\r\n' + b"a:b\r\n" * 2_000_000,
        b"--bb\r\n" * 2_000_000,
        b"\r\n" * 4_000_000,
    )
    for body in bodies:
        call(
            port,
            "POST",
            "/v1/files",
            body,
            **{"Content-Type": "multipart/form-data; boundary=bb"},
        )
    for boundary in ("", "b" * 70, "b" * 60_000):
        kind = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
        call(port, "POST", "/v1/files", b"--bb" * 2_000_000, **kind)
