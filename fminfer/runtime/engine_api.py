"""`Engine`: the public Python API, on which the command line stands too."""

from __future__ import annotations

import atexit
import logging
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from typing_extensions import Self

from fminfer.answers.answer_index import AnswerIndex, open_answer_index
from fminfer.answers.cache_place import KeptAnswers
from fminfer.contract.endpoints import Endpoint
from fminfer.contract.record import Record
from fminfer.contract.vectors import check_endpoint
from fminfer.core.config import EngineConfig, make_config
from fminfer.core.errors import UsageError
from fminfer.core.messages import RankMemory
from fminfer.core.option import document_options
from fminfer.engine.engine_core import Event
from fminfer.engine.intake import make_text_request
from fminfer.engine.sequence import PreparedRequest
from fminfer.engine.stats import EngineState, EngineStats
from fminfer.models.checkpoint import Checkpoint
from fminfer.plan.run_plan import RunPlan
from fminfer.runtime.computing import Compute, spread_of, start_computing
from fminfer.runtime.job_engine import EngineTraits, Pace
from fminfer.runtime.lines.runner import WINDOW
from fminfer.runtime.lines.runs import LOOKAHEAD, AnyRequest, Runs
from fminfer.runtime.load.agreement import Opening
from fminfer.runtime.load.assembly import load_tokenizer, make_intake
from fminfer.runtime.load.one_pipeline import OnePipeline
from fminfer.runtime.load.properties import PipelineProperties
from fminfer.runtime.typed_answers import AnswerReader, AnswerType

log = logging.getLogger(__name__)
REPEAT_BITS = 64  # of the random number by which requests without a seed differ


