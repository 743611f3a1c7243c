"""What a server tells Prometheus of its batches."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from fminfer.server.batches.desk import BatchService
from fminfer.server.metrics import LABELS


class BatchMetrics:
    """Reads the batches each time that somebody asks for the metrics."""

    def __init__(self, desk: BatchService, model_name: str) -> None:
        self._desk, self._model_name = desk, model_name

    def collect(self) -> Iterator[Metric]:
        """Yield how many batches are open, and the lines that were answered."""
        is_open = GaugeMetricFamily(
            "fminfer:batches_open", "Batches that are not over.", labels=LABELS
        )
        is_open.add_metric([self._model_name], self._desk.num_open)
        yield is_open
        rows = CounterMetricFamily(
            "fminfer:batch_rows",
            "Lines of batches that have their record, by its kind.",
            labels=[*LABELS, "kind"],
        )
        rows.add_metric([self._model_name, "answer"], self._desk.done.completed)
        rows.add_metric([self._model_name, "error"], self._desk.done.failed)
        yield rows
