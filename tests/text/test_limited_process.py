"""Work on clients' texts, which the kernel ends at a limit."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fminfer.text import limited_process
from fminfer.text.limited_process import LimitedPool, LimitError

SECONDS = 0.3  # instead of 2, so that the tests are quick


def build_work() -> Callable[[Any], Any]:
    """Return what the processes here do: each message names a kind of work."""
    kinds: dict[str, Callable[[Any], Any]] = {
        "echo": lambda value: [os.getpid(), value],
        "spin": spin,
        "sleep": time.sleep,
        "fill": lambda size: len(bytearray(size)),
        "grow": lambda size: "x" * size,
        "sink": sink,
        "raise": fail,
        "print": print,
        "limits": lambda kind: resource.getrlimit(kind),
    }
    return lambda message: kinds[message[0]](message[1])


def build_nothing() -> Callable[[Any], Any]:
    raise ImportError("no such library")


def spin(seconds: float) -> float:
    while time.process_time() < seconds:
        pass
    return time.process_time()


def sink(depth: int) -> None:
    """Use the stack without a limit, as a parser of Rust may."""
    sys.setrecursionlimit(1 << 30)
    for _ in range(depth):
        eval("(" * 50 + "list(map(sink, [1]))" + ")" * 50)


def fail(text: str) -> None:
    raise BaseException(text)  # as a panic of Rust, which is no Exception


@pytest.fixture
def pool() -> Iterator[LimitedPool]:
    yield LimitedPool(build_work, 2, SECONDS)


def test_a_process_answers_one_message_after_another(pool: LimitedPool) -> None:
    answers = [
        pool.ask(["echo", {"é": [number, None, "\ud800"]}]) for number in range(3)
    ]
    assert [number for _, number in answers] == [
        {"é": [n, None, "\ud800"]} for n in range(3)
    ]
    assert len({pid for pid, _ in answers}) == 1 and answers[0][0] != os.getpid()
    assert pool.ask(["print", "no answer"]) is None


@pytest.mark.parametrize(
    "message", [["spin", 60], ["fill", 3 << 30], ["grow", 3 << 30], ["sink", 1 << 30]]
)
def test_a_limit_ends_a_process_and_the_next_one_answers(
    pool: LimitedPool, message: Any
) -> None:
    with pytest.raises(
        LimitError, match=r"^it takes more than 0.3 s, or 2 GB of memory$"
    ):
        pool.ask(message)
    assert pool.ask(["echo", 1])[1] == 1


def test_waiting_is_bounded_as_well(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Time of computing does not pass while a process waits."""
    text = Path(limited_process.__file__).read_text()
    quick = tmp_path / "quick.py"
    quick.write_text(text.replace("WAIT_SECONDS = 60", "WAIT_SECONDS = 1"))
    monkeypatch.setattr(limited_process, "__file__", str(quick))
    with pytest.raises(LimitError):
        LimitedPool(build_work).ask(["sleep", 30])


def test_each_message_has_all_of_the_time(pool: LimitedPool) -> None:
    spent = 0.0
    for _ in range(3):
        spent = pool.ask(["spin", spent + SECONDS / 2])
    assert spent > SECONDS


def test_faults_of_the_work_are_told_and_end_no_process() -> None:
    pool = LimitedPool(build_work)  # 20 MB may take a slow core more than SECONDS
    pid = pool.ask(["echo", 1])[0]
    for text, told in (("a panic", "a panic"), ("", "BaseException")):
        with pytest.raises(ValueError, match=told) as caught:
            pool.ask(["raise", text])
        assert not isinstance(caught.value, LimitError)
    with pytest.raises(
        ValueError, match="it becomes 20,000,008 bytes; 16,777,216 are allowed"
    ):
        pool.ask(["grow", 20_000_000])
    assert pool.ask(["echo", 1])[0] == pid


