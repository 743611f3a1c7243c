"""One check: files in, a report out; wrong lines are told as they are met.

It knows options and paths; what a line means is the engine's to say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from tqdm import tqdm

from fminfer.assembly import build_loop, find_limits, load_tokenizer
from fminfer.check.footprint import Footprint, choose_budget, measure_footprints
from fminfer.check.lines import LineChecker
from fminfer.check.report import CheckReport, FirstPrompt, Work
from fminfer.check.simulation import PretendPipeline, StepCounts, simulate
from fminfer.config import EngineConfig
from fminfer.cost_model import CostModel
from fminfer.cost_store import find_costs_path, load_costs
from fminfer.engine.answer import AnswerForm
from fminfer.engine.intake import Intake, Limits
from fminfer.engine.loop import LOOKAHEAD, EngineLoop
from fminfer.engine.planner import WINDOW
from fminfer.input.lines import count_rows, read_lines
from fminfer.kernel_choice import find_library
from fminfer.loading import open_model
from fminfer.models.checkpoint import Checkpoint
from fminfer.output.records import Record
from fminfer.placement import choose_device, choose_dtype
from fminfer.tokenizer import Tokenizer

CALIBRATE = (
    "time its steps on this machine once, with fminfer bench --calibrate and the same model, dtype "
    "and attention"
)


class Check:
    """A model, opened as far as its config and tokenizer, and what a run of it would allow.

    Args:
        num_stages: processes that share the model's layers.

    Raises:
        FminferError: the model does not run, or not so.
    """

    def __init__(self, config: EngineConfig, num_stages: int) -> None:
        self._config = config
        self._num_stages = num_stages
        self._checkpoint: Checkpoint = open_model(config, has_weights=False)
        self._tokenizer: Tokenizer = load_tokenizer(config, self._checkpoint)
        self._device = choose_device(config.device)
        self._dtype = choose_dtype(config.dtype, self._checkpoint.config.dtype, self._device)
        self._limits: Limits = find_limits(config, self._checkpoint, self._tokenizer)
        self._footprints: list[Footprint] = measure_footprints(
            config, self._checkpoint, num_stages, self._device, self._dtype
        )
        self._sizes = config.step_sizes(self._device.type, num_stages)
        self._num_blocks = choose_budget(config, self._checkpoint, self._footprints, self._device)

    def run(
        self, inputs: Sequence[Path], on_wrong: Callable[[Record], None], *, is_quiet: bool
    ) -> CheckReport:
        """Check every line of the inputs.

        Args:
            on_wrong: told of each line that cannot be answered.
            is_quiet: show no bar.
        """
        config = self._config
        intake = Intake(self._tokenizer, self._limits, config.seed)
        checker = LineChecker(
            self._build_loop(intake), has_prefix_cache=config.prefix_cache, on_wrong=on_wrong
        )
        sizes = [count_rows(path) for path in inputs]
        total = None if None in sizes else sum(size or 0 for size in sizes)
        lines = chain.from_iterable(read_lines(path, source) for source, path in enumerate(inputs))
        for line in tqdm(
            lines, "check", total, unit=" lines", disable=is_quiet or None, leave=False
        ):
            checker.add(line)
        return CheckReport(
            self._checkpoint.name,
            str(self._dtype).removeprefix("torch."),
            self._device.type,
            self._checkpoint.context_length,
            [*map(str, inputs)],
            checker.counts,
            intake.warnings.to_dict(),
            self._show_first(checker, inputs),
            self._footprints,
            self._num_blocks * config.block_size,
            self._predict(checker, LOOKAHEAD if total is None else WINDOW),
        )

    def _build_loop(self, intake: Intake) -> EngineLoop:
        return build_loop(
            self._config,
            intake,
            PretendPipeline(self._config.block_size),
            AnswerForm(self._tokenizer, self._checkpoint.name, self._config.token_format),
            sizes=self._sizes,
            num_blocks=self._num_blocks,
            num_stages=self._num_stages,
        )

    def _show_first(self, checker: LineChecker, inputs: Sequence[Path]) -> FirstPrompt | None:
        if checker.first is None:
            return None
        ids, line = checker.first.ids, checker.first.owner.line
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        return FirstPrompt(str(inputs[line.source]), line.number, text, len(ids))

    def _predict(self, checker: LineChecker, read_ahead: int) -> Work:
        counts = checker.counts
        is_whole = len(checker.sample) == counts.num_right
        found = simulate(
            iter(checker.sample),
            replace(self._config, is_only_run=is_whole),  # a part says nothing of the file's end
            self._tokenizer,
            self._limits,
            sizes=self._sizes,
            num_blocks=self._num_blocks,
            num_stages=self._num_stages,
            read_ahead=read_ahead,
        )
        scale = 1.0
        if not is_whole and checker.num_sample_tokens:
            scale = counts.tokens_to_compute / checker.num_sample_tokens
        steps = found.scaled(scale)
        seconds, why_not = self._predict_s(steps)
        num_blocks = found.num_blocks_used
        if self._config.prefix_cache:  # it keeps blocks of rows that ended until others need them
            num_blocks = min(self._num_blocks, round(num_blocks * scale))
        return Work(
            num_steps=round(steps.num_steps),
            max_rows_running=found.stats.max_rows_running,
            num_kv_tokens=num_blocks * self._config.block_size,
            seconds=seconds,
            why_not=why_not,
            sample_lines=0 if is_whole else len(checker.sample),
        )

    def _predict_s(self, steps: StepCounts) -> tuple[float | None, str]:
        if self._num_stages > 1:
            return None, "that of several processes cannot be yet"
        costs = self._find_costs()
        if costs is None:
            return None, CALIBRATE
        return costs.predict_s(steps.costs), ""

    def _find_costs(self) -> CostModel | None:
        body = self._config.attention
        is_compiled = find_library(body, self._device) is not None
        if self._device.type != "cpu":  # as a run will find it, but that a GPU refuses the kernel
            is_compiled = body != "eager"
        path = find_costs_path(
            self._config,
            self._checkpoint,
            self._device,
            self._dtype,
            has_kernel=is_compiled,
        )
        return None if path is None else load_costs(path)
