"""A process of `fminfer serve`: HTTP in a thread with an event loop, the engine's steps here."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import click
import uvicorn

from fminfer.answers.answer_index import AnswerIndex, open_answer_index
from fminfer.core.errors import FminferError
from fminfer.core.quantities import describe_dtypes, with_noun
from fminfer.files.journal_rows import Fingerprint
from fminfer.machine.host_memory import trim_host_memory
from fminfer.machine.stopper import Stopper
from fminfer.plan.run_plan import RunPlan
from fminfer.runtime.bars import say
from fminfer.runtime.computing import Compute
from fminfer.runtime.engine_api import Engine
from fminfer.runtime.launch.processes import ProcessContext
from fminfer.runtime.load.agreement import Opening
from fminfer.runtime.process_roles import lead_or_join, start_engine
from fminfer.server.asgi_app import make_app
from fminfer.server.batch_engine import BatchEngine
from fminfer.server.batch_service import BatchService
from fminfer.server.batches.stored_batches import ServerState
from fminfer.server.connections import (
    MOST_ACCEPTED,
    MOST_CONNECTIONS,
    Connection,
    open_socket,
    raise_file_limit,
)
from fminfer.server.http_errors import shutting_down_error
from fminfer.server.service import Service
from fminfer.server.settings import ServerSettings

LEAVE_S = 2.0  # for the last bytes, once the grace is over
REPORT_S = 10  # between log lines of what goes on
# collections between two of the oldest objects, which may be a large request
OLD_ROUNDS = 100
SWITCH_S = 0.0005  # between threads of Python


def serve_process(run: ProcessContext, settings: ServerSettings) -> None:
    """Serve until told to stop, or do another rank's part of it."""
    opening = Opening(run.config, run.role.spread)
    lead_or_join(run, opening, partial(_serve_engine, run, settings))


def _serve_engine(
    run: ProcessContext,
    settings: ServerSettings,
    plan: RunPlan,
    compute: Compute,
) -> None:
    """Start the engine, and answer over HTTP; only the first process does so."""
    # Both before a model is loaded for nothing.
    address = open_socket(settings)
    state = None
    if settings.state is not None:
        state = open_state(run, settings.state, plan.fingerprint())
    if not run.is_quiet:
        click.echo(f"Loading {plan.checkpoint.name} …", err=True)
    engine = start_engine(run, plan, compute)
    text = _describe_engine(engine)
    serve_engine(run, settings, engine, address, state, plan.fingerprint, text)


def serve_engine(
    run: ProcessContext,
    settings: ServerSettings,
    engine: Engine | BatchEngine,
    address: socket.socket,
    state: ServerState | None,
    compute_fingerprint: Callable[[], Fingerprint],
    description: str,
) -> None:
    """Serve an engine until told to stop, and close it; `description` says what it is."""
    raise_file_limit()
    try:
        if not run.is_quiet:
            click.echo(f"Ready after {run.elapsed_s():.1f} s: {description}.", err=True)
        engine.runs.cache = _open_cache(run, settings, compute_fingerprint)
        # Requests are prepared in threads. With Python's 5 ms, each step would wait so long.
        sys.setswitchinterval(SWITCH_S)
        gc.freeze()  # collections then look at requests, and not at all of torch
        gc.set_threshold(*gc.get_threshold()[:2], OLD_ROUNDS)
        run_http(engine, settings, run.stopper, address, state)
    finally:
        if engine.runs.cache is not None:
            engine.runs.cache.close()
        engine.close()


def _describe_engine(engine: Engine) -> str:
    facts = engine.facts
    types = describe_dtypes(facts.dtype, facts.weight_dtype)
    processes = with_noun(facts.measured.num_threads, "thread")
    if facts.num_ranks > 1:
        processes = f"{facts.num_ranks} ranks of {processes}"
    kernels = "compiled kernels" if facts.measured.has_kernel else "plain torch"
    answers = "answers are the same whatever rows are beside them"
    if facts.measured.why_dependent:
        answers = f"answers may depend on other rows: {facts.measured.why_dependent}"
    return f"{types} on {engine.device}, {processes}, {kernels}; {answers}"


def _open_cache(
    run: ProcessContext,
    settings: ServerSettings,
    compute_fingerprint: Callable[[], Fingerprint],
) -> AnswerIndex | None:
    if settings.cache_place is None and not settings.cache_size:
        return None  # a fingerprint reads of every tensor
    return open_answer_index(
        compute_fingerprint(),
        settings.cache_place,
        (lambda text: None) if run.is_quiet else say,
        size=settings.cache_size,
        list_size=settings.cache_list_size,
    )


def open_state(
    run: ProcessContext, path: Path, fingerprint: Fingerprint
) -> ServerState:
    """Open the state folder of a server whose answers have this fingerprint."""
    os.umask(0o077)  # this process writes for nobody else
    state = ServerState(path, fingerprint)
    if state.folder.was_narrowed and not run.is_quiet:
        click.echo(
            f"--state {path} could be read by others; now only you can.", err=True
        )
    return state


