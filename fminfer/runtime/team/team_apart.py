"""Ranks of several pipelines that were started apart: they meet once, then each takes its part.

Of all ranks, r is rank r % N of pipeline r // N, where N is how many ranks a pipeline
has. Rank 0 runs the job, and starts another process as rank 0 of pipeline 0. The first
rank of each other pipeline has a line to it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection

from fminfer.core.config import EngineConfig
from fminfer.core.errors import PipelineError, UsageError
from fminfer.machine.liveness import wait_until
from fminfer.pipeline.finding import set_silence_limit
from fminfer.pipeline.group import End, Meeting, check_agreement
from fminfer.pipeline.ranks import RankPlace, Spread
from fminfer.runtime.launch.processes import Processes
from fminfer.runtime.launch.role import ChildOptions
from fminfer.runtime.team.team_process import TeamPipeline, start_pipeline

HEAR_S = 5.0  # time for the other ranks to hear that there is nothing to do


class Apart(Meeting):
    """The meeting of all ranks, and this one's part."""

    def __init__(
        self, facts: RankPlace, spread: Spread, prepare: Callable[[int], None], end: End
    ) -> None:
        super().__init__(facts, spread, prepare, end)
        self._num_ranks = spread.num_ranks
        self._number, self._rank_in_pipeline = divmod(self.rank, self._num_ranks)
        self._is_over = False  # each pipeline goes its own way, or none is needed
        # Of this pipeline's own meeting, which is in the same store.
        self._facts = RankPlace(
            self._rank_in_pipeline,
            self._num_ranks,
            self._store.host,
            self._store.port,
            source=facts.source,
            secret=self._store.secret,
            prefix=f"{self.pipeline_name}/",
        )

    @property
    def pipeline_name(self) -> str:
        """Return what messages call this rank's pipeline, whose ranks they count from 0."""
        return f"pipeline {self._number}"

    def find_place(self, fingerprint: dict[str, str]) -> None:
        """Find this pipeline's place on its machine, once all ranks have the same run."""
        check_agreement(self, "fingerprint", fingerprint)
        counts = Counter(rank // self._num_ranks for rank in self.local_ranks)
        if len(set(counts.values())) > 1:
            places = ", ".join(
                f"pipeline {n} has {count}" for n, count in sorted(counts.items())
            )
            raise UsageError(
                f"of the ranks on {self._where['host']}, {places}; start as many of each "
                "there, for they share its cores and GPUs evenly (rank r is of "
                f"pipeline r // {self._num_ranks})"
            )
        self.gather("agreed", True)
        self._store.hide_address()
        index = sorted(counts).index(self._number)
        self.spread = replace(self.spread, num_engines=len(counts), engine_number=index)

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Tell the other ranks how rank 0's work ends if it starts no pipeline."""
        try:
            yield
        except Exception as error:
            if not self._is_over:
                self.announce_error(error)
            raise
        if not self._is_over:
            self._end_meeting(is_needed=False)
            others = [f"heard/{rank}" for rank in range(1, self.world_size)]
            wait_until(lambda: self._store.check(others), HEAR_S)

    def await_start(self) -> bool:
        """Wait until rank 0 starts the pipelines; return False if it has nothing to do.

        Until then all ranks watch over each other; what goes wrong with one ends all.
        """
        is_needed = self._store.get("start") == b"1"
        self.watch.stop()
        self._publish("heard", True)
        return is_needed

    def _end_meeting(self, *, is_needed: bool) -> None:
        """From now on each pipeline watches over its own ranks: one that dies costs no other."""
        self._is_over = True
        self._store.set("start", str(int(is_needed)))
        self.watch.stop()

    def start_pipelines(
        self, config: EngineConfig, child_options: ChildOptions
    ) -> list[TeamPipeline]:
        """Start rank 0's own stage, and wait for the lines of the other pipelines."""
        self._end_meeting(is_needed=True)
        member = Processes([self.pipeline_name], has_line=True).all[0]
        facts = (
            replace(self._facts, parent=os.getpid()) if self._num_ranks > 1 else None
        )
        first = start_pipeline(self.spread, member, config, child_options, facts)
        try:
            return [first, *map(self._await_line, range(1, self.spread.num_pipelines))]
        except BaseException:
            first.close()
            first.end(0)
            raise

    def join_pipeline(self) -> tuple[RankPlace | None, int | None]:
        """Return another rank's place in its pipeline, and its line to rank 0 if it has one."""
        facts = self._facts if self._num_ranks > 1 else None
        if self._rank_in_pipeline > 0:
            return facts, None
        peer = self._store.open_connection(
            self.spread.join_timeout_s
        ).become_private_connection(self._number)
        set_silence_limit(peer, self.spread.rank_timeout_s, is_always_read=False)
        return facts, peer.detach()

    def _await_line(self, number: int) -> TeamPipeline:
        assert self._store.holder is not None
        lines = self._store.holder.private_connections
        timeout_s = self.spread.join_timeout_s
        if not wait_until(lambda: number in lines, timeout_s):
            raise PipelineError(
                f"rank {number * self._num_ranks}, the first of pipeline {number}, did "
                f"not connect within {timeout_s:g} s (--join-timeout)"
            )
        peer = lines.pop(number)
        set_silence_limit(peer, self.spread.rank_timeout_s, is_always_read=True)
        return TeamPipeline(number, Connection(peer.detach()))
