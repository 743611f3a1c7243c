#!/usr/bin/env python
"""Show the first answer of each output file, prompt and text, for people.

python scripts/show_answers.py output_*.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        if path.name.endswith(".errors.jsonl"):
            continue
        with path.open() as lines:
            line = next(lines, None)
        print(f"\n── {path.name}")
        if line is None:
            print("   (no line was answered)")
            continue
        record = json.loads(line)
        prompt = record["request"]["prompt"]
        print(prompt if isinstance(prompt, str) else json.dumps(prompt))
        for choice in record["result"]["choices"]:
            print(f"   → {choice['text']!r}  ({choice['finish_reason']})")


if __name__ == "__main__":
    main()
