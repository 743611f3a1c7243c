"""Compiles grammars in a process of its own, which the kernel ends if one takes too long.

llguidance does not limit the time: a number that must be a multiple of 123,456,789 keeps it busy
for hours. This file imports llguidance alone, so that the process starts in a tenth of a second.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import threading
from typing import Any

SECONDS = 2.0  # of computing; the largest of 1,000 schemas from practice takes 0.3
BYTES = 2 << 30  # of memory
EOS = 256


class GrammarTrial:
    """The process that tries grammars. Any thread may call it; calls wait for each other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def compile(self, text: str) -> str:
        """Return what is wrong with a grammar in llguidance's own form; "": nothing.

        Raises:
            OSError: the process cannot run here.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = _start()
            process = self._process
            assert process.stdin is not None and process.stdout is not None, "both are pipes"
            try:
                process.stdin.write(json.dumps(text).encode() + b"\n")
                process.stdin.flush()
                told = process.stdout.readline()
            except OSError:
                told = b""
            except BaseException:  # Ctrl-C: its answer would be taken for the next one's
                self._process = None
                process.kill()
                raise
            if not told:
                self._process = None
                process.communicate()
                if process.returncode >= 0:  # no signal of the kernel ended it
                    raise OSError(
                        f"grammars cannot be tried: {sys.executable} does not import llguidance. "
                        "Install it there"
                    )
                limits = f"{SECONDS:g} s, or {BYTES >> 30} GB of memory"
                return f"it takes more than {limits} to compile"
            return str(json.loads(told))


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the run
    )


class _Bytes:
    """A tokenizer of the 256 bytes, as llguidance's `TokenizerWrapper` takes one."""

    eos_token_id = EOS
    bos_token_id = None
    special_token_ids = (EOS,)

    def __init__(self) -> None:
        self.tokens = [bytes([byte]) for byte in range(EOS)] + [b"<eos>"]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def _serve() -> None:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._tokenizer import TokenizerWrapper

    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = BYTES if hard == resource.RLIM_INFINITY else min(BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a process that ignores it hands that on
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()), n_vocab=EOS + 1)
    for line in sys.stdin.buffer:
        text = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends the process
        try:
            fault = _try(LLMatcher(tokenizer, text, log_level=0))
        except Exception as error:
            fault = str(error) or type(error).__name__
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(fault).encode() + b"\n")
        sys.stdout.buffer.flush()


def _try(matcher: Any) -> str:
    if not matcher.is_error() and not any(matcher.compute_bitmask()):
        return matcher.get_error() or "nothing matches it"
    return str(matcher.get_error())


if __name__ == "__main__":
    here = __file__.rpartition("/")[0]  # whose names are not for others to import
    sys.path = [each for each in sys.path if each != here]
    _serve()
