"""Measures what probability constraints leave in some rows of a run; warns of odd labels."""

from __future__ import annotations

import json
import math
import statistics
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate, product

from fminfer.contract.row_warnings import RowWarning, cut_name
from fminfer.core.config import Constraint
from fminfer.core.messages import ConstraintMass
from fminfer.core.quantities import describe_share, list_few
from fminfer.engine.engine_core import Finished
from fminfer.engine.intake import LineParser
from fminfer.engine.observation import LabelSpelling, Observation, ObservedMass
from fminfer.engine.sequence import PreparedRequest
from fminfer.runtime.lines.line_intake import Answer, LineRequest, NameLine
from fminfer.text.grammars import find_grammars
from fminfer.text.spelling import Spelling

NUM_FIRST_ROWS = 50  # of a constraint that are all measured
SAMPLE_INTERVAL = 20  # one of so many later rows is measured
MAX_SPELLED = 256  # labels that are spelled in other ways, too
MAX_CONSTRAINTS = 32  # counted by themselves; others together by their kind
LEAST_ROWS = 5  # by which a shorter run's labels are judged
NUM_NAMED = 3  # rows, tokens or labels that are named
LEAST_MASS = 0.01  # labels with less in the median are warned of
CLEAR_FACTOR = 2.0  # a spelling with less than so many times the mass is not named
CASES: tuple[Callable[[str], str], ...] = (str, str.lower, str.upper, str.capitalize)
STYLES = [*product(("", " "), CASES)]  # what stands before a label, and its case
ORIGINAL_STYLE = -1
MASS_ALONE = Observation(())  # for no judgement
# A measured row of labels: how else they are spelled, and their masses.
LabelRow = tuple[tuple[LabelSpelling, ...], ObservedMass]


def list_labels(constraint: Constraint) -> tuple[str, ...]:
    """Return the labels that a constraint allows; none: it is not of labels."""
    if constraint.kind not in ("choice", "labels"):
        return ()
    value = json.loads(constraint.text)  # of "labels" with how many are told
    return tuple(value[0] if constraint.kind == "labels" else value)


def spell_labels(labels: tuple[str, ...]) -> dict[int, tuple[str, ...]]:
    """Return labels as they are (ORIGINAL_STYLE), and in each of STYLES that differs."""
    styles = {labels: ORIGINAL_STYLE}
    for style, (space, change_case) in enumerate(STYLES):
        spelled = tuple(space + change_case(label.lstrip(" ")) for label in labels)
        if len({*spelled}) == len({*labels}):
            styles.setdefault(spelled, style)
    return {style: spelled for spelled, style in styles.items()}


@dataclass(slots=True)
class MassTally:
    """The rows of one constraint, or of many of one kind."""

    num_rows: int = 0
    label_rows: list[LabelRow] = field(default_factory=list)  # the first ones
    observation: Observation | None = None  # of the one constraint


