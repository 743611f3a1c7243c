#!/usr/bin/env python
"""Show the first answer of each output file, and every error, for people.

python scripts/show_answers.py output_*.jsonl
python scripts/show_answers.py --all output_*.jsonl     every answer
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    shows_all = "--all" in sys.argv
    for path in (Path(each) for each in sys.argv[1:] if each != "--all"):
        print(f"\n── {path.name}")
        records = [json.loads(line) for line in path.read_text().splitlines()]
        if path.name.endswith(".errors.jsonl"):
            for record in records:
                is_batch = "response" in record
                error = (
                    record["response"]["body"]["error"] if is_batch else record["error"]
                )
                place = record["custom_id"] if is_batch else f"line {record['line']}"
                print(f"{place}: {error['message']}")
        elif records:
            for record in records if shows_all else records[:1]:
                show_answer(record)
        else:
            print("(no line was answered)")


def show_answer(record: dict[str, Any]) -> None:
    # of an OpenAI Batch file, which does not repeat the prompt
    if "response" in record:
        print(record["custom_id"])
        result = record["response"]["body"]
    else:
        request = record["request"]
        names = ("prompt", "input", "query")
        prompt = next((request[name] for name in names if name in request), None)
        if prompt is None:
            prompt = request["messages"][-1]["content"]
        print(prompt if isinstance(prompt, str) else json.dumps(prompt))
        result = record["result"]
    for vector in result.get("data", []):
        shown = vector["embedding"][:4]
        numbers = (
            shown
            if isinstance(shown, str)
            else ", ".join(f"{each:.3f}" for each in shown)
        )
        print(f"   → {numbers} … ({len(vector['embedding'])} of them)")
    for found in result.get("results", []):
        print(f"   → {found['relevance_score']:.3f} {found['document']['text']!r}")
    for choice in result.get("choices", []):
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        print(f"   → {text!r}  ({choice['finish_reason']})")


if __name__ == "__main__":
    main()