def run_http(
    engine: Engine | BatchEngine,
    settings: ServerSettings,
    stopper: Stopper,
    address: socket.socket,
    state: ServerState | None = None,
) -> None:
    """Serve an engine until the stopper hears a signal, and open requests have ended.

    Raises:
        StoppedError: it was told to stop, and requests were left without an answer.
        FminferError: the engine failed.
    """
    thread = HttpThread(engine, settings, address, state)
    thread.start()
    try:
        dispatcher = thread.service.dispatcher
        stopper.num_open = lambda: dispatcher.num_open
        # before anybody hears where it is, and may end it
        with stopper.forwarding_stop(thread.drain):
            if not settings.is_quiet:
                click.echo(
                    f"Serving {thread.service.names[0]} at {thread.url}\n"
                    f"  {thread.url}/docs lists what there is; Ctrl-C ends it.",
                    err=True,
                )
            dispatcher.run()
    finally:
        thread.end()
    if (num_dropped := dispatcher.num_dropped) and stopper.reason is not None:
        stopper.reason.args = (
            f"{stopper.reason} Requests without an answer: {num_dropped:,}.",
        )
        raise stopper.reason
    if stopper.reason is None:
        reason = thread.fault or "it gave no reason"
        raise FminferError(
            f"the HTTP server ended by itself: {reason}"
        ) from thread.fault
    if not settings.is_quiet:
        click.echo("Ended; every open request has its answer.", err=True)


class HttpThread(threading.Thread):
    """The thread of HTTP, on a socket that does not listen yet; `state` is what it keeps."""

    def __init__(
        self,
        engine: Engine | BatchEngine,
        settings: ServerSettings,
        address: socket.socket,
        state: ServerState | None = None,
    ) -> None:
        super().__init__(name="http", daemon=True)
        self._address = address
        self.service = Service(engine, settings)
        self.batches: BatchService | None = None
        if state is not None:
            self.batches = BatchService(state, self.service, settings)
            self.service.metrics.batches = self.batches.work
        scheme = "http" if settings.ssl_certfile is None else "https"
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.url = f"{scheme}://{host}:{address.getsockname()[1]}"
        self._server = uvicorn.Server(
            uvicorn.Config(
                make_app(self.service, settings, self.batches),
                http=Connection,
                ws="none",
                lifespan="off",
                backlog=MOST_ACCEPTED,
                log_config=None,
                log_level="error" if self.service.log.is_shown("error") else "critical",
                access_log=False,
                server_header=False,
                timeout_keep_alive=settings.keep_alive_s,  # type: ignore[arg-type]
                ssl_certfile=settings.ssl_certfile,
                ssl_keyfile=settings.ssl_keyfile,
            )
        )
        self._is_ready = threading.Event()
        self.fault: BaseException | None = None  # that ended it, if nobody did

    def start(self) -> None:
        """Listen."""
        super().start()
        self._is_ready.wait()
        if self.fault is not None:
            raise FminferError(
                f"the HTTP server cannot start: {self.fault}"
            ) from self.fault
        if self.batches is not None:
            self.batches.work.start()

    def drain(self, grace_s: float) -> None:
        """Refuse further requests, and give open ones the grace.

        A signal handler may call it.
        """
        self.loop.call_soon_threadsafe(self._begin_drain, grace_s)

    def end(self) -> None:
        """Wait until all has been sent, or for a while."""
        with suppress(RuntimeError):  # its loop is closed
            self.loop.call_soon_threadsafe(self._begin_drain, 0.0)
        self.join(LEAVE_S + 1)
        if self.batches is not None:
            self.batches.close()

    def _begin_drain(self, grace_s: float) -> None:
        dispatcher = self.service.dispatcher
        closing = shutting_down_error()
        dispatcher.close(closing)
        if self.batches is not None:
            self.batches.work.drain()
        loop = asyncio.get_running_loop()
        loop.call_later(grace_s, dispatcher.fail_open_requests, closing)
        loop.call_later(grace_s + LEAVE_S, self._close_connections)
        most_s = grace_s + LEAVE_S + 0.5  # for what goes on without a connection
        self._server.config.timeout_graceful_shutdown = most_s  # type: ignore[assignment]
        self._server.should_exit = True

    def _close_connections(self) -> None:
        """Close what is still open: of clients that do not read, or have not sent all."""
        for connection in [*self._server.server_state.connections]:
            connection.transport.abort()

    def run(self) -> None:
        """Answer until told to end."""
        try:
            asyncio.run(self._serve_http())
        except BaseException as error:
            self.fault = error
        finally:
            self.service.dispatcher.end()
            self._is_ready.set()

    async def _serve_http(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.service.dispatcher.start(
            self.loop, on_failure=lambda: self._begin_drain(0.0)
        )
        reporting = asyncio.create_task(self._report_throughput())
        serving = asyncio.create_task(self._server.serve(sockets=[self._address]))
        while not (self._server.started or serving.done()):
            await asyncio.sleep(0.005)
        if self._server.started:  # otherwise once the fault is noted
            self._address.listen(MOST_CONNECTIONS)  # may wait until they are accepted
            self._is_ready.set()
        await serving
        reporting.cancel()

    async def _report_throughput(self) -> None:
        """Count tokens each second; now and then log what goes on."""
        throughput = self.service.throughput
        dispatcher = self.service.dispatcher
        num_logged = 0  # tokens
        while True:
            for _ in range(REPORT_S):
                await asyncio.sleep(1)
                throughput.record_counts()
                if not dispatcher.num_open:
                    await asyncio.to_thread(
                        trim_host_memory
                    )  # what large requests have left
            num_tokens = throughput.num_tokens
            if num_tokens != num_logged:
                state = self.service.served.state
                rates = throughput.rates
                fill = f", KV cache {state.kv_usage:.0%} full"
                self.service.log.write(
                    "info",
                    f"{state.num_running} running, {dispatcher.num_waiting} waiting"
                    f"{'' if self.service.url_elsewhere else fill}; "
                    f"{rates.prompt_tokens:,.0f} prompt tokens/s, "
                    f"{rates.generation_tokens:,.0f} new tokens/s",
                )
            num_logged = num_tokens
