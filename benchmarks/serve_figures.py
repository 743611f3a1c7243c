"""What serve.py measures of the clients, and how it is summed up and printed."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

NUM_TOKENS = 32000  # of the models' vocabularies


@dataclass(slots=True, frozen=True)
class Phase:
    """So many clients over so many of the workload's requests."""

    name: str
    num_clients: int
    is_streamed: bool
    rows: list[dict[str, Any]]

    @property
    def warm_up(self) -> list[dict[str, Any]]:
        """A few of the rows with token ids that no phase has."""
        return [shift_ids(row, NUM_TOKENS // 2) for row in self.rows[:4]]


def shift_ids(row: dict[str, Any], shift: int) -> dict[str, Any]:
    """Return a request of the same lengths with other token ids."""
    return row | {"prompt": [(i + shift) % NUM_TOKENS for i in row["prompt"]]}


def make_phases(rows: list[dict[str, Any]], clients: list[int]) -> list[Phase]:
    """Return the phases: the most clients without a stream first, then all with one.

    Few clients get fewer requests, 16 each: one after the other they take long.
    """
    kinds = [
        (max(clients), False),
        *((number, True) for number in sorted(clients, reverse=True)),
    ]
    phases = []
    for shift, (number, is_streamed) in enumerate(kinds):
        fresh = [shift_ids(row, shift) for row in rows[: 16 * number]]
        name = f"{number} streamed" if is_streamed else f"{number}"
        phases.append(Phase(name, number, is_streamed, fresh))
    return phases


def percentile(values: list[float], percent: float) -> float:
    """Return the value below which so many percent lie, the nearest that was measured."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(percent / 100 * (len(ordered) - 1)))]


def sum_up(phase: Phase, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a phase's figures: medians of the rounds, percentiles over all of their answers."""
    answers = [answer for result in results for answer in result["answers"]]
    wall_s = statistics.median(result["wall_s"] for result in results)
    figures: dict[str, Any] = {
        "walls_s": [round(result["wall_s"], 3) for result in results],
        "requests_per_s": len(phase.rows) / wall_s,
        "tokens_per_s": sum(row["max_tokens"] for row in phase.rows) / wall_s,
        "client_cpu_s": statistics.median(result["client_cpu_s"] for result in results),
        "server_cpu_s": statistics.median(result["server_cpu_s"] for result in results),
        "num_wrong": sum(result["num_wrong"] for result in results),
    }
    if not phase.is_streamed:
        return figures
    answers = [answer for answer in answers if answer["event_s"]]
    first = [answer["event_s"][0] for answer in answers]
    gaps = [
        later - sooner
        for answer in answers
        for sooner, later in zip(answer["event_s"], answer["event_s"][1:], strict=False)
    ]
    each = [
        (answer["event_s"][-1] - answer["event_s"][0]) / (answer["num_tokens"] - 1)
        for answer in answers
        if answer["num_tokens"] > 1
    ]
    for name, values in (("first", first), ("gap", gaps), ("token", each)):
        for percent in (50, 99):
            figures[f"{name}_p{percent}_ms"] = (
                1000 * percentile(values, percent) if values else 0.0
            )
    num_tokens = sum(answer["num_tokens"] for answer in answers)
    return figures | {
        "tokens_per_event": num_tokens / sum(len(a["event_s"]) for a in answers)
    }


def print_table(figures: dict[str, dict[str, Any]], phases: list[Phase]) -> None:
    """Print a line for each phase and side."""
    heads = ("first p50", "p99", "between p50", "p99", "a token", "tok/event")
    print(f"{'clients':13}{'':9}{'req/s':>8}{'tok/s':>8}{'CPU':>8}", end="")
    print("".join(f"{head:>12}" for head in heads) + "   (ms)")
    for phase in phases:
        for name, found in figures.items():
            side = found[phase.name]
            line = f"{phase.name:13}{name:9}{side['requests_per_s']:8.2f}"
            line += f"{side['tokens_per_s']:8.0f}{side['server_cpu_s']:8.1f}"
            if phase.is_streamed:
                keys = ("first_p50", "first_p99", "gap_p50", "gap_p99", "token_p50")
                line += "".join(f"{side[f'{key}_ms']:12.1f}" for key in keys)
                line += f"{side['tokens_per_event']:12.2f}"
            print(line)


def compare(
    figures: dict[str, dict[str, Any]], phases: list[Phase], file_s: list[float]
) -> Any:
    """Return the ratios that the targets are about."""
    ratios: dict[str, Any] = {}
    at_once = phases[0]
    streamed = phases[1]
    for name, found in figures.items():
        rates = [found[phase.name]["requests_per_s"] for phase in (at_once, streamed)]
        ratios[f"{name}_streaming_costs"] = rates[0] / rates[1] - 1
    if "fminfer" in figures and file_s:
        file_rate = len(at_once.rows) / statistics.median(file_s)
        rate = figures["fminfer"][at_once.name]["requests_per_s"]
        ratios |= {
            "file_requests_per_s": file_rate,
            "fminfer_to_file": rate / file_rate,
        }
    if {"fminfer", "vllm"} <= figures.keys():
        for phase in phases:
            ours = figures["fminfer"][phase.name]
            theirs = figures["vllm"][phase.name]
            ratio = ours["requests_per_s"] / theirs["requests_per_s"]
            ratios[f"fminfer_to_vllm, {phase.name}"] = ratio
    return ratios
