#!/usr/bin/env python
"""Answer a file of requests: `fminfer run` under the old runner's name and with its flags.

python scripts/dist_inference_runner.py --model-name M --infer-data request_0.jsonl
--use-cuda false docs/coming_from.md says what each flag became.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

# Taken as they are, with one value.
SAME = (
    "--model-name",
    "--model-type",
    "--dist-url",
    "--world-size",
    "--pipeline-group-size",
    "--data-group-size",
    "--rank",
    "--cuda-id",
    "--num-layers",
    "--max-layers",
    "--pp-mode",
    "--num-iters",
    "--seed",
    "--budget",
    "--temperature",
    "--top-p",
    "--top-k",
    "--num-completions",
    "--best-of",
    "--top-k-per-token",
    "--batch-size",
    "--input-seq-length",
    "--generate-seq-length",
)
# True or false, as a value; what each of the two is for `fminfer run`.
BOOLEANS = {
    "--echo-prompt": (["--echo-prompt"], []),
    "--overwrite-request-args": (["--overwrite-request-args"], []),
    "--share-prefix": (["--prefix-cache"], ["--no-prefix-cache"]),
    "--use-cuda": ([], ["--device", "cpu"]),
}
# With one value, and without a meaning here.
UNUSED = (
    "--cuda-num",
    "--debug-mem",
    "--dist-backend",
    "--net-interface",
    "--micro-batch-size",
    "--token-micro-batch-size",
    "--prompt-micro-batch-size",
    "--profiling",
    "--trace-postfix",
    "--load-pretrained-model",
    "--coordinator-server-ip",
    "--coordinator-server-port",
    "--coord-server-ip",
    "--coord-server-port",
    "--lsf-job-no",
    "--job-id",
    "--working-directory",
    "--heartbeats-timeout",
)
OUTPUTS = ("--output-path", "--infer-output-dir")
KNOWN = (*SAME, *BOOLEANS, *UNUSED, *OUTPUTS, "--infer-data", "--fp16", "--stop")


def translate(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the flags of `fminfer run`, and those that were left out.

    Raises:
        ValueError: a flag that the old runner does not have, or a value that is none.
    """
    flags: list[str] = []
    unused: list[str] = []
    rest = [part for word in words for part in _halves(word)]
    while rest:
        flag = rest.pop(0)
        if flag == "--fp16":
            flags.append(flag)
        elif flag == "--stop":
            count = next(
                (i for i, word in enumerate(rest) if word.startswith("--")), len(rest)
            )
            flags += [word for stop in rest[:count] for word in ("--stop", stop)]
            del rest[:count]
        elif flag not in KNOWN:
            raise ValueError(f"{flag} is no flag of the old runner.{_nearest(flag)}")
        elif not rest:
            raise ValueError(f"{flag} needs a value")
        else:
            _translate_one(flag, rest.pop(0), flags, unused)
    # without CUDA the old runner read no id
    if "--device" in flags and "--cuda-id" in flags:
        start = flags.index("--cuda-id")
        del flags[start : start + 2]
        unused.append("--cuda-id")
    return flags, unused


def _translate_one(flag: str, value: str, flags: list[str], unused: list[str]) -> None:
    if flag in BOOLEANS:
        if value.lower() not in ("true", "false"):
            raise ValueError(f"{flag} is {value!r}; it must be true or false")
        flags += BOOLEANS[flag][0 if value.lower() == "true" else 1]
    elif flag in UNUSED:
        unused.append(flag)
    elif flag == "--infer-data":
        flags += [flag, value] if value else []
    else:
        flags += ["--output" if flag in OUTPUTS else flag, value]


def _halves(word: str) -> list[str]:
    """Take --flag=value apart."""
    return word.split("=", 1) if word.startswith("--") else [word]


def _nearest(flag: str) -> str:
    near = get_close_matches(flag, KNOWN, 1)
    more = "For others see fminfer run --help"
    return f" Did you mean {near[0]}? {more}" if near else f" {more}"


def main() -> None:
    words = sys.argv[1:]
    if "--help" in words or "-h" in words:
        print(f"{__doc__}\nFlags: {' '.join(KNOWN)}")
        return
    try:
        flags, unused = translate(words)
    except ValueError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
    if unused:
        print(f"Without a meaning here, left out: {', '.join(unused)}", file=sys.stderr)
    sys.path.append(str(Path(__file__).parent.parent))  # where fminfer is not installed
    from fminfer.cli.app import main as fminfer

    fminfer(["run", *flags], prog_name="fminfer")


if __name__ == "__main__":
    main()
