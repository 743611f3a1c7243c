"""One check: files in, a report out; wrong lines are told as they are met."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from pathlib import Path

from tqdm import tqdm

from fminfer.contract.envelope import Line
from fminfer.contract.record import Record
from fminfer.core.config import EngineConfig, StepSizes
from fminfer.core.errors import UsageError
from fminfer.core.option import options_of
from fminfer.engine.answer import AnswerStyle
from fminfer.engine.intake import Intake
from fminfer.engine.loop import EngineLoop
from fminfer.engine.start import RequestStarter
from fminfer.engine.stats import EngineStats
from fminfer.estimate.check_report import CheckReport, FirstPrompt, Work
from fminfer.estimate.cost_model import CostModel, find_costs_path, load_costs
from fminfer.estimate.line_checks import SAMPLE_TOKENS, LineChecker, LineCounts
from fminfer.estimate.measured_roofs import measure_roofs
from fminfer.estimate.run_plans import PlannedRun, PlanReport, plan_runs
from fminfer.estimate.simulation import LongestRows, PretendPipeline, average_of
from fminfer.files.line_reader import count_lines, read_lines, sum_counts
from fminfer.files.tables.table_options import RowRequests
from fminfer.forward.registry import find_library
from fminfer.models.checkpoint import Checkpoint, open_model
from fminfer.models.known_sizes import find_model_folder
from fminfer.models.origins import check_tensors
from fminfer.plan.machine_facts import Machine, find_machine
from fminfer.plan.pass_time import describe_passes, predict_load, predict_run
from fminfer.plan.planning import make_plan
from fminfer.plan.roofs import ASSUMED_DISK_RATE, PlanOptions, Roofs
from fminfer.plan.run_plan import RunPlan
from fminfer.runtime.lines.line_intake import LineIntake, RecordForm
from fminfer.runtime.lines.runner import LOOKAHEAD, WINDOW, LineRunner
from fminfer.runtime.load.assembly import build_loop, load_tokenizer, make_intake
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
    "same_answers",
    "threads",
)


class Check:
    """A model, opened as far as its config and tokenizer, and what a run of it would allow.

    Args:
        plan_options: the devices to plan for. With --plan, their memory judges no line.
        device_bytes: of --device-memory.
        has_weights: otherwise a folder needs no weights.
        kept: names of options that were given, which all plans keep.
    """

    def __init__(
        self,
        config: EngineConfig,
        plan_options: PlanOptions,
        device_bytes: int | None,
        *,
        has_weights: bool,
        kept: Collection[str],
    ) -> None:
        if plan_options.device_kind == "this" and device_bytes is not None:
            raise UsageError(
                "--device-kind this and --device-memory contradict each other; give one of them"
            )
        self._config = config
        self._plan_options = plan_options
        self._kept = kept
        self._checkpoint: Checkpoint = open_model(config, has_weights=False)
        if find_model_folder(config.model) is not None:  # else the hub still has them
            check_tensors(self._checkpoint, has_weights=has_weights)
        self._tokenizer: Tokenizer = load_tokenizer(config, self._checkpoint)
        known = plan_options.known
        machine = Machine(
            num_stages=config.num_stages,
            num_shards=config.tensor_parallel_size,
            num_pipelines=config.data_group_size,
            local_size=config.num_stages * config.tensor_parallel_size,
            device_bytes=device_bytes or (known.device_bytes if known else None),
            host_free=plan_options.host_bytes or (known.host_bytes if known else None),
        )
        machine = find_machine(config, machine)
        self._plan = plan = make_plan(config, self._checkpoint, machine)
        if (rates := plan_options.rate_flags) and not (
            plan_options.is_plan or self._streams
        ):
            raise UsageError(
                f"{', '.join(rates)}: rates count with --plan, or if layers are streamed "
                "(--offload). Add --plan, or leave them out"
            )
        # Without room no line is judged by it: the plan says what is wrong.
        num_tokens = plan.most_kv_tokens if plan_options.is_plan else plan.num_kv_tokens
        self._num_blocks = (num_tokens or plan.most_kv_tokens) // config.block_size
        self._intake = make_intake(
            config, self._checkpoint, self._tokenizer, self._num_blocks
        )
        self._limits = self._intake.limits
        # What `run` finds out of the lines, to simulate their steps.
        self._sample: list[Line] = []
        self._is_whole = True
        self._scale = 1.0
        self._read_ahead = WINDOW
        self._simulate = cache(self._simulate_lines)

    def run(
        self,
        inputs: Sequence[Path],
        on_wrong: Callable[[Record], None],
        *,
        is_quiet: bool,
        row_requests: RowRequests | None = None,
    ) -> CheckReport:
        """Check every line of the inputs, and plan their run as is asked for."""
        config = self._config
        intake = self._intake
        template = (
            None
            if row_requests is None
            else row_requests.make_template(intake.choose_text_field, inputs)
        )
        checker = LineChecker(
            LineIntake(intake),
            self._build_loop(
                RequestStarter,
                PretendPipeline(config.block_size),
                self._plan.sizes,
                self._num_blocks,
                self._plan.machine.num_stages,
            ),
            has_prefix_cache=config.prefix_cache,
            on_wrong=on_wrong,
        )
        total = sum_counts(
            [count_lines(path, row_template=template) for path in inputs]
        )
        lines = chain.from_iterable(
            read_lines(path, source, row_template=template)
            for source, path in enumerate(inputs)
        )
        for line in tqdm(
            lines, "check", total, unit=" lines", disable=is_quiet or None, leave=False
        ):
            checker.add(line)
        counts = checker.counts
        self._sample = checker.sample
        self._is_whole = len(checker.sample) == counts.num_right
        self._read_ahead = LOOKAHEAD if total is None else WINDOW
        if not self._is_whole and checker.num_sample_tokens:
            self._scale = counts.tokens_to_compute / checker.num_sample_tokens
        report = CheckReport(
            self._plan,
            [*map(str, inputs)],
            counts,
            intake.warnings.to_dict() | self._warn_of_tokenizer(counts.num_lines),
            self._show_first(checker, inputs),
            self._predict(),
        )
        return self._compare(report)

    @property
    def _streams(self) -> bool:
        return any(rank.streamed for rank in self._plan.ranks)

    def _compare(self, report: CheckReport) -> CheckReport:
        """Add to a report the other plans, or what a pass with streamed layers takes."""
        plan = self._plan
        plan_options = self._plan_options
        device_bytes = self._plan.machine.device_bytes
        if plan_options.is_plan and not report.counts.num_right:
            return replace(
                report, why_no_plan="no line is right, so there is nothing to run"
            )
        is_this = plan_options.is_this(device_bytes)
        roofs = None
        is_known = (
            is_this or plan_options.known is not None or bool(plan_options.rate_flags)
        )
        if plan_options.is_plan or (self._streams and is_known):
            roofs = plan_options.roofs_of(
                measure_roofs(plan) if is_this else plan_options.known, device_bytes
            )
        if not plan_options.is_plan or roofs is None:
            return replace(report, passes=describe_passes(plan, roofs))
        if self._checkpoint.model.encoder is not None:
            raise UsageError(
                "--plan predicts decoders, but this model has an encoder; leave --plan out"
            )
        plan_one = partial(self._plan_one, counts=report.counts, roofs=roofs)
        runs = plan_runs(self._config, roofs, plan_one, kept=self._kept)
        kind: str = (
            "this machine's device"
            if is_this
            else plan_options.device_kind or "devices"
        )
        if (
            is_this
            and plan_options.disk_rate is None
            and roofs.disk_rate == ASSUMED_DISK_RATE
        ):
            kind += " (no weights are here: its disk is assumed)"
        return replace(report, plans=PlanReport(kind, runs, roofs))

    def _plan_one(
        self, config: EngineConfig, counts: LineCounts, roofs: Roofs
    ) -> PlannedRun:
        """Plan one of the ways to run the lines, and predict its times if it fits."""
        machine = replace(
            self._plan.machine,
            num_stages=config.num_stages,
            num_shards=config.tensor_parallel_size,
            num_pipelines=-(-config.data_group_size // roofs.num_nodes),  # of a node
            local_size=min(
                config.num_stages * config.tensor_parallel_size, roofs.num_devices
            ),
            host_free=roofs.host_bytes,
        )
        try:
            plan = make_plan(config, self._checkpoint, machine)
        except UsageError as error:
            return PlannedRun(config, why_not=str(error))
        if plan.shortage:
            return PlannedRun(config, plan, "more memory is needed")
        if plan.num_kv_tokens < counts.longest_row:
            return PlannedRun(
                config, plan, "the KV cache is too small for the longest row"
            )
        most = min(counts.reserved_tokens, 2 * SAMPLE_TOKENS + counts.longest_row)
        # a larger KV cache is of no use
        most += 2 * counts.num_sequences * config.block_size
        num_blocks = min(most, plan.num_kv_tokens) // config.block_size
        steps, stats = self._simulate(
            config.data_group_size, plan.sizes, num_blocks, config.num_stages
        )
        most_rows = stats.max_rows_running
        loads = [
            (average_of(each), each[0]) for each in steps.parts(self._scale, most_rows)
        ]
        seconds, bound = predict_run(plan, loads, most_rows, roofs)
        costs, _ = self._find_costs(plan)
        if costs is not None:
            seconds = costs.whole_run * costs.predict_s(
                steps.scaled(self._scale, most_rows)
            )
            bound = "as calibrated"
        num_tokens = counts.tokens_to_draw or counts.tokens_to_compute
        return PlannedRun(
            config,
            plan,
            load_s=predict_load(plan, roofs),
            run_s=seconds,
            ms_token=1e3 * seconds / max(1.0, num_tokens),
            bound=bound,
        )

    def _warn_of_tokenizer(self, num_lines: int) -> dict[str, int]:
        """Warn of files that disagree, and of tokens that are counted by bytes."""
        config = self._config
        texts = [self._tokenizer.note]
        if (
            config.random_init
            and not config.tokenizer
            and not config.skip_tokenizer_init
        ):
            texts.append(
                "--random-init counts a token for each byte, about four times too many; give "
                "the model's own --tokenizer"
            )
        return {text: num_lines for text in texts if text and num_lines}

    def _build_loop(
        self,
        starter: type[RequestStarter],
        pipeline: PretendPipeline,
        sizes: StepSizes,
        num_blocks: int,
        num_stages: int,
    ) -> EngineLoop:
        config = self._config
        plan = self._plan
        limits = self._limits
        return build_loop(
            config,
            starter(self._tokenizer, limits.eos_ids, config.seed, limits.vocab_size),
            pipeline,
            AnswerStyle(self._tokenizer, config.token_format),
            sizes=sizes,
            num_blocks=num_blocks,
            num_stages=num_stages,
            most_read=plan.most_read(
                plan.room_bytes - plan.this_rank.takes.total(plan.num_kv_tokens)
            ),
        )

    def _show_first(
        self, checker: LineChecker, inputs: Sequence[Path]
    ) -> FirstPrompt | None:
        if checker.first is None:
            return None
        line, prompt = checker.first
        ids = prompt.ids_to_read or prompt.ids
        prepared = prompt.owner.prepared
        thought = prepared.params.thought
        return FirstPrompt(
            file=str(inputs[line.source]),
            line=line.number,
            text=self._tokenizer.decode(ids, skip_special_tokens=False),
            num_ids=len(ids),
            closing_tag=None if thought is None else thought.form.closing,
            tool_parser=prepared.tool_parser,
        )

    def _simulate_lines(
        self, num_pipelines: int, sizes: StepSizes, num_blocks: int, num_stages: int
    ) -> tuple[PretendPipeline, EngineStats]:
        """Answer one pipeline's part of the lines without a model; all pipelines share them."""
        config = self._config
        pipeline = PretendPipeline(self._config.block_size)
        loop = self._build_loop(LongestRows, pipeline, sizes, num_blocks, num_stages)
        runner = LineRunner(
            loop,
            LineIntake(Intake(self._tokenizer, self._limits)),
            RecordForm("", 0),
            engine=loop,
            read_ahead=self._read_ahead,
            has_long_steps=sizes.micro_batches > 0,
            joins_equal=config.prefix_cache,
            is_only_run=self._is_whole,  # a part says nothing of the file's end
        )
        for record in runner.run(iter(self._sample[::num_pipelines])):
            assert record.error is None, record.error
        return pipeline, loop.stats

    def _predict(self) -> Work:
        plan = self._plan
        scale = self._scale
        simulated, stats = self._simulate(
            1, plan.sizes, self._num_blocks, plan.machine.num_stages
        )
        steps = simulated.scaled(scale, stats.max_rows_running)
        costs, why_not = self._find_costs(plan)
        seconds = None
        seconds_range = None
        if costs is not None:
            step_s = costs.predict_s(steps)
            seconds = costs.whole_run * step_s
            seconds_range = (
                min(costs.whole_runs) * step_s,
                max(costs.whole_runs) * step_s,
            )
        num_blocks = simulated.num_blocks_used
        # it keeps blocks of rows that ended until others need them
        if self._config.prefix_cache:
            num_blocks = min(self._num_blocks, round(num_blocks * scale))
        return Work(
            num_steps=round(steps[0]),
            max_rows_running=stats.max_rows_running,
            num_kv_tokens=num_blocks * self._config.block_size,
            seconds=seconds,
            seconds_range=seconds_range,
            why_not=why_not,
            sample_lines=0 if self._is_whole else len(self._sample),
        )

    def _find_costs(self, plan: RunPlan) -> tuple[CostModel | None, str]:
        """Return what a plan's steps cost here, or why that is not known."""
        machine = plan.machine
        if self._checkpoint.model.encoder is not None:
            return None, "that of models with an encoder cannot be yet"
        if machine.device_bytes is not None:
            return None, "steps are timed on the machine that runs them"
        if machine.num_stages * machine.num_shards * machine.num_pipelines > 1:
            return None, "that of several processes cannot be yet"
        if any(rank.streamed for rank in plan.ranks):
            return None, "calibration times no steps with --offload"
        kernels = self._config.kernels
        device = plan.device
        has_kernel = find_library(kernels, device) is not None
        # as a run will find it, but that a GPU refuses the kernel
        if device.type != "cpu":
            has_kernel = kernels != "off"
        path = find_costs_path(plan, has_kernel=has_kernel)
        costs = None if path is None else load_costs(path)
        return costs, "" if costs is not None else _how_to_calibrate(self._config)


def _how_to_calibrate(config: EngineConfig) -> str:
    """Say which command times the steps of such runs."""
    command = "fminfer bench --calibrate"
    for name, each in options_of(EngineConfig).items():
        if name in OF_COSTS and (value := getattr(config, name)) != each.default:
            command += f" {each.told} {shlex.quote(str(value))}"
    return f"first time the model's steps on this machine, in about a minute: {command}"