class Engine:
    """Answers completions and chat requests with one model.

        with fminfer.Engine("path/to/model") as engine:
            for answer in engine.run(["What is the capital of France?"]):
                print(answer.text)

    or requests one by one, with their tokens as they come:

        engine.add({"prompt": "Hello", "max_tokens": 5}, is_streamed=True)
        while engine.has_work:
            for event in engine.step():
                print(event)

    Args:
        model: a folder, a hub id, or a whole `EngineConfig`; None is the demo model,
        which answers
            no line that names another, and "demo" is the same model for any line.
            `model_name` is its name on the command line.
        on_progress: called with (bytes read, bytes in all) while weights load.
        checkpoint: the model, if it is opened already; `compute` starts what computes.
        plan: the run's plan, if it is made already.
        result_cache: a folder of answers that `run` and `embed` take and keep, also those of
            commands with --result-cache; None: none is kept.
        result_cache_bytes: most disk space of these answers.
        options: fields of `EngineConfig`, which `__init__` lists, in the place of a
        config's own.

    With `world_size` the model's layers are spread over so many processes on this machine; with
    `data_group_size` these are so many pipelines, which answer together. They are
    started here, and end with the engine or with this process.

    Raises:
        CheckpointError: the model cannot be loaded.
        PipelineError: a rank failed, or the ranks were started with different options.
        UsageError: an option that cannot be.
        OutOfMemoryError: memory for the smallest step cannot be had.
    """

    @partial(document_options, table=EngineConfig)
    def __init__(
        self,
        model: str | EngineConfig | None = None,
        *,
        model_name: str | None = None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        checkpoint: Checkpoint | None = None,
        plan: RunPlan | None = None,
        compute: Compute = start_computing,
        result_cache: str | None = None,
        result_cache_bytes: int | None = None,
        **options: Any,
    ) -> None:
        started = time.perf_counter()
        if model is not None and model_name not in (None, model):
            raise UsageError(
                f"model is {model!r} and model_name {model_name!r}; give one of them"
            )
        self.config = config = make_config(
            model_name if model is None else model, **options
        )
        spread = spread_of(config)
        opening = Opening(
            config,
            spread,
            checkpoint=checkpoint,
            plan=plan,
            is_computing=spread.num_pipelines == 1,
        )
        plan = opening.plan_run()
        checkpoint = plan.checkpoint
        self.model_name = checkpoint.name
        self.tokenizer = load_tokenizer(config, checkpoint)
        # most tokens of prompt and completion
        self.context_length = checkpoint.context_length
        self.vocab_size: int = checkpoint.config.vocab_size
        self._computing = compute(plan, self.tokenizer, on_progress)
        self.follow = self._computing.follow
        self._core = self._computing.core
        with ExitStack() as failed:
            failed.callback(self._computing.close)
            num_blocks = self.facts.num_kv_blocks
            self.intake = make_intake(config, checkpoint, self.tokenizer, num_blocks)
            self._kept = _open_kept_answers(plan, result_cache, result_cache_bytes)
            failed.pop_all()
        has_long_steps = bool(self.facts.streaming)
        self.runs = Runs(
            self._core, self.intake, self.model_name, has_long_steps=has_long_steps
        )
        self.runs.cache = self._kept
        self._is_closed = False
        self.load_s = time.perf_counter() - started

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def make_request(
        self, text: str, *, is_raw: bool = False, **fields: Any
    ) -> dict[str, Any]:
        """Return the request that a text by itself stands for.

        It is the user's message of a chat, if the model has a chat template. It is the
        prompt of a plain completion if the model has none, if `echo` or `best_of` are
        given, which chats do not have, or if `is_raw`. A completion draws up to
        RAW_TOKENS tokens, a chat what the context leaves: the likeliest ones, unless
        fields (by their names in completions) ask for draws. Of a model of vectors it
        asks the text's.
        """
        text_field = self.intake.choose_text_field(fields, is_raw=is_raw)
        if text_field == "input":
            return {"input": text, **fields}
        as_chat = text_field == "messages"
        return make_text_request(text, fields, self.intake, as_chat=as_chat)

    def add(
        self,
        request: Mapping[str, Any] | PreparedRequest,
        *,
        priority: int = 0,
        is_streamed: bool = False,
        endpoint: Endpoint | None = None,
        request_id: int | None = None,
    ) -> int:
        """Queue a request; return the id by which events name it. Any thread may call it.

        Requests without a seed of their own draw differently, also those that say the same, and
        also in another process.

        Args:
            request: its fields, or what `prepare` made of them.
            priority: higher ones are admitted first, and may preempt rows of lower ones.
            is_streamed: return its tokens as they come.
            endpoint: such as "chat"; None: its fields tell.
            request_id: its id, above all that were returned so far; None: the next one.

        Raises:
            RequestError: what is wrong with it.
            UsageError: the engine is closed.
        """
        if self._is_closed:
            raise UsageError("the engine is closed; make a new one")
        if not isinstance(request, PreparedRequest):
            request = self.prepare(request, endpoint=endpoint)
        return self._core.add(
            request, priority=priority, is_streamed=is_streamed, request_id=request_id
        )

    def prepare(
        self,
        request: Mapping[str, Any],
        *,
        endpoint: Endpoint | None = None,
        compiles: bool = True,
    ) -> PreparedRequest:
        """Check and tokenize a request, to be added later. Any thread may call it.

        `add` does this too. A long prompt takes a while, which an event loop must not
        wait for; a new constraint may take longer, and is waited for if `compiles`.

        Raises:
            RequestError: what is wrong with it.
            UncompiledError: it has a constraint that would have to be waited for.
        """
        parsed = self.intake.parse(request, endpoint=endpoint, compiles=compiles)
        prepared = self.intake.prepare(parsed, repeat=secrets.randbits(REPEAT_BITS))
        self.intake.report_warnings(*parsed.warnings)
        return prepared

    def embed(
        self,
        texts: Iterable[str | list[int]],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        on_answer: Callable[[], object] = lambda: None,
    ) -> Any:
        """Return the vectors of texts, or of lists of ids: an array (texts, size) of float32.

        It is a run of its own, as `run` is; equal texts are computed once.

        Args:
            dimensions: keep the first so many numbers of each.
            prompt_name: which of the model's own prompts stands before each text; "": none.
            on_answer: called after each text, for a bar.

        Raises:
            RequestError: what is wrong with a text, or the model gives no embeddings.
            TypeError: these are no texts.
            UsageError: an earlier run is not finished.
        """
        if isinstance(texts, str):
            raise TypeError(
                "embed takes a list of texts, and this is one text; give [text]"
            )
        check_endpoint("embeddings", self.intake.limits.vectors)
        fields = {
            "dimensions": dimensions,
            "prompt_name": prompt_name,
            "encoding_format": "float",
        }
        requests = ({"input": text, **fields} for text in texts)
        embeddings: dict[int, Any] = {}
        for record in self.runs.run(requests, WINDOW):
            if record.error is not None:
                raise record.error
            assert record.result is not None, "a record has a result or an error"
            entries = record.result["data"]
            if len(entries) != 1:
                raise TypeError("embed takes a text, or a list of ids, in each place")
            embeddings[record.line.number] = entries[0]["embedding"]
            on_answer()
        size = self.intake.limits.vectors.size if self.intake.limits.vectors else 0
        vectors = [embeddings[number] for number in sorted(embeddings)]
        return np.array(vectors or np.empty((0, dimensions or size)), np.float32)

    def cancel(self, request_id: int) -> None:
        """Forget a request, in any state. Any thread may call it."""
        self._core.cancel(request_id)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for work, at most until `wake` or the timeout; return whether there is any."""
        self.runs.lanes.feed()
        return bool(self.runs.left) or self._core.wait(timeout_s)

    def wake(self) -> None:
        """End a `wait`, or the next one if none goes on. Any thread may call it."""
        self._core.wake()

    @property
    def has_work(self) -> bool:
        """Whether requests are without an answer."""
        return bool(self.runs.left) or self._core.has_work

    def step(self) -> list[Event]:
        """Compute a step and return its events. Always call it from the same thread.

        A `Delta` is new text of a streamed request, `Finished` an answer, `Failed` an error.

        Raises:
            PipelineError: a rank failed; all requests are dropped.
        """
        return self.runs.step()

    def run(
        self,
        requests: Iterable[str | AnyRequest],
        read_ahead: int = LOOKAHEAD,
        *,
        answer: AnswerType | None = None,
    ) -> Generator[Record, None, None]:
        """Answer requests, and read on while they are computed.

        Use `add` if the next request depends on an answer.

        Args:
            requests: texts, each as `make_request` takes it; dicts with the fields of a
            completions
                or chat request; or input lines.
            read_ahead: prompts to read before there is room for them. More allow a better order.
            answer: what each answer must be: a class of pydantic, or a JSON Schema. A record's
                `answer` is then an instance, or what the JSON says. It is None where there is
                none, and `answer_error` says why.

        Yields:
            one Record for each request, in the order in which they finish: its `text`, or all
            `choices`; `record.line.number` counts requests from 1. A wrong request
            gives a record with `error` set. Closing the generator ends the run early. Events of
            requests that were added meanwhile are left for `step`.

        Raises:
            UsageError: an earlier run is not finished, or `requests` is one text or request.
        """
        if isinstance(requests, str | Mapping):
            raise UsageError("requests is one request; give a list, such as [request]")
        parsed = (self.make_request(r) if isinstance(r, str) else r for r in requests)
        if answer is None:
            yield from self.runs.run(parsed, read_ahead)
            return
        reader = AnswerReader(answer)
        with closing(
            self.runs.run(map(reader.ask_for_type, parsed), read_ahead)
        ) as records:
            yield from map(reader.read, records)

    def stop(self, grace_s: float) -> None:
        """End the run in good order: no more lines, and rows that run have so long to end.

        The run then raises StoppedError. It may be called from a signal handler.
        """
        self.runs.stop(grace_s)

    @property
    def stats(self) -> EngineStats:
        """What was counted since the engine was made."""
        return self._core.stats

    @property
    def num_waiting(self) -> int:
        """As in the state, and cheaper. Any thread may ask."""
        return self._core.num_waiting

    @property
    def state(self) -> EngineState:
        """What waits and runs at the moment. Any thread may ask."""
        return self._core.state

    @property
    def facts(self) -> PipelineProperties:
        """The properties of the processes that compute."""
        return self._computing.facts

    @property
    def traits(self) -> EngineTraits:
        """What a job's progress depends on."""
        facts = self.facts
        pace: Pace = "cuda" if self.device.type == "cuda" else "cpu"
        return EngineTraits(
            "streamed" if facts.streaming else pace,
            facts.num_stages,
            facts.num_ranks,
            facts.measured.num_threads if facts.is_alone else 0,
            gives_vectors=self.intake.limits.vectors is not None,
        )

    @property
    def device(self) -> torch.device:
        return torch.device(self.facts.device)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and hidden states."""
        dtype: torch.dtype = getattr(torch, self.facts.dtype)
        return dtype

    @property
    def pipeline(self) -> OnePipeline:
        """The pipeline that computes.

        Raises:
            UsageError: there are several, in processes of their own.
        """
        if isinstance(self._computing, OnePipeline):
            return self._computing
        raise UsageError("several pipelines compute for this engine")

    @property
    def memory(self) -> list[RankMemory]:
        """The peak memory of each rank so far, beside its forecast. Any thread may ask.

        Other ranks report theirs twice a second, and when the engine closes.
        """
        return self._computing.memory

    @property
    def warnings(self) -> dict[str, int]:
        """Warnings about requests that were answered, and how often each occurred."""
        return self.intake.warnings.to_dict()

    def close(self) -> None:
        """End all computing and free its memory. The engine cannot be used afterwards."""
        self._is_closed = True
        if self._kept is not None:
            self._kept.close()
            atexit.unregister(self._kept.close)
        self._computing.close()


def _open_kept_answers(
    plan: RunPlan, folder: str | None, max_bytes: int | None
) -> AnswerIndex | None:
    """Return the answers that a folder keeps; None: there is no folder.

    Raises:
        UsageError: it is no folder, or the size is too small.
    """
    kept = KeptAnswers(
        result_cache=None if folder is None else Path(folder),
        result_cache_bytes=max_bytes,
    )
    kept.check()
    if kept.cache_place is None:
        return None  # a fingerprint reads of every tensor
    index = open_answer_index(plan.fingerprint(), kept.cache_place, log.warning)
    assert index is not None, "there is a place"
    # evaluators close no engine, and the last answers are not written yet when they end
    atexit.register(index.close)
    return index
