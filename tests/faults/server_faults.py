"""A server whose state folder fails: what a client was told must hold at the next server.

A client uploads a file, sends one batch that is to be answered, one that expires and one that it
cancels, deletes a file, and notes each promise. Then the server is ended. The next one,
without a fault, must know all that was promised, and must end each batch with right answers.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.commands import line_of, plain
from tests.faults.file_faults import Loop, WrongError, plans_of
from tests.faults.power_cuts import FOLDER, Cut, Disk, Entry, build, cuts_of, read_log
from tests.faults.preload import Outcome, Plan
from tests.faults.torture_server import BOUNDARY, OVER, URL

# A traceback of a batch that pauses is for the server's log alone, if it is one of ours.
RAW = re.compile(
    r"panicked at|Exception ignored|Exception in thread|internal_error|Traceback"
)
READY_S = 30.0
PATIENCE_S = 3.0
RESTART_S = 30.0
NUM_LINES = 6
ENDS = (*OVER, "expired", "failed")


@dataclass(slots=True)
class Promises:
    """What a server has told its client, and where the recording was then."""

    files: dict[str, int] = field(default_factory=dict)
    # and what each is for
    batches: dict[str, tuple[str, int]] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)  # with all of its lines
    deleted: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Client:
    """Talks to a server."""

    port: int
    log: Path | None = None

    def call(self, method: str, path: str, body: bytes = b"", content: str = "") -> Any:
        """Return what a server answers; None: it says that it cannot, or ends."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            headers = {"Content-Type": content} if content else {}
            connection.request(method, path, body or None, headers)
            answer = connection.getresponse()
            raw = answer.read()
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
        if b"Traceback" in raw:
            raise WrongError(f"{method} {path} answers {raw[:500]!r}")
        if answer.status != 200:
            json.loads(raw)
            return None
        return raw if path.endswith("/content") else json.loads(raw)

    def upload(self, name: str) -> str | None:
        """Upload lines; return the file's id."""
        lines = [
            {
                "custom_id": f"{name}{number}",
                "method": "POST",
                "url": URL,
                "body": line_of(number) if number else {"prompt": 5},
            }
            for number in range(NUM_LINES)
        ]
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="'
        form = f'{head}purpose"\r\n\r\nbatch\r\n{head}file"; filename="a"\r\n\r\n'
        form += "\n".join(map(json.dumps, lines)) + f"\r\n--{BOUNDARY}--\r\n"
        kind = f"multipart/form-data; boundary={BOUNDARY}"
        found = self.call("POST", "/v1/files", form.encode(), kind)
        return found and str(found["id"])

    def create(self, file_id: str, window: str) -> str | None:
        """Make a batch; return its id."""
        wish = {"input_file_id": file_id, "endpoint": URL, "completion_window": window}
        found = self.call(
            "POST", "/v1/batches", json.dumps(wish).encode(), "application/json"
        )
        return found and str(found["id"])

    def now(self) -> int:
        """Return how long the recording is."""
        return self.log.stat().st_size if self.log and self.log.exists() else 0

    def wait_for(self, batch_id: str, limit_s: float) -> dict[str, Any] | None:
        """Return a batch once it is over; None: it is not, by then."""
        end_s = time.monotonic() + limit_s
        while time.monotonic() < end_s:
            batch = self.call("GET", f"/v1/batches/{batch_id}")
            if batch is not None and batch["status"] in ENDS:
                return dict(batch)
            if batch is not None and batch["errors"] and limit_s == PATIENCE_S:
                return None  # it pauses, for longer than this waits
            if batch is None and limit_s == PATIENCE_S:
                return None
            time.sleep(0.01)
        return None


