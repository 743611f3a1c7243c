#!/usr/bin/env python
"""Show the first answer of each output file, and every error, for people.

python scripts/show_answers.py output_*.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        print(f"\n── {path.name}")
        records = [json.loads(line) for line in path.read_text().splitlines()]
        if path.name.endswith(".errors.jsonl"):
            for record in records:
                is_batch = "response" in record
                error = record["response"]["body"]["error"] if is_batch else record["error"]
                place = record["custom_id"] if is_batch else f"line {record['line']}"
                print(f"{place}: {error['message']}")
        elif records:
            show_answer(records[0])
        else:
            print("(no line was answered)")


def show_answer(record: dict[str, Any]) -> None:
    if "response" in record:  # of an OpenAI Batch file, which does not repeat the prompt
        print(record["custom_id"])
        result = record["response"]["body"]
    else:
        request = record["request"]
        prompt = request["prompt"] if "prompt" in request else request["messages"][-1]["content"]
        print(prompt if isinstance(prompt, str) else json.dumps(prompt))
        result = record["result"]
    for choice in result["choices"]:
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        print(f"   → {text!r}  ({choice['finish_reason']})")


if __name__ == "__main__":
    main()
