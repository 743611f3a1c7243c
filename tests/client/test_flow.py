"""How many requests a server gets at a time, on a simulated clock."""

from __future__ import annotations

import pytest

from fminfer.client.flow import LIMIT_WITHOUT_ANSWERS, Flow
from tests.client.flow_servers import SimulatedServer


def measure_part_of_best(server: SimulatedServer, from_s: float, end_s: float) -> float:
    """Return the rate between two moments, as a part of what the server can do then."""
    flow = server.flow = Flow(1024, 0.0)
    rate = server.simulate(lambda: flow.limit, end_s, from_s)
    has_halved = from_s >= server.halves_at_s
    return rate / (server.capacity / (2 if has_halved else 1) / server.service_s)


@pytest.mark.parametrize("kind", ["queue", "thrash", "refuse"])
@pytest.mark.parametrize("capacity", [8, 20, 50, 100, 300])
@pytest.mark.parametrize("service_s", [0.05, 0.2])
def test_the_best_rate_is_reached_within_a_minute(
    kind: str, capacity: int, service_s: float
) -> None:
    server = SimulatedServer(capacity, service_s, kind)
    assert measure_part_of_best(server, 60, 90) >= 0.95


@pytest.mark.parametrize("kind", ["queue", "thrash", "refuse"])
@pytest.mark.parametrize("capacity", [8, 20, 50, 100])
def test_it_follows_a_capacity_that_halves(kind: str, capacity: int) -> None:
    server = SimulatedServer(capacity, 0.05, kind, halves_at_s=60)
    assert measure_part_of_best(server, 120, 150) >= 0.95


def test_it_grows_while_the_first_answers_take_long() -> None:
    flow = Flow(1024, 0.0)
    for _ in range(100):
        flow.count_data()
    assert flow.limit == LIMIT_WITHOUT_ANSWERS
    flow.count_answer(60.0, is_full=True)
    flow.count_data()
    assert flow.limit == LIMIT_WITHOUT_ANSWERS


@pytest.mark.parametrize("most", [1, 3, 10])
def test_it_never_exceeds_the_most(most: int) -> None:
    server = SimulatedServer(100, 0.05)
    flow = server.flow = Flow(most, 0.0)
    limits: set[int] = set()

    def choose_limit() -> int:
        limits.add(flow.limit)
        return flow.limit

    server.simulate(choose_limit, 30, 0)
    assert min(limits) >= 1 and max(limits) == most


def test_a_server_with_too_few_requests_proves_nothing() -> None:
    flow = Flow(1024, 0.0)
    for number in range(10_000):
        flow.count_answer(number * 0.01, is_full=False)
    assert flow.limit == 4


def test_one_failure_among_many_requests_changes_nothing() -> None:
    server = SimulatedServer(100, 0.05)
    flow = server.flow = Flow(1024, 0.0)
    server.simulate(lambda: flow.limit, 60, 0)
    while flow.limit > flow._base:
        flow.count_trouble(60.0)
    limit = flow.limit
    flow.count_trouble(60.0)
    assert flow.limit == limit
