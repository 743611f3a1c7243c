#!/usr/bin/env python
"""`fminfer serve` beside vLLM's server: one client, the same machine, in turns.

The model and the workloads are those of peers.py; vLLM runs with the same settings, where
`make_peers.sh FOLDER vllm` has made its virtual environment. A round starts each
server, lets the client (serve_client.py, a process of its own) run every phase, and
ends the server; `fminfer run` then answers the same requests as a file. Phases have
other token ids, so that the prefix cache has seen none of them. With 64 clients the
workload is answered at once and, in another phase, streamed.

    benchmarks/make_peers.sh ~/peers vllm
    python benchmarks/serve.py --peers ~/peers --rounds 3
    python benchmarks/serve.py --side fminfer --clients 64 --dtype bfloat16

Every answer has all of its tokens, and ours have the texts of the file run; else the
exit status is
1. A table comes first, one JSON line last.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

HERE = Path(__file__).parent.resolve()
sys.path.insert(0, str(HERE))  # scripts find each other, however this one is started

from peers import find_sides, make_rows, run_fminfer, write_model  # noqa: E402
from serve_figures import Phase, compare, make_phases, print_table, sum_up  # noqa: E402
from serve_sides import Side, make_sides, running, session_cpu_s  # noqa: E402


@dataclass(slots=True)
class Measured:
    """What the rounds have found so far, by side and by phase."""

    results: dict[str, dict[str, list[dict[str, Any]]]] = field(default_factory=dict)
    ready_s: dict[str, list[float]] = field(default_factory=dict)
    file_s: list[float] = field(default_factory=list)
    num_other_texts: int = 0


def run_client(
    port: int,
    rows: list[dict[str, Any]],
    num_clients: int,
    is_streamed: bool,
    folder: Path,
) -> dict[str, Any]:
    """Run the client in a process of its own."""
    job = {
        "port": port,
        "requests": rows,
        "num_clients": num_clients,
        "is_streamed": is_streamed,
    }
    path = folder / "client.json"
    path.write_text(json.dumps(job))
    command = [sys.executable, "-S", str(HERE / "serve_client.py"), str(path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def run_phase(phase: Phase, port: int, pid: int, folder: Path) -> dict[str, Any]:
    """Run a phase on a server; return what the client measured, with the server's CPU
    seconds."""
    rows = [row | {"model": str(folder)} for row in phase.rows]
    before_s = session_cpu_s(pid)
    result = run_client(port, rows, phase.num_clients, phase.is_streamed, folder)
    result["server_cpu_s"] = session_cpu_s(pid) - before_s
    asked = [row["max_tokens"] for row in phase.rows]
    found = [answer["num_tokens"] for answer in result["answers"]]
    result["num_wrong"] = sum(a != b for a, b in zip(asked, found, strict=True))
    return result


def answer_as_file(
    rows: list[dict[str, Any]], dtype: str, folder: Path
) -> tuple[float, list[str]]:
    """Answer requests with `fminfer run`; return its seconds without loading, and the texts."""
    shown = [row | {"return_token_ids": True} for row in rows]
    job = {"rows": shown, "model": str(folder), "dtype": dtype, "device": "cpu"}
    run_s = run_fminfer(job, folder)["run_s"]
    records = map(json.loads, (folder / "out.jsonl").read_bytes().splitlines())
    return run_s, [record["result"]["choices"][0]["text"] for record in records]


def run_side(
    side: Side,
    phases: list[Phase],
    texts: dict[str, list[str]],
    folder: Path,
    found: Measured,
) -> None:
    """Start a server, run all phases on it, and end it.

    Args:
        texts: of the file run, by phase.
    """
    results = found.results.setdefault(side.name, {})
    with running(side, folder) as (port, pid, took_s):
        found.ready_s.setdefault(side.name, []).append(took_s)
        few = [
            row | {"max_tokens": 4, "model": str(folder)} for row in phases[0].warm_up
        ]
        run_client(port, few, 2, True, folder)  # what is slow at first use
        for phase in phases:
            result = run_phase(phase, port, pid, folder)
            results.setdefault(phase.name, []).append(result)
            said = f"  {side.name:8} {phase.name:12} {result['wall_s']:7.2f} s"
            print(said, file=sys.stderr, flush=True)
            if side.name == "fminfer":
                pairs = zip(result["answers"], texts[phase.name], strict=True)
                found.num_other_texts += sum(a["text"] != text for a, text in pairs)


def measure(
    sides: list[Side], phases: list[Phase], rounds: int, dtype: str, folder: Path
) -> Measured:
    """Run all sides, and our own file run, in turns."""
    found = Measured()
    is_ours = any(side.name == "fminfer" for side in sides)
    texts = {
        p.name: answer_as_file(p.rows, dtype, folder)[1] for p in phases if is_ours
    }
    for _ in range(rounds):
        for side in sides:
            run_side(side, phases, texts, folder, found)
        if is_ours:
            found.file_s.append(answer_as_file(phases[0].rows, dtype, folder)[0])
            print(f"  file run {found.file_s[-1]:20.2f} s", file=sys.stderr, flush=True)
    return found


@click.command()
@click.option("--model", default="llama-160m", show_default=True)
@click.option("--dtype", default="float32", show_default=True)
@click.option(
    "--workload", default="a", show_default=True, help="a, c, or ROWSxIN+OUT."
)
@click.option(
    "--clients", default="1,8,64", show_default=True, help="Numbers of clients."
)
@click.option(
    "--peers", type=click.Path(path_type=Path), help="Folder of virtual environments."
)
@click.option(
    "--side", "wanted", multiple=True, help="fminfer or vllm.  [default: both]"
)
@click.option("--rounds", default=1, show_default=True)
@click.option("--scale", default=1.0, show_default=True, help="Share of the rows.")
@click.option(
    "--folder", type=click.Path(path_type=Path), default=Path("/tmp/fminfer-peers")
)
def main(
    model: str,
    dtype: str,
    workload: str,
    clients: str,
    peers: Path | None,
    wanted: tuple[str, ...],
    rounds: int,
    scale: float,
    folder: Path,
) -> None:
    """Measure both servers in turns and print them beside each other."""
    folder = folder / f"{model}-{dtype}"
    write_model(folder, model, dtype, "cpu")
    rows = [row | {"ignore_eos": True} for row in make_rows(workload, scale)]
    phases = make_phases(rows, [int(number) for number in clients.split(",")])
    sides = make_sides(find_sides(peers, wanted or ("fminfer", "vllm")), folder, dtype)
    found = measure(sides, phases, rounds, dtype, folder)
    figures = {
        name: {phase.name: sum_up(phase, results[phase.name]) for phase in phases}
        for name, results in found.results.items()
    }
    print(f"\n{model}, {dtype}, workload {workload}, medians of {rounds}")
    print_table(figures, phases)
    ratios = compare(figures, phases, found.file_s)
    ratios |= {
        f"{name}_ready_s": statistics.median(s) for name, s in found.ready_s.items()
    }
    for name, ratio in ratios.items():
        print(f"{name:32}{ratio:10.3f}")
    num_wrong = sum(p["num_wrong"] for side in figures.values() for p in side.values())
    print(
        f"answers of a wrong length: {num_wrong}; of other texts: {found.num_other_texts}"
    )
    summary = {"model": model, "dtype": dtype, "workload": workload, "rounds": rounds}
    summary |= {"file_s": found.file_s, "ratios": ratios, "sides": figures}
    summary |= {"num_wrong": num_wrong, "num_other_texts": found.num_other_texts}
    print(json.dumps(summary))
    sys.exit(1 if num_wrong or found.num_other_texts else 0)


if __name__ == "__main__":
    main()
