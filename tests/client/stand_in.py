"""A server of OpenAI's API that stands in for a real one, in a process of its own.

    with StandIn("--capacity", "8", "--service-s", "0.1") as server:
        server.url             # http://127.0.0.1:…/v1
        server.read_counts()   # {"requests": 12, "answers": 9, "most_running": 8, …}
        server.kill()          # as kill -9
        server.start()         # again, on the same port

Its answer to a prompt is `"<" + prompt + ">"`, in as many pieces as `--num-tokens`.
A fault is what happens to requests in place of an answer. `--fault NAME` makes it for all
of them, `--fault NAME:3` for the first three. A prompt that has `!NAME!` in it has that
fault each time. FAULTS has the names.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

FAULTS = {
    "hang": "no byte comes",
    "hang-after-data": "none comes after the first piece",
    "drip": "one byte a second, without the end of a line",
    "ping": "comment lines without end",
    "endless": "pieces without end",
    "endless-line": "one line without end",
    "cut": "the connection ends after the first piece",
    "clean-cut": "the stream ends well after the first piece",
    "no-done": "all pieces, and no [DONE]",
    "no-end": "an answer whose response does not end behind [DONE]",
    "html": "a proxy's page with the status 200",
    "html-502": "the same with 502",
    "error-in-200": "an error object in place of an answer",
    "error-in-stream": "an error object after the first piece",
    "abort": "the finish reason is abort",
    "other-model": "the answer names another model",
    "echo-key": "400, and the error quotes the key",
    "redirect": "a redirect to another host",
    "redirect-here": "a redirect to another path of this host",
    "no-usage": "an answer without usage",
    "retry-after": "429 with Retry-After: 1",
    "STATUS": "any number: that status, with an error object",
    "STATUS-CODE": "the same with a code, such as 429-insufficient_quota",
}
PAGE = b"<html><body>Bad gateway</body></html>"


class StandIn:
    """A stand-in's process."""

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        self._process: subprocess.Popen[str] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, *arguments: str) -> None:
        """Start it, on its port if it had one; arguments replace the first ones."""
        self._arguments = arguments or self._arguments
        command = [sys.executable, __file__, "--port", str(self.port), *self._arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def set_capacity(self, capacity: float) -> None:
        with urllib.request.urlopen(f"{self.url}/capacity/{capacity}"):
            pass

    def read_counts(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/counts") as response:
            return dict(json.load(response))

    def __enter__(self) -> StandIn:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            self.kill()


class Service:
    """The stand-in itself."""

    def __init__(self, settings: argparse.Namespace) -> None:
        self.settings = settings
        self.capacity: float = settings.capacity
        self.num_running = 0
        self.room = asyncio.Condition()
        self.readers: dict[Any, Any] = {}
        name, _, number = (settings.fault or "").partition(":")
        self.fault = name
        self.num_faults = int(number) if number else 1 << 60
        self.counts: dict[str, Any] = {
            "requests": 0,
            "answers": 0,
            "most_running": 0,
            "disconnects": 0,
            "prompts": [],
        }

    async def serve(self, reader: Any, writer: Any) -> None:
        self.readers[writer] = reader
        num_left = self.settings.closes_after
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.decode().split("\r\n")
                method, path, _ = lines[0].split(" ")
                headers = dict(
                    (key.lower(), value)
                    for key, _, value in (
                        line.partition(": ") for line in lines[1:] if line
                    )
                )
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if num_left == 0:
                    break
                if method == "GET":
                    self.get(path, headers, writer)
                else:
                    await self.post(path, headers, json.loads(body), writer)
                await writer.drain()
                num_left -= 1
                if writer.is_closing():
                    break
        del self.readers[writer]
        writer.close()

    def get(self, path: str, headers: dict[str, str], writer: Any) -> None:
        if path == "/v1/models":
            if self.refuses_key(headers):
                self.send_error(writer, 401, "invalid_api_key", headers)
                return
            entry = {
                "id": self.settings.model,
                "object": "model",
                "created": time.time(),
                "owned_by": self.settings.owned_by,
            }
            models = [entry | {"id": name} for name in self.settings.model.split(",")]
            self.send_json(writer, 200, {"object": "list", "data": models})
        elif path == "/version":
            self.send_json(writer, 200, {"version": self.settings.version})
        elif path == "/v1/counts":
            self.send_json(writer, 200, self.counts)
        elif path.startswith("/v1/capacity/"):
            self.capacity = float(path.rpartition("/")[2])
            self.send_json(writer, 200, {})
        else:
            self.send_json(writer, 404, {"detail": "Not Found"})

    def refuses_key(self, headers: dict[str, str]) -> bool:
        key = self.settings.key
        is_revoked = self.counts["requests"] > self.settings.revoke_after
        return bool(key) and (
            is_revoked or headers.get("authorization") != f"Bearer {key}"
        )

    async def post(
        self, path: str, headers: dict[str, str], fields: dict[str, Any], writer: Any
    ) -> None:
        self.counts["requests"] += 1
        prompt = fields.get("prompt") or fields.get("input") or fields.get("query")
        if "messages" in fields:
            prompt = fields["messages"][-1]["content"]
        prompt = str(prompt)
        if self.settings.keep_prompts:
            self.counts["prompts"].append(prompt)
        fault = self.fault if self.num_faults > 0 else ""
        self.num_faults -= bool(fault)
        if match := re.search("!([^!]*)!", prompt):
            fault = match[1]
        is_routed = path.removeprefix("/v1/") in self.settings.routes.split(",")
        if self.refuses_key(headers):
            self.send_error(writer, 401, "invalid_api_key", headers)
        elif not is_routed and path not in self.settings.routes.split(","):
            self.send_json(writer, 404, {"detail": "Not Found"})
        elif unknown := self.find_unknown(fields):
            self.send_error(writer, 400, f"unknown {sorted(unknown)}", headers)
        elif fault and not await self.begin_fault(fault, headers, writer):
            pass
        elif self.settings.refuses_more and self.num_running >= self.capacity:
            self.send_error(writer, 429, "rate_limit_exceeded", headers)
        else:
            await self.compute()
            if fields.get("stream"):
                await self.stream(prompt, fields, path, writer, fault)
            else:
                usage = {"prompt_tokens": 3, "total_tokens": 3}
                entry = {"index": 0, "embedding": [1.0, 2.0], "text": prompt}
                data = [entry | {"probs": [0.25, 0.75], "label": "b", "num_classes": 2}]
                answer = {"model": self.settings.model, "data": data, "usage": usage}
                self.send_json(writer, 200, answer)
            self.counts["answers"] += 1

    def find_unknown(self, fields: dict[str, Any]) -> set[str]:
        known = self.settings.fields
        return {*fields} - {*known.split(",")} if known else set()

    async def compute(self) -> None:
        """Wait as long as an answer takes: more than the capacity queue, or slow all."""
        async with self.room:
            if not self.settings.thrashes:
                await self.room.wait_for(lambda: self.num_running < self.capacity)
            self.num_running += 1
        self.counts["most_running"] = max(self.counts["most_running"], self.num_running)
        slow = max(1.0, self.num_running / self.capacity) ** 2
        try:
            if self.settings.service_s:
                await asyncio.sleep(
                    self.settings.service_s * (slow if self.settings.thrashes else 1.0)
                )
        finally:
            async with self.room:
                self.num_running -= 1
                self.room.notify()

    async def begin_fault(
        self, fault: str, headers: dict[str, str], writer: Any
    ) -> bool:
        """Do what is done in place of an answer; return whether one is to come still."""
        status, _, code = fault.partition("-")
        if status.isdecimal():
            self.send_error(writer, int(status), code, headers)
        elif fault == "hang":
            while not self.readers[writer].at_eof():
                await asyncio.sleep(0.05)
            self.counts["disconnects"] += 1
        elif fault == "html":
            self.send(writer, 200, PAGE, "text/html")
        elif fault == "html-502":
            self.send(writer, 502, PAGE, "text/html")
        elif fault == "error-in-200":
            self.send_json(writer, 200, {"error": {"message": "out of order"}})
        elif fault == "echo-key":
            key = headers.get("authorization", "")
            self.send_json(writer, 400, {"error": {"message": f"wrong: {key}"}})
        elif fault == "redirect":
            where = "http://localhost:1/v1/completions"
            self.send(writer, 307, b"", "text/plain", f"Location: {where}\r\n")
        elif fault == "redirect-here":
            self.send(writer, 307, b"", "text/plain", "Location: /v1/moved\r\n")
        elif fault == "retry-after":
            self.send(writer, 429, b"{}", "application/json", "Retry-After: 1\r\n")
        else:
            return True
        return False

    async def stream(
        self, prompt: str, fields: dict[str, Any], path: str, writer: Any, fault: str
    ) -> None:
        model = "another-model" if fault == "other-model" else self.settings.model
        is_chat = path.endswith("chat/completions")
        text = f"<{prompt}>"
        num_tokens = self.settings.num_tokens
        size = -(-len(text) // num_tokens)
        events = []
        for place in range(num_tokens):
            piece = text[place * size : (place + 1) * size]
            choice: dict[str, Any] = {"index": 0, "finish_reason": None}
            choice |= {"delta": {"content": piece}} if is_chat else {"text": piece}
            if place == num_tokens - 1:
                choice["finish_reason"] = "abort" if fault == "abort" else "stop"
            events.append({"model": model, "choices": [choice]})
        if fault != "no-usage":
            usage = {"prompt_tokens": 3, "completion_tokens": num_tokens}
            events.append({"model": model, "choices": [], "usage": usage})
        frames = [b"data: " + json.dumps(each).encode() + b"\n\n" for each in events]
        if fault != "no-done":
            frames.append(b"data: [DONE]\n\n")
        if fault in ("endless-line", "drip"):
            frames = [b"data: "]
        head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
        writer.write(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        if not fault and not self.settings.token_s and not self.settings.frame_bytes:
            self.write_chunk(writer, b"".join(frames))
            writer.write(b"0\r\n\r\n")
            return
        joined = b"".join(frames)
        if self.settings.frame_bytes and not fault:
            step = self.settings.frame_bytes
            frames = [joined[at : at + step] for at in range(0, len(joined), step)]
        for place, frame in enumerate(frames):
            self.write_chunk(writer, frame)
            await writer.drain()
            if place == 0 and await self.follow_fault(fault, writer, frame):
                return
            await asyncio.sleep(self.settings.token_s)
        if fault == "no-end":
            await asyncio.sleep(3600)
        writer.write(b"0\r\n\r\n")

    async def follow_fault(self, fault: str, writer: Any, frame: bytes) -> bool:
        """Do what is done after the first piece; return whether that was all."""
        if fault == "hang-after-data":
            await asyncio.sleep(3600)
        elif fault == "cut":
            writer.close()
        elif fault == "clean-cut":
            writer.write(b"0\r\n\r\n")
        elif fault == "error-in-stream":
            self.write_chunk(
                writer, b'data: {"error": {"message": "out of order"}}\n\n'
            )
            writer.write(b"0\r\n\r\n")
        elif fault in ("drip", "ping", "endless", "endless-line"):
            piece = {
                "drip": b"a",
                "ping": b": ping\n\n",
                "endless": frame * 500,
                "endless-line": b"a" * 65536,
            }[fault]
            while not writer.is_closing():
                self.write_chunk(writer, piece)
                await writer.drain()
                if fault in ("drip", "ping"):
                    await asyncio.sleep(0.1)
        else:
            return False
        return True

    def write_chunk(self, writer: Any, data: bytes) -> None:
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))

    def send_error(
        self, writer: Any, status: int, code: str, headers: dict[str, str]
    ) -> None:
        error = {"message": f"status {status}", "code": code or None}
        self.send_json(writer, status, {"error": error})

    def send_json(self, writer: Any, status: int, value: object) -> None:
        self.send(writer, status, json.dumps(value).encode(), "application/json")

    def send(
        self, writer: Any, status: int, body: bytes, media_type: str, more: str = ""
    ) -> None:
        head = f"HTTP/1.1 {status} Status\r\nContent-Type: {media_type}\r\n{more}"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", default="stand-in", help="its models, with commas")
    parser.add_argument("--owned-by", default="vllm")
    parser.add_argument("--version", default="1.0")
    parser.add_argument(
        "--capacity", type=float, default=1e9, help="requests at a time"
    )
    parser.add_argument("--service-s", type=float, default=0.0, help="of each")
    parser.add_argument(
        "--refuses-more", action="store_true", help="429 above capacity"
    )
    parser.add_argument("--thrashes", action="store_true", help="slower above capacity")
    parser.add_argument("--num-tokens", type=int, default=2)
    parser.add_argument("--token-s", type=float, default=0.0, help="between pieces")
    parser.add_argument("--frame-bytes", type=int, default=0, help="cut streams so")
    parser.add_argument("--fault", default="")
    parser.add_argument("--key", default="")
    parser.add_argument("--revoke-after", type=int, default=1 << 60, help="requests")
    parser.add_argument(
        "--closes-after",
        type=int,
        default=-1,
        help="requests of a connection, silently",
    )
    parser.add_argument("--fields", default="", help="that it knows; none: all")
    parser.add_argument("--keep-prompts", action="store_true")
    parser.add_argument(
        "--routes",
        default="completions,chat/completions,embeddings,score,rerank,classify",
    )
    service = Service(parser.parse_args())
    server = await asyncio.start_server(
        service.serve, "127.0.0.1", service.settings.port, limit=1 << 24
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path.insert(0, str(Path(__file__).parents[2]))
    asyncio.run(main())
