"""Servers elsewhere as the engine of a server, which then has files and batches alone."""

from __future__ import annotations

from fminfer.client.remote_engine import RemoteEngine
from fminfer.engine.engine_core import Event


class BatchEngine(RemoteEngine):
    """Answers the lines of batches. One thread calls `wait` and `step`."""

    is_shared = True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for work, at most until `wake` or the timeout; return whether there is any."""
        self.runs.lanes.feed()
        return super().wait(timeout_s)

    def step(self) -> list[Event]:
        """Wait a little for answers, and give batches theirs.

        Raises:
            ServerError: the servers cannot go on. All batches pause.
        """
        lanes = self.runs.lanes
        lanes.feed()
        try:
            return lanes.sort_events(super().step())
        except BaseException as error:
            lanes.fail(error)
            raise