class ServerLoop:
    """Tries cases of a server; as Loop does of a command."""

    name = "server"

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.warm = loop.warm
        self.state = loop.folder / "state"
        self.log = loop.place / "server-log"

    def make_ready(self) -> ServerLoop:
        """Serve once without a fault."""
        self._clear()
        self.log.unlink(missing_ok=True)
        self.promises, found = self.serve(None, self.log)
        if (found.status, len(self.promises.ended), len(self.promises.deleted)) != (
            0,
            3,
            1,
        ):
            raise AssertionError(f"{self.promises} {found}")
        self.counts = found.counts
        self.answers = self._check(self.promises, found.text, None)
        self.entries: list[Entry] = [
            entry for entry in read_log(self.log) if entry.what != "m"
        ]
        return self

    def plans(self) -> Iterator[Plan]:
        """Yield all cases."""
        return plans_of(self.counts)

    def cuts(self) -> Iterator[Cut]:
        """Yield all power cuts."""
        return cuts_of(self.entries)

    def try_case(self, plan: Plan) -> Outcome:
        """Serve by a plan, and then without one; raise a WrongError."""
        self._clear()
        promises, found = self.serve(plan)
        if found.status is None:
            raise WrongError(f"hangs: {found.text}")
        if match := RAW.search(found.text):
            raise WrongError(f"says {match.group()}: {found.text}")
        if found.status < 0 and not (plan.error == "kill" and found.status == -9):
            raise WrongError(f"ended by signal {-found.status}: {found.text}")
        if found.status not in (0, 1, 2, 143, -9):
            raise WrongError(f"exit status {found.status}: {found.text}")
        if found.status in (1, 2) and not found.text.strip():
            raise WrongError(f"ended with {found.status} and not a word")
        self._check(promises, found.text, self.answers)
        return found

    def try_cut(self, cut: Cut) -> None:
        """Build the state after a power cut, and serve from it; raise a WrongError."""
        disk = Disk()
        disk.begun[str(self.loop.folder)] = FOLDER
        disk.names = dict(disk.begun)
        size = 0
        for entry in self.entries[: cut.num_changes]:
            disk.take(entry)
            size = entry.end
        self._clear()
        build(
            disk, self.loop.folder, cut.mode, random.Random(str(cut)), is_new_boot=True
        )
        # What was told before this change, which was recorded before it returned.
        promises = self.promises
        told = Promises(
            {name: at for name, at in promises.files.items() if at <= size},
            {
                name: (use, at)
                for name, (use, at) in promises.batches.items()
                if at <= size
            },
            {name: at for name, at in promises.ended.items() if at <= size},
            {name: at for name, at in promises.deleted.items() if at <= size},
        )
        self._check(told, "", self.answers)

    def _clear(self) -> None:
        shutil.rmtree(self.loop.folder, ignore_errors=True)
        self.loop.folder.mkdir()

    @contextlib.contextmanager
    def _serving(
        self, plan: Plan | None, log: Path | None, said: Path
    ) -> Iterator[tuple[int, int]]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = int(free.getsockname()[1])
        words = [
            "serve",
            "-q",
            "--port",
            str(port),
            "--state",
            str(self.state),
            "--max-rows",
            "8",
        ]
        run = self.warm.runner([*words, "--dtype", "float32"])
        pid = self.warm.fork(run, said, plan or Plan("none", 0, "EIO"), log)
        try:
            yield pid, port
        finally:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def serve(
        self, plan: Plan | None, log: Path | None = None
    ) -> tuple[Promises, Outcome]:
        """Do all that a client does; return what it was told, and how the server ended."""
        said = self.warm.scratch / "server"
        promises = Promises()
        with self._serving(plan, log, said) as (pid, port):
            client = Client(port, log)
            if wait_until_ready(pid, client):
                self._talk(client, promises)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            status = self.warm.wait(pid)
        text = said.read_text(errors="replace")
        counts = self.warm.counts()
        return promises, Outcome(status, text, self.warm.num_faults(), counts)

    def _talk(self, client: Client, promises: Promises) -> None:
        for use, window in (
            ("answered", "24h"),
            ("cancelled", "24h"),
            ("expired", "1s"),
        ):
            file_id = client.upload(use)
            if file_id is None:
                continue
            promises.files[file_id] = client.now()
            batch_id = client.create(file_id, window)
            if batch_id is None:
                continue
            promises.batches[batch_id] = use, client.now()
            if use == "cancelled":
                client.call("POST", f"/v1/batches/{batch_id}/cancel")
        for batch_id in promises.batches:
            if client.wait_for(batch_id, PATIENCE_S):
                promises.ended[batch_id] = client.now()
        spare = client.upload("spare")
        if (
            spare is not None
            and client.call("DELETE", f"/v1/files/{spare}") is not None
        ):
            promises.deleted[spare] = client.now()

    def _check(
        self, promises: Promises, text: str, answers: dict[str, list[Any]] | None
    ) -> dict[str, list[Any]]:
        """Serve without a fault, and see that each promise holds; return the answers."""
        said = self.warm.scratch / "server-again"
        found: dict[str, list[Any]] = {}
        with self._serving(None, None, said) as (pid, port):
            client = Client(port)

            def wrong(what: str) -> WrongError:
                again = said.read_text(errors="replace")
                return WrongError(f"{what}: {text}\nNEXT: {again}")

            if not wait_until_ready(pid, client):
                raise wrong("the next server does not start")
            listed = client.call("GET", "/v1/files")
            ids = {file["id"] for file in listed["data"]}
            if lost := promises.files.keys() - ids:
                raise wrong(f"files are lost: {lost}")
            if kept := promises.deleted.keys() & ids:
                raise wrong(f"deleted files are back: {kept}")
            for batch_id, (use, _) in promises.batches.items():
                batch = client.wait_for(batch_id, RESTART_S)
                if batch is None:
                    raise wrong(f"batch {use} is lost, or does not end")
                if batch["status"] == "failed":
                    raise wrong(f"batch {use} failed: {batch['errors']}")
                if use == "answered" and batch["status"] != "completed":
                    raise wrong(f"batch {use} is {batch['status']}")
                found[use] = self._records(client, batch)
                is_whole = answers is not None and batch["status"] == "completed"
                if is_whole and found[use] != self._whole(use, answers):
                    raise wrong(f"batch {use} has other records: {found[use]}")
            os.kill(pid, signal.SIGTERM)
            if self.warm.wait(pid) is None:
                raise wrong("the next server does not end")
            if RAW.search(said.read_text(errors="replace")):
                raise wrong("the next server has a traceback")
        return found

    def _whole(self, use: str, answers: dict[str, list[Any]] | None) -> list[Any]:
        """Return the records of a batch, but for its custom_ids equal to the first's."""
        assert answers is not None
        text = json.dumps(answers["answered"]).replace("answered", use)
        return list(json.loads(text))

    def _records(self, client: Client, batch: dict[str, Any]) -> list[Any]:
        found = []
        for name in ("output_file_id", "error_file_id"):
            if batch[name] is not None:
                raw = client.call("GET", f"/v1/files/{batch[name]}/content")
                if raw is None:
                    raise WrongError(f"the {name} of {batch['id']} is not there")
                found += [_without_ids(json.loads(line)) for line in raw.splitlines()]
        counts = batch["request_counts"]
        if (
            batch["status"] != "failed"
            and len(found) != counts["completed"] + counts["failed"]
        ):
            raise WrongError(f"{counts} and {len(found)} records")
        return found


def _without_ids(record: dict[str, Any]) -> Any:
    """Return a record without what differs between servers; a line's error is compared
    by code."""
    record = plain(record)
    record.pop("id", None)
    if record.get("response"):
        record["response"].pop("request_id", None)
        record["response"]["body"].pop("id", None)
    return record


def wait_until_ready(pid: int, client: Client) -> bool:
    """Wait until a server answers; return False if it ends instead."""
    end_s = time.monotonic() + READY_S
    while time.monotonic() < end_s:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", client.port), timeout=5).close()
            if client.call("GET", "/health") is not None:
                return True
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return False
        time.sleep(0.01)
    return False