class ConstraintWatch:
    """Chooses the rows of a run that are measured, and sums up what was measured."""

    def __init__(self, intake: LineParser, name_line: NameLine) -> None:
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
        # a thought's first token says nothing of the constraint; labels come behind it
        thinks = prepared.params.thought is not None
        if thinks and constraint.kind != "labels":
            return prepared
        tally = self._find_tally(constraint)
        tally.num_rows += 1
        if tally.num_rows > NUM_FIRST_ROWS and tally.num_rows % SAMPLE_INTERVAL:
            return prepared
        if thinks or len(tally.label_rows) == NUM_FIRST_ROWS:  # its labels are judged
            return replace(prepared, observation=MASS_ALONE)
        observation = tally.observation or self._make_observation(constraint)
        if constraint in self._tallies:
            tally.observation = observation
        return replace(prepared, observation=observation)

    def add(self, request: LineRequest, answer: Answer) -> None:
        """Count what was measured of a request, if anything; judge its labels in time."""
        constraint = request.params.constraint
        observation = request.prepared.observation
        if not isinstance(answer, Finished) or answer.observed_mass is None:
            return
        assert constraint is not None and observation is not None, "it was measured"
        mass = float(f"{answer.observed_mass.mass:.3g}")
        self._num_by_mass[mass] += 1
        row = (mass, self._name_line(request.line))
        self._worst = sorted([*self._worst, row])[:NUM_NAMED]

        rows = self._find_tally(constraint).label_rows
        if observation.spellings and len(rows) < NUM_FIRST_ROWS:
            rows.append((observation.spellings, answer.observed_mass))
            if len(rows) == NUM_FIRST_ROWS:
                self._judge_labels(rows)

    def judge_few(self) -> None:
        """Judge labels of which a run that ends has measured fewer rows: it was a first try."""
        for tally in self._tallies.values():
            if LEAST_ROWS <= len(tally.label_rows) < NUM_FIRST_ROWS:
                self._judge_labels(tally.label_rows)

    def summarize(self) -> ConstraintMass | None:
        """Return the median and the worst rows; None: no row was measured."""
        if not self._num_by_mass:
            return None
        masses = sorted(self._num_by_mass)
        counts = [*accumulate(self._num_by_mass[mass] for mass in masses)]
        median = masses[bisect_left(counts, (counts[-1] + 1) // 2)]
        worst = {name: mass for mass, name in self._worst}
        return ConstraintMass(counts[-1], median, worst)

    def _find_tally(self, constraint: Constraint) -> MassTally:
        key: Constraint | str = constraint
        if constraint not in self._tallies and len(self._tallies) >= MAX_CONSTRAINTS:
            key = constraint.kind
        return self._tallies.setdefault(key, MassTally())

    def _make_observation(self, constraint: Constraint) -> Observation:
        limits = self._intake.limits
        tokenizer = self._intake.tokenizer
        grammars = find_grammars(tokenizer, limits.vocab_size, limits.eos_ids)
        some_labels = list_labels(constraint)[:MAX_SPELLED]
        spellings = list[LabelSpelling]()
        for style, labels in spell_labels(some_labels).items():
            label_ids = [grammars.vocabulary(label) for label in labels]
            if label_ids and all(label_ids):
                first_ids = tuple(sorted({ids[0] for ids in label_ids}))
                spellings.append(LabelSpelling(style, labels, first_ids))
        return Observation(tuple(spellings))

    def _judge_labels(self, rows: list[LabelRow]) -> None:
        """Warn of labels that the model would hardly write."""
        median = statistics.median(observed.mass for _, observed in rows)
        if median >= LEAST_MASS:
            return
        spellings, _ = rows[-1]
        labels = _quote_few(spellings[0].labels)
        warning = RowWarning(
            f"labels such as {labels} have {describe_share(median)} of the model's "
            f"probability, in the median of the first {len(rows)} rows. Likelier is"
            f" {self._describe_free(rows)}. {_describe_remedy(rows)}"
        )
        if new := self._intake.warnings.add(warning, num_rows=len(rows)):
            self._intake.on_warning(f"Warning: {new}")

    def _describe_free(self, rows: list[LabelRow]) -> str:
        """Name the likeliest tokens without the constraint, with their mean probabilities."""
        masses = defaultdict[int, float](float)
        for _, observed in rows:
            for token_id, logprob in observed.likeliest_tokens:
                masses[token_id] += math.exp(logprob) / len(rows)
        best = sorted(masses, key=lambda token_id: -masses[token_id])[:NUM_NAMED]
        spelling = Spelling(self._intake.tokenizer, is_text=True)
        return ", ".join(
            f"{_quote(spelling.spell_token(each))} ({describe_share(masses[each])})"
            for each in best
        )


def _describe_remedy(rows: list[LabelRow]) -> str:
    """Name the likeliest other spelling of the last row's labels, if it is clearly likelier."""
    masses = defaultdict[int, list[float]](list)
    for spellings, observed in rows:
        for spelling, mass in zip(spellings, observed.spelling_masses, strict=True):
            masses[spelling.style].append(mass)
    candidates = [
        (statistics.median(masses[spelling.style]), spelling.labels)
        for spelling in rows[-1][0]
    ]
    original_mass, _ = candidates[0]
    mass, labels = max(candidates)
    if mass < max(CLEAR_FACTOR * original_mass, LEAST_MASS):
        return "Let the prompt show which answers there are, and how they are written"
    return (
        f"Write them as {_quote_few(labels)}, whose first tokens have "
        f"{describe_share(mass)}"
    )


def _quote(text: str) -> str:
    return json.dumps(cut_name(text), ensure_ascii=False)


def _quote_few(labels: tuple[str, ...]) -> str:
    return list_few([*map(_quote, labels)], NUM_NAMED)