def test_small_pipes_hold_nobody_up(
    pool: LimitedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user of many pipes gets small ones: both sides waited for each other, without end."""
    start = pool._start_process

    def start_narrow() -> subprocess.Popen[bytes]:
        process = start()
        for pipe in (process.stdin, process.stdout):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 4096)  # type: ignore[arg-type]
        return process

    monkeypatch.setattr(pool, "_start_process", start_narrow)
    messages = iter([json.dumps(["grow", 3000 + n]) for n in range(40)] * 40)
    found: list[str] = []
    asking = threading.Thread(
        target=lambda: found.extend(pool.ask_all(messages)), daemon=True
    )
    asking.start()
    asking.join(10)
    assert found[:2] == ["x" * 3000, "x" * 3001]


def test_a_message_that_takes_long_holds_no_other_up(pool: LimitedPool) -> None:
    assert len({pid for pid, _ in map(pool.ask, [["echo", 1]] * 3)}) == 1, (
        "one is enough"
    )
    with ThreadPoolExecutor() as threads:
        slow = threads.submit(pool.ask, ["sleep", 2.0])
        while slow.running() and pool._free.qsize() == 2:
            time.sleep(0.01)
        assert pool.ask(["echo", 2])[1] == 2 and not slow.done()
        slow.result()


def test_no_more_processes_run_than_are_allowed(pool: LimitedPool) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = threads.map(pool.ask, [["echo", number] for number in range(40)])
        assert len({pid for pid, _ in found}) <= 2


def test_an_interrupted_call_leaves_no_answer_for_the_next(
    pool: LimitedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a notebook: the next constraint got the grammar of the one before."""
    pid = pool.ask(["echo", 1])[0]

    def interrupt(*_: Any) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(limited_process, "_exchange_lines", interrupt)
        pool.ask(["echo", 2])
    found = pool.ask(["echo", 3])
    assert found[1] == 3 and found[0] != pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_process_that_somebody_killed_is_replaced(pool: LimitedPool) -> None:
    pid = pool.ask(["echo", 1])[0]
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.1)
    assert pool.ask(["echo", 2])[1] == 2


def test_what_cannot_be_imported_is_no_limit() -> None:
    """It said that each grammar takes more than 2 s, at once."""
    pool = LimitedPool(build_nothing)
    for _ in range(3):
        with pytest.raises(
            OSError, match=r"cannot import .*test_limited_process\. Install"
        ):
            pool.ask(1)


def test_limits_hold_whatever_a_process_is_started_from() -> None:
    """Where SIGPROF was ignored nothing ended it; under `ulimit -v` it refused all grammars."""
    code = f"""if True:
        import json, resource, signal
        from fminfer.text.limited_process import LimitedPool
        from tests.text.test_limited_process import build_work
        signal.signal(signal.SIGPROF, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        pool = LimitedPool(build_work, 1, {SECONDS})
        kinds = resource.RLIMIT_AS, resource.RLIMIT_CORE
        print(json.dumps([pool.ask(["limits", kind]) for kind in kinds]))
        try: pool.ask(["spin", 60])
        except ValueError as error: print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    limits, told = done.stdout.splitlines()
    assert json.loads(limits) == [[1 << 30] * 2, [0, 0]]
    assert told == "it takes more than 0.3 s, or 2 GB of memory"


def test_a_fork_has_processes_of_its_own(pool: LimitedPool) -> None:
    """Two processes that read one pipe would get each other's answers."""
    before = pool.ask(["echo", 1])[0]
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        pid = pool.ask(["echo", 2])[0]
        os.write(write_end, str(pid).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert int(os.read(read_end, 100)) != before
    assert pool.ask(["echo", 3])[0] == before
    os.close(read_end)
    os.close(write_end)


def test_a_pool_starts_nothing_until_it_is_asked() -> None:
    before = threading.active_count()
    pool = LimitedPool(build_work)
    assert [pool._free.get_nowait() for _ in range(2)] == [None, None]
    assert threading.active_count() == before
