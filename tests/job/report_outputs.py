"""Outputs for tests of reports: of every shape, as a run writes them; and pages, read again."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from fminfer.cli.app import main
from fminfer.job.report.report_file import write_report
from fminfer.job.report.reported_outputs import find_outputs

FLAGS = ["--dtype", "float32", "--kernels", "off"]
HOSTILE = (
    "</script><script>document.title='ran'</script><img src=x onerror=\"document.title='ran'\">"
    "<!--<script>\u2028\u2029\x00\x07\x1b[31m\u202eevil\u202c &lt;b&gt; ${1} {{rows}} שלום مرحبا"
)
ASK = "Question: How do you go from the {} to the attic?\nAnswer:"
PLACES = ("den", "porch", "office", "garden", "cellar", "kitchen", "hall", "pantry")


def batch_line(custom_id: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return a line of an OpenAI Batch file."""
    kind = "chat/completions" if "messages" in body else "completions"
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": f"/v1/{kind}",
        "body": body,
    }


def mixed_lines() -> list[Any]:
    """Return lines of all shapes and kinds, and wrong ones."""
    lines: list[Any] = []
    for number, place in enumerate(PLACES):
        prompt = ASK.format(place)
        seed = {"seed": number, "max_tokens": 4 + number}
        message = {"role": "user", "content": prompt}
        lines += [
            {"prompt": prompt, "logprobs": 2, **seed},
            {"prompt": prompt, "logprobs": 1, "echo": True, **seed},
            {"request": {"prompt": prompt, "n": 2, **seed}, "no": number},
            {"messages": [message], "logprobs": True, "top_logprobs": 2, **seed},
            batch_line(f"c{number}", {"prompt": prompt, "logprobs": 1, **seed}),
            batch_line(f"m{number}", {"messages": [message], **seed}),
        ]
    lines += [
        {"prompt": HOSTILE, "logprobs": 2, "echo": True, "max_tokens": 3},
        {
            "prompt": ["a é 日本 🎉", "b"],
            "logprobs": 1,
            "echo": True,
            "n": 2,
            "max_tokens": 3,
        },
        {"prompt": [5, 6, 7], "return_token_ids": True, "max_tokens": 3},
        {"prompt": "lone \ud800 half", "max_tokens": 2},
        {"prompt": 5},
        {"prompt": "x", "temperature": 9},
        {"prompt": "x", "temperature": 11},
        batch_line("c0", {"prompt": "again", "max_tokens": 1}),
        {"prompt": HOSTILE, "max_tokens": HOSTILE},
    ]
    return lines


def write_lines(path: Path, lines: list[Any]) -> Path:
    """Write an input; half a surrogate pair stays one."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def call(*arguments: object) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(main, [*map(str, arguments)])


def make_report(*outputs: Path, path: Path | None = None) -> tuple[str, dict[str, Any]]:
    """Write a report; return the page and the data of its rows."""
    path = path or outputs[0].parent / "report.html"
    write_report(find_outputs(outputs), path)
    return read_page(path)


def read_page(path: Path) -> tuple[str, dict[str, Any]]:
    """Return a report's page, and the data of its rows."""
    page = path.read_text("utf-8")
    (data,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', page, re.S
    )
    return page, json.loads(data)


def text_of(page: str) -> str:
    """Return the page's text, without its rows."""
    body = page.split("<body>")[1].split('<script type="application/json"')[0]
    body = body.replace("<wbr>", "")  # where a word may break
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())


def tile(page: str, name: str) -> str:
    """Return one of the large numbers on top."""
    (found,) = re.findall(rf"<dt>{re.escape(name)}</dt><dd>(.*?)</dd>", page)
    return str(found)


def said(choice: dict[str, Any]) -> str:
    """Return the text of a choice, with its tokens."""
    pieces = "".join(text for text, *_ in choice.get("pieces", []))
    return pieces + str(choice.get("text", "")) + str(choice.get("tail", ""))


def read_records(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_bytes().splitlines()]


def result_of(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record's answer, whatever its shape."""
    found: dict[str, Any] = record.get("result") or record["response"]["body"]
    return found


def plain_answer(number: int, text: str, **fields: Any) -> bytes:
    """Return a record of a bare line, as a run would write it."""
    result = {
        "choices": [{"text": text, "index": 0, "finish_reason": "length"}],
        "request_time": {
            "batch_time": 0.01 * number,
            "queue_time": 0.0,
            "prefill_time": 0.001,
        },
        "usage": {"prompt_tokens": 3, "completion_tokens": number % 50 + 1},
    }
    request = {"prompt": f"prompt {number}", "max_tokens": 50, **fields}
    return json.dumps({"request": request, "result": result}).encode() + b"\n"


def scored_answer(text: str, **fields: Any) -> bytes:
    """Return a record of a prompt of three tokens and two spaces, which a run has scored."""
    answer = json.loads(
        plain_answer(1, text, **{"prompt": text, "echo": True} | fields)
    )
    first, second, third = text.split()
    answer["result"]["choices"][0]["logprobs"] = {
        "tokens": [first, f"Ġ{second}", f"Ġ{third}"],
        "token_logprobs": [None, -1.0, -2.5],
        "text_offset": [0, len(first), len(first) + 1 + len(second)],
    }
    answer["result"]["usage"]["completion_tokens"] = 0
    return json.dumps(answer).encode() + b"\n"
