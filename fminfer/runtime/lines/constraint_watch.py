"""Measures what probability constraints leave in some rows; warns of odd labels."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product

from fminfer.contract.envelope import Line
from fminfer.contract.labels import read_labels
from fminfer.contract.row_warnings import RowWarning, cut_name
from fminfer.core.config import Constraint
from fminfer.core.messages import ConstraintMass
from fminfer.core.quantities import describe_share, list_few
from fminfer.engine.intake import Intake
from fminfer.engine.sequence import (
    LabelSpelling,
    Observation,
    ObservedMass,
    PreparedRequest,
)
from fminfer.text.grammars import find_grammars
from fminfer.text.spelling import Spelling

NUM_FIRST_ROWS = 50  # of a constraint that are all measured
EVERY = 20  # one of so many later rows is measured
MAX_CONSTRAINTS = 32  # counted by themselves; others together by their kind
NUM_FREE = 5  # likeliest tokens that are measured
NUM_NAMED = 3  # of them, or of labels, that a warning names
NUM_WORST = 5  # rows that are named in the summary
LEAST_MASS = 0.01  # labels with less in the median are warned of
CLEARLY = 2.0  # a spelling with less than so many times the mass is not named
CASES: tuple[Callable[[str], str], ...] = (str, str.lower, str.upper, str.capitalize)
STYLES = [*product(("", " "), CASES)]  # what stands before a label, and its case


def spell_labels(labels: tuple[str, ...]) -> dict[int, tuple[str, ...]]:
    """Return labels in other spellings that tell them apart, by their place in STYLES."""
    spellings = dict[tuple[str, ...], int]()
    for style, (space, change_case) in enumerate(STYLES):
        spelled = tuple(space + change_case(label.lstrip(" ")) for label in labels)
        if spelled != labels and len({*spelled}) == len({*labels}):
            spellings.setdefault(spelled, style)
    return {style: spelled for spelled, style in spellings.items()}


@dataclass(slots=True, frozen=True)
class MeasuredRow:
    """A row of labels that was measured."""

    labels: tuple[str, ...]
    observation: Observation
    observed: ObservedMass


@dataclass(slots=True)
class MassTally:
    """The rows of one constraint, or of many of one kind."""

    observation: Observation | None = None  # of the one
    num_rows: int = 0
    first_rows: list[MeasuredRow] = field(default_factory=list)  # until they are judged
    is_judged: bool = False


class ConstraintWatch:
    """Chooses the rows of a run that are measured, and sums up what was measured."""

    def __init__(self, intake: Intake, name_line: Callable[[Line], str]) -> None:
        self._intake = intake
        self._name_line = name_line
        self._tallies: dict[Constraint | str, MassTally] = {}
        self._num_by_mass = Counter[float]()  # measured rows; masses have three digits
        self._worst: list[tuple[float, str]] = []

    def observe(self, prepared: PreparedRequest) -> PreparedRequest:
        """Return a request that is to be computed, under observation if its turn has come."""
        constraint = prepared.params.constraint
        if constraint is None:
            return prepared
        tally = self._find_tally(constraint)
        tally.num_rows += 1
        if tally.num_rows > NUM_FIRST_ROWS and tally.num_rows % EVERY:
            return prepared
        observation = tally.observation or self._make_observation(constraint)
        if constraint in self._tallies:
            tally.observation = observation
        return replace(prepared, observation=observation)

    def add(
        self, line: Line, prepared: PreparedRequest, observed: ObservedMass
    ) -> None:
        """Count what was measured of a line; warn once the first rows of its labels are in."""
        constraint = prepared.params.constraint
        observation = prepared.observation
        assert constraint is not None and observation is not None, "it was not measured"
        self._num_by_mass[float(f"{observed.mass:.3g}")] += 1
        row = (observed.mass, self._name_line(line))
        self._worst = sorted([*self._worst, row])[:NUM_WORST]

        tally = self._find_tally(constraint)
        labels = _list_labels(constraint)
        if not labels or tally.is_judged:
            return
        tally.first_rows.append(MeasuredRow(labels, observation, observed))
        if len(tally.first_rows) == NUM_FIRST_ROWS:
            tally.is_judged = True
            self._judge_labels(tally.first_rows)
            tally.first_rows = []

    def summarize(self) -> ConstraintMass | None:
        """Return the median and the worst rows; None: no row was measured."""
        num_rows = self._num_by_mass.total()
        if not num_rows:
            return None
        num_left = (num_rows + 1) // 2
        for median in sorted(self._num_by_mass):
            num_left -= self._num_by_mass[median]
            if num_left <= 0:
                break
        worst = {name: mass for mass, name in self._worst}
        return ConstraintMass(num_rows, median, worst)

    def _find_tally(self, constraint: Constraint) -> MassTally:
        key: Constraint | str = constraint
        if constraint not in self._tallies and len(self._tallies) >= MAX_CONSTRAINTS:
            key = constraint.kind
        return self._tallies.setdefault(key, MassTally())

    def _make_observation(self, constraint: Constraint) -> Observation:
        limits = self._intake.limits
        tokenizer = self._intake.tokenizer
        grammars = find_grammars(tokenizer, limits.vocab_size, limits.eos_ids)
        spellings = list[LabelSpelling]()
        for style, labels in spell_labels(_list_labels(constraint)).items():
            label_ids = [grammars.vocabulary(label) for label in labels]
            if all(label_ids):
                first_ids = tuple(sorted({ids[0] for ids in label_ids}))
                spellings.append(LabelSpelling(style, labels, first_ids))
        return Observation(tuple(spellings), NUM_FREE)

    def _judge_labels(self, rows: list[MeasuredRow]) -> None:
        """Warn of labels that the model would hardly write."""
        median = statistics.median(row.observed.mass for row in rows)
        if median >= LEAST_MASS:
            return
        warning = RowWarning(
            f"labels such as {_quote_few(rows[-1].labels)} have "
            f"{describe_share(median)} of the model's probability, in the median of "
            f"the first {len(rows)} rows. Likelier is {self._describe_free(rows)}. "
            f"{_describe_remedy(rows)}"
        )
        if new := self._intake.warnings.add(warning, num_rows=len(rows)):
            self._intake.on_warning(f"Warning: {new}")

    def _describe_free(self, rows: list[MeasuredRow]) -> str:
        """Name the likeliest tokens without the constraint, with their mean probabilities."""
        masses = defaultdict[int, float](float)
        for row in rows:
            for token_id, logprob in row.observed.free_tokens:
                masses[token_id] += math.exp(logprob) / len(rows)
        best = sorted(masses, key=lambda token_id: -masses[token_id])[:NUM_NAMED]
        spelling = Spelling(self._intake.tokenizer, is_text=True)
        return ", ".join(
            f"{_quote(spelling.spell_token(token_id))} ({describe_share(masses[token_id])})"
            for token_id in best
        )


def _list_labels(constraint: Constraint) -> tuple[str, ...]:
    """Return the labels that a constraint allows; none: it is not of labels."""
    if constraint.kind == "labels":
        return read_labels(constraint)[0]
    return (*json.loads(constraint.text),) if constraint.kind == "choice" else ()


def _describe_remedy(rows: list[MeasuredRow]) -> str:
    """Name the likeliest other spelling of labels, if it is clearly likelier."""
    masses = defaultdict[int, list[float]](list)
    for row in rows:
        _, *spelling_masses = row.observed.first_masses
        spellings = row.observation.spellings
        for spelling, mass in zip(spellings, spelling_masses, strict=True):
            masses[spelling.style].append(mass)
    given_mass = statistics.median(row.observed.first_masses[0] for row in rows)
    candidates = [
        (statistics.median(masses[spelling.style]), spelling.labels)
        for spelling in rows[-1].observation.spellings
    ]
    mass, labels = max(candidates, default=(0.0, ()))
    if mass <= CLEARLY * given_mass:
        return "Let the prompt show which answers there are, and how they are written"
    return (
        f"Write them as {_quote_few(labels)}, whose first tokens have "
        f"{describe_share(mass)}"
    )


def _quote(text: str) -> str:
    return json.dumps(cut_name(text), ensure_ascii=False)


def _quote_few(labels: tuple[str, ...]) -> str:
    return list_few([*map(_quote, labels)], NUM_NAMED)
