"""What servers would do with the lines of files: checked here, and tried there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import orjson

from fminfer.client.dialects import Dialect
from fminfer.client.remote_engine import RemoteEngine, check_choices
from fminfer.client.remote_options import RemoteOptions
from fminfer.client.remote_request import RemoteRequest
from fminfer.contract.record import Record
from fminfer.core.config import EngineConfig
from fminfer.core.quantities import list_few, with_noun
from fminfer.engine.engine_core import Failed
from fminfer.files.line_reader import read_lines
from fminfer.files.tables.table_options import RowRequests
from fminfer.runtime.bars import say
from fminfer.runtime.lines.line_intake import LineIntake, LineRequest

MAX_SETS = 64  # of fields, that are tried
NUM_NAMED = 10  # fields of a set
# Fields that bound an answer from below or above, and their values in a trial.
BOUNDS = {
    "max_tokens": 1,
    "max_completion_tokens": 1,
    "min_tokens": 0,
    "n": 1,
    "best_of": 1,
}
# Not worth a set of their own.
CONTENTS = {"prompt", "messages", "input"}


@dataclass(slots=True)
class FieldSet:
    """Lines that ask an endpoint by the same fields."""

    endpoint: str
    fields: list[str]
    num_lines: int = 0
    first_line: int = 0
    refusal: str = ""  # of the server; "": it answers
    is_tried: bool = False


@dataclass(slots=True)
class RemoteReport:
    """What a check of servers has met."""

    model: str
    servers: list[str]
    server_kind: str
    num_lines: int = 0
    num_wrong: int = 0
    num_requests: int = 0  # that the trial has cost
    sets: list[FieldSet] = field(default_factory=list)
    warnings: dict[str, int] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        """Whether no line was refused, here or there."""
        return not self.num_wrong and not any(each.refusal for each in self.sets)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        """Return the report for people."""
        lines = [
            f"model     {self.model} ({self.server_kind} at {', '.join(self.servers)})",
            f"lines     {self.num_lines:,}, {self.num_wrong:,} wrong",
            f"trial     {with_noun(self.num_requests, 'request')} of one token, one for each "
            "set of fields",
        ]
        for each in self.sets:
            names = list_few(each.fields, NUM_NAMED) or "no field"
            verdict = f"refused: {each.refusal}" if each.refusal else "answered"
            lines.append(
                f"fields    {each.endpoint}, {with_noun(each.num_lines, 'line')} from line "
                f"{each.first_line}: {names}: {verdict if each.is_tried else 'not tried'}"
            )
        lines += [
            f"warning   {text} ({with_noun(num_rows, 'row')})"
            for text, num_rows in self.warnings.items()
        ]
        return "\n".join(lines)


class RemoteCheck:
    """Finds servers, and checks lines of files for them."""

    def __init__(self, config: EngineConfig, options: RemoteOptions) -> None:
        self._urls = options.urls
        self._engine = RemoteEngine.connect(config, options, say)
        self._engine.trust_servers()  # what they refuse is told

    def run(
        self,
        inputs: list[Path],
        row_requests: RowRequests,
        add_error: Callable[[Record], None],
    ) -> RemoteReport:
        """Check lines as a run would, and try one token for each set of their fields."""
        facts = self._engine.facts
        intake = self._engine.intake
        report = RemoteReport(facts.model, self._urls, facts.kind)
        check_choices(row_requests.table, facts)
        row_template = row_requests.make_template(intake.choose_text_field, inputs)
        sets: dict[tuple[str, ...], FieldSet] = {}
        trials: dict[int, FieldSet] = {}
        line_intake = LineIntake(intake)
        for line in chain.from_iterable(
            read_lines(path, source, row_template=row_template)
            for source, path in enumerate(inputs)
        ):
            report.num_lines += 1
            opened = line_intake.open(line)
            if isinstance(opened, Record):
                report.num_wrong += 1
                add_error(opened)
                continue
            request = _require_remote(opened)
            body = orjson.loads(request.body)
            key = (request.endpoint, *sorted(body.keys() - CONTENTS))
            if key not in sets:
                sets[key] = FieldSet(
                    request.endpoint, [*key[1:]], first_line=line.number
                )
                if len(sets) <= MAX_SETS:
                    trials[
                        self._engine.add(_make_trial(request, body, intake.dialect))
                    ] = sets[key]
            sets[key].num_lines += 1
        report.num_requests = len(trials)
        self._try_requests(trials)
        report.sets = [*sets.values()]
        report.warnings = self._engine.warnings
        return report

    def _try_requests(self, trials: dict[int, FieldSet]) -> None:
        with closing(self._engine) as engine:
            while engine.has_work:
                for event in engine.step():
                    fields = trials[event.request_id]
                    fields.is_tried = True
                    if isinstance(event, Failed):
                        fields.refusal = event.error.message


def _require_remote(opened: LineRequest) -> RemoteRequest:
    request = opened.prepared
    assert isinstance(request, RemoteRequest), "servers' intake opened it"
    return request


def _make_trial(
    request: RemoteRequest, body: dict[str, Any], dialect: Dialect
) -> RemoteRequest:
    """Return a request that costs one token."""
    most_name = dialect.find_name(request.endpoint, "max_tokens")
    if most_name is not None:
        body = {most_name: 1} | body
    bounds = {name: most for name, most in BOUNDS.items() if name in body}
    params = replace(request.params, n=1, best_of=1)
    trial = orjson.dumps(body | bounds)
    return replace(request, body=trial, params=params, constraint=None)
