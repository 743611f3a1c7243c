"""One check: files in, a report out; wrong lines are told as they are met.

It knows options and paths; what a line means is the engine's to say.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from tqdm import tqdm

from fminfer.compute.registry import find_library
from fminfer.contract.record import Record
from fminfer.core.config import EngineConfig
from fminfer.core.option import options_of
from fminfer.engine.answer import AnswerForm
from fminfer.engine.loop import EngineLoop
from fminfer.engine.start import Starter
from fminfer.estimate.check_report import CheckReport, FirstPrompt, Work
from fminfer.estimate.cost_model import CostModel
from fminfer.estimate.cost_store import find_costs_path, load_costs
from fminfer.estimate.line_checks import LineChecker
from fminfer.estimate.simulation import PretendPipeline, simulate
from fminfer.files.line_reader import count_rows, read_lines
from fminfer.models.checkpoint import Checkpoint
from fminfer.models.known_sizes import folder_of
from fminfer.models.weight_headers import check_tensors
from fminfer.plan.machine_facts import Machine, find_machine
from fminfer.plan.opening import open_model
from fminfer.plan.planning import make_plan
from fminfer.runtime.build.assembly import build_loop, load_tokenizer, make_intake
from fminfer.runtime.lines.line_intake import LineIntake
from fminfer.runtime.lines.runner import LOOKAHEAD, WINDOW
from fminfer.text.tokenizer import Tokenizer

# The options on which the time of steps depends.
OF_COSTS = (
    "model",
    "random_init",
    "model_config",
    "dtype",
    "quantize",
    "kv_dtype",
    "device",
    "kernels",
    "threads",
)


class Check:
    """A model, opened as far as its config and tokenizer, and what a run of it would allow.

    Args:
        machine: over how many processes it will be spread, and whether devices are planned.
        has_weights: otherwise a folder needs no weights.

    Raises:
        FminferError: the model does not run, or not so.
    """

    def __init__(self, config: EngineConfig, machine: Machine, *, has_weights: bool = True) -> None:
        self._config = config
        self._checkpoint: Checkpoint = open_model(config, has_weights=False)
        if folder_of(config.model) is not None:  # else the hub still has them
            check_tensors(self._checkpoint, has_weights=has_weights)
        self._tokenizer: Tokenizer = load_tokenizer(config, self._checkpoint)
        size = machine.num_stages * machine.num_shards
        machine = find_machine(config, replace(machine, local_size=size))
        self._plan = plan = make_plan(config, self._checkpoint, machine)
        # Without room no line is judged by it: the plan says what is wrong.
        self._num_blocks = (plan.num_kv_tokens or plan.most_kv_tokens) // config.block_size
        self._intake = make_intake(config, self._checkpoint, self._tokenizer, self._num_blocks)
        self._limits = self._intake.limits

    def run(
        self, inputs: Sequence[Path], on_wrong: Callable[[Record], None], *, is_quiet: bool
    ) -> CheckReport:
        """Check every line of the inputs.

        Args:
            on_wrong: told of each line that cannot be answered.
            is_quiet: show no bar.
        """
        config = self._config
        intake = self._intake
        checker = LineChecker(
            LineIntake(intake),
            self._build_loop(),
            has_prefix_cache=config.prefix_cache,
            on_wrong=on_wrong,
        )
        sizes = [count_rows(path) for path in inputs]
        total = None if None in sizes else sum(size or 0 for size in sizes)
        lines = chain.from_iterable(read_lines(path, source) for source, path in enumerate(inputs))
        for line in tqdm(
            lines, "check", total, unit=" lines", disable=is_quiet or None, leave=False
        ):
            checker.add(line)
        return CheckReport(
            self._plan,
            [*map(str, inputs)],
            checker.counts,
            intake.warnings.to_dict(),
            self._show_first(checker, inputs),
            self._predict(checker, LOOKAHEAD if total is None else WINDOW),
        )

    def _build_loop(self) -> EngineLoop:
        plan = self._plan
        return build_loop(
            self._config,
            Starter(
                self._tokenizer, self._limits.eos_ids, self._config.seed, self._limits.vocab_size
            ),
            PretendPipeline(self._config.block_size),
            AnswerForm(self._tokenizer, self._config.token_format),
            sizes=plan.sizes,
            num_blocks=self._num_blocks,
            num_stages=plan.machine.num_stages,
            micro_batches=plan.micro_batches,
            has_memories=self._checkpoint.model.encoder is not None,
            most_read=plan.most_read(plan.room_bytes - plan.own.takes.total(plan.num_kv_tokens)),
        )

    def _show_first(self, checker: LineChecker, inputs: Sequence[Path]) -> FirstPrompt | None:
        if checker.first is None:
            return None
        line, ids = checker.first[0], checker.first[1].ids_to_read or checker.first[1].ids
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        return FirstPrompt(str(inputs[line.source]), line.number, text, len(ids))

    def _predict(self, checker: LineChecker, read_ahead: int) -> Work:
        counts = checker.counts
        is_whole = len(checker.sample) == counts.num_right
        found = simulate(
            iter(checker.sample),
            self._tokenizer,
            self._limits,
            sizes=self._plan.sizes,
            num_blocks=self._num_blocks,
            num_stages=self._plan.machine.num_stages,
            read_ahead=read_ahead,
            is_only_run=is_whole,  # a part says nothing of the file's end
            has_memories=self._checkpoint.model.encoder is not None,
        )
        scale = 1.0
        if not is_whole and checker.num_sample_tokens:
            scale = counts.tokens_to_compute / checker.num_sample_tokens
        steps = found.scaled(scale)
        costs, why_not = self._find_costs()
        step_s = 0.0 if costs is None else costs.predict_s(steps.costs)
        num_blocks = found.num_blocks_used
        if self._config.prefix_cache:  # it keeps blocks of rows that ended until others need them
            num_blocks = min(self._num_blocks, round(num_blocks * scale))
        return Work(
            num_steps=round(steps.num_steps),
            max_rows_running=found.stats.max_rows_running,
            num_kv_tokens=num_blocks * self._config.block_size,
            seconds=None if costs is None else costs.whole_run * step_s,
            seconds_range=None
            if costs is None
            else (min(costs.whole_runs) * step_s, max(costs.whole_runs) * step_s),
            why_not=why_not,
            sample_lines=0 if is_whole else len(checker.sample),
        )

    def _find_costs(self) -> tuple[CostModel | None, str]:
        """Return what steps cost here, or why that is not known."""
        machine = self._plan.machine
        if self._checkpoint.model.encoder is not None:
            return None, "that of models with an encoder cannot be yet"
        if machine.device_bytes is not None:
            return None, "steps are timed on the machine that runs them"
        if machine.num_stages * machine.num_shards * machine.num_pipelines > 1:
            return None, "that of several processes cannot be yet"
        kernels, device = self._config.kernels, self._plan.device
        has_kernel = find_library(kernels, device) is not None
        if device.type != "cpu":  # as a run will find it, but that a GPU refuses the kernel
            has_kernel = kernels != "off"
        path = find_costs_path(self._plan, has_kernel=has_kernel)
        costs = None if path is None else load_costs(path)
        return costs, "" if costs is not None else _how_to_calibrate(self._config)


def _how_to_calibrate(config: EngineConfig) -> str:
    """Say which command times the steps of such runs."""
    told = {
        each.told: (getattr(config, n), each.default)
        for n, each in options_of(EngineConfig).items()
        if n in OF_COSTS
    }
    given = [
        f" {flag} {shlex.quote(str(v))}" for flag, (v, default) in told.items() if v != default
    ]
    command = f"fminfer bench --calibrate{''.join(given)}"
    return f"first time the model's steps on this machine, in about a minute: {command}"
