#!/usr/bin/env python
"""Split a file of requests into parts: `fminfer split` under the old tool's name and flags.

python scripts/split_queries.py --input-file requests.jsonl --output-dir parts/
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    sys.path.append(str(Path(__file__).parent.parent))  # where fminfer is not installed
    from fminfer.cli.app import main as fminfer

    fminfer(["split", *sys.argv[1:]], prog_name="split_queries.py")


if __name__ == "__main__":
    main()
