"""Peak memory by the number of rows: it must not grow with the file.

    python benchmarks/memory.py --rows 10000 --rows 1000000

The whole command runs but for the model: reading, tokenizing, scheduling, journal, finalising. A
stub stands in the place of the stage and draws the same token every time. Each size runs in a
process of its own; what is shown is the largest resident memory of its life (VmHWM).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

import click

from fminfer.answers.carrying_over import RunTerms
from fminfer.compute.values.step import Step, StepResult, TokenLogprobs
from fminfer.core.config import StepSizes
from fminfer.core.messages import RankMemory, StageSpan
from fminfer.engine.answer import AnswerStyle
from fminfer.engine.start import RequestStarter
from fminfer.job.file_job import run_job
from fminfer.job.run_inputs import open_files
from fminfer.job.run_summary import JobSummary
from fminfer.plan.run_plan import RunPlan
from fminfer.runtime.engine_api import Engine
from fminfer.runtime.load.assembly import build_loop
from fminfer.runtime.load.properties import Measured, PipelineProperties
from fminfer.text.tokenizer import Tokenizer

TOKEN_ID = 65


class StubPipeline:
    """Draws the same token for every row, at once."""

    def __init__(self) -> None:
        self._steps: deque[Step] = deque()
        self.num_in_flight = 0

    def submit(self, step: Step) -> None:
        self._steps.append(step)
        self.num_in_flight += 1

    def collect(self) -> StepResult:
        step = self._steps.popleft()
        self.num_in_flight -= 1
        drawn = TokenLogprobs.empty(len(step.draws))
        drawn.ids[:] = TOKEN_ID
        drawn.logprobs[:] = -1.0
        now_s = time.time()
        return StepResult(step.step_id, {"tokens": drawn}, [StageSpan(now_s, now_s)])

    def drop_steps(self) -> None:
        self._steps.clear()
        self.num_in_flight = 0


class StubComputing:
    """What computes for an engine: nothing."""

    def __init__(
        self,
        plan: RunPlan,
        tokenizer: Tokenizer,
        on_progress: object,
    ) -> None:
        self.memory: list[RankMemory] = []
        self.facts = PipelineProperties(plan, Measured(1, 0, False, "", ""))
        self.core = build_loop(
            plan.config,
            RequestStarter(tokenizer, plan.checkpoint.eos_ids, plan.config.seed),
            StubPipeline(),
            AnswerStyle(tokenizer, plan.config.token_format),
            sizes=StepSizes(chunk_size=512, max_rows=256),
            num_blocks=4096,
            num_stages=1,
        )

    def follow(self, on_work: object = None, on_step: object = None) -> None:
        """Tell nobody."""

    def close(self) -> None:
        """End nothing."""


def write_rows(path: Path, num_rows: int) -> None:
    """Write tiny Batch lines, sampled, each with an id: what is remembered of each is most."""
    with path.open("w") as file:
        for number in range(num_rows):
            body = {"prompt": f"row {number}", "max_tokens": 2}
            line = {
                "custom_id": f"id-{number}",
                "method": "POST",
                "url": "/v1/completions",
            }
            file.write(json.dumps(line | {"body": body}) + "\n")


def answer(num_rows: int, folder: Path) -> None:
    """Answer a file of so many rows and print peak memory, in MB, and seconds."""
    source = folder / "rows.jsonl"
    output = folder / "answers.jsonl"
    write_rows(source, num_rows)
    started = time.perf_counter()
    files = open_files([source], [output], RunTerms("stub", {}))
    summary = JobSummary("stub", "none", [source], [output])
    run_job(Engine(compute=StubComputing), files, summary, is_quiet=True)
    assert summary.num_rows == num_rows, summary
    status = Path("/proc/self/status").read_text()
    peak_kb = int(status.partition("VmHWM:")[2].split()[0])
    print(
        json.dumps({"peak_mb": peak_kb / 1024, "run_s": time.perf_counter() - started})
    )


def measure(num_rows: int) -> dict[str, float]:
    """Answer so many rows in a process of its own."""
    command = [sys.executable, __file__, "--rows", str(num_rows), "--here"]
    found: dict[str, float] = json.loads(subprocess.check_output(command))
    return found


@click.command()
@click.option(
    "--rows", multiple=True, type=int, default=(10_000, 1_000_000), show_default=True
)
@click.option("--here", is_flag=True, hidden=True)
def main(rows: tuple[int, ...], here: bool) -> None:
    """Show peak memory for each number of rows."""
    if here:
        with tempfile.TemporaryDirectory() as folder:
            answer(rows[0], Path(folder))
        return
    first = None
    for num_rows in rows:
        found = measure(num_rows)
        first = found["peak_mb"] if first is None else first
        print(
            f"{num_rows:>10,} rows  {found['peak_mb']:6.0f} MB  "
            f"{found['peak_mb'] - first:+6.1f} MB  {found['run_s']:6.1f} s"
        )


if __name__ == "__main__":
    main()
