"""One rank: it loads the model, builds the stage, and on rank 0 runs the engine.

`Engine` is the public Python API; the command line stands on it too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fminfer.config import EngineConfig
from fminfer.decode_attention import PartialAttention
from fminfer.engine.answer import AnswerForm
from fminfer.engine.blocks import BlockPool
from fminfer.engine.intake import Intake, Limits
from fminfer.engine.loop import EngineLoop
from fminfer.engine.prefix import PrefixCache
from fminfer.engine.scheduler import Scheduler
from fminfer.engine.stats import EngineStats
from fminfer.errors import CheckpointError, UsageError
from fminfer.input.lines import Line
from fminfer.models.checkpoint import Checkpoint, load_model, open_checkpoint, open_random
from fminfer.output.records import Record
from fminfer.pipeline.local import LocalPipeline
from fminfer.pipeline.stage import Stage, kv_shape
from fminfer.placement import auto_budget, choose_device, choose_dtype
from fminfer.tokenizer import Tokenizer


class Engine:
    """Answers completions requests with one model.

        engine = fminfer.Engine("path/to/model")
        for record in engine.run([{"prompt": "Hello", "max_tokens": 5}]):
            print(record.to_dict())

    Args:
        model: a folder or hub id; None is the demo model of the package.
        on_progress: called with (bytes read, bytes in all) while weights load.
        options: the other fields of `EngineConfig`.

    Raises:
        CheckpointError: the model cannot be loaded.
        UsageError: an option that cannot be.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        **options: Any,
    ) -> None:
        started = time.perf_counter()
        self.config = config = EngineConfig(model=model, **options)
        self.device = choose_device(config.device)
        if config.random_init is not None:
            checkpoint = open_random(config.random_init)
        else:
            checkpoint = open_checkpoint(config.model)
        _check_model_type(config.model_type, str(checkpoint.config.model_type))
        self.model_name = checkpoint.name
        self.context_length = checkpoint.context_length  # most tokens of prompt and completion
        self.tokenizer = _load_tokenizer(checkpoint, config)
        self.dtype = choose_dtype(config.dtype, checkpoint.config.dtype, self.device)
        network = load_model(
            checkpoint,
            dtype=self.dtype,
            device=self.device,
            seed=config.seed,
            on_progress=on_progress,
        )
        self.weight_bytes = sum(p.nbytes for p in network.parameters())
        num_blocks = self._count_blocks(checkpoint)
        stage = Stage(
            network,
            checkpoint.family,
            num_blocks=num_blocks,
            block_size=config.block_size,
            partial=PartialAttention(config.attention, self.device),
        )
        self._pipeline = LocalPipeline(stage.run)
        self._loop = self._build_loop(checkpoint, num_blocks)
        self.load_s = time.perf_counter() - started

    @property
    def stats(self) -> EngineStats:
        """What was counted since the engine was made."""
        return self._loop.stats

    @property
    def warnings(self) -> dict[str, int]:
        """What was strange about requests that were answered all the same, and how often."""
        return dict(self._intake.warnings)

    def run(self, requests: Iterable[Mapping[str, Any] | Line]) -> Generator[Record, None, None]:
        """Answer requests, reading them as room for them appears.

        Args:
            requests: dicts with the fields of a completions request, or input lines.

        Yields:
            one Record a request, in the order in which they finish; `record.line.number` counts the
            requests from 1. A request that is wrong gives a record with `error` set. Closing the
            generator ends the run early.

        Raises:
            UsageError: a request that JSON cannot hold, or an earlier run that is not finished.
        """
        return self._loop.run(_as_lines(requests))

    def close(self) -> None:
        """End the stage's thread. The engine cannot be used afterwards."""
        self._pipeline.close()

    def _count_blocks(self, checkpoint: Checkpoint) -> int:
        config = self.config
        kv_heads, head_dim = kv_shape(checkpoint.config)
        layers = checkpoint.config.num_hidden_layers
        self.kv_bytes_per_token = 2 * layers * kv_heads * head_dim * self.dtype.itemsize
        budget = config.budget
        if budget is None:
            context_blocks = -(-checkpoint.context_length // config.block_size)
            most = config.max_rows * context_blocks * config.block_size
            budget = auto_budget(self.kv_bytes_per_token, most, self.device)
        return -(-budget // config.block_size)

    def _build_loop(self, checkpoint: Checkpoint, num_blocks: int) -> EngineLoop:
        config = self.config
        limits = Limits(
            checkpoint.context_length,
            checkpoint.config.vocab_size,
            config.max_logprobs,
            _ends(checkpoint, self.tokenizer),
            config.on_too_long,
            config.strict,
            _model_names(config, checkpoint.name),
        )
        self._intake = Intake(self.tokenizer, limits, config.seed)
        pool = BlockPool(num_blocks, config.block_size)
        scheduler = Scheduler(
            pool,
            chunk_size=config.chunk_size,
            max_rows=config.max_rows,
            micro_batches=config.micro_batches,
            cache=PrefixCache(pool) if config.prefix_cache else None,
        )
        return EngineLoop(
            self._intake,
            scheduler,
            self._pipeline,
            AnswerForm(self.tokenizer, self.model_name, config.token_format),
            micro_batches=config.micro_batches,
            kv_capacity=num_blocks * config.block_size,
        )


def _load_tokenizer(checkpoint: Checkpoint, config: EngineConfig) -> Tokenizer:
    if checkpoint.folder is not None:
        return Tokenizer.load(checkpoint.folder)
    if checkpoint.config.vocab_size < 256:
        raise CheckpointError(
            f"{checkpoint.name} has a vocabulary of {checkpoint.config.vocab_size}; random weights "
            "are used with a tokenizer of bytes, which needs at least 256"
        )
    return Tokenizer(None)


def _model_names(config: EngineConfig, name: str) -> frozenset[str] | None:
    """Return what a line may call the model: as the run was told, or the last part of that.

    None: it may say anything.
    """
    if not config.check_model:
        return None
    asked = config.model or config.random_init
    return frozenset({name} if asked is None else {asked, Path(asked).name})


def _ends(checkpoint: Checkpoint, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids that end a sequence: the config's, or else the tokenizer's."""
    if checkpoint.eos_ids or tokenizer.eos_id is None:
        return checkpoint.eos_ids
    return frozenset({tokenizer.eos_id})


def _check_model_type(name: str | None, of_config: str) -> None:
    """Refuse a model type that is not the config's; old spellings (gptneox, gpt-j) are known."""
    plain = (name or "").replace("_", "").replace("-", "").lower()
    if name is not None and plain != of_config.replace("_", ""):
        raise UsageError(
            f"--model-type {name} clashes with the model's config, which says {of_config}; "
            "leave the flag out"
        )


def _as_lines(requests: Iterable[Mapping[str, Any] | Line]) -> Iterator[Line]:
    for number, request in enumerate(requests, start=1):
        if isinstance(request, Line):
            yield request
        elif isinstance(request, Mapping):
            try:
                raw = json.dumps(dict(request)).encode()  # nan stays nan, and is refused by name
            except (TypeError, ValueError, RecursionError) as error:
                raise UsageError(f"request {number} is no JSON: {error}") from error
            yield Line(0, number, raw)
        else:
            raise UsageError(f"request {number} is a {type(request).__name__}; give dicts")
