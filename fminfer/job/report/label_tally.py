"""Labels of answers: which label a row got, how sure it is, and whether it is right."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from fminfer.core.errors import UsageError
from fminfer.core.quantities import list_few
from fminfer.job.report.answer_fields import AnswerFields, as_dict, find_drawn_text
from fminfer.job.report.answer_tally import MAX_NAMES, count_name
from fminfer.job.report.plain_text import dump_value, make_visible

NUM_BINS = 10  # of probabilities
NO_LABEL = "(no label)"  # the answer is cut, or is another text
Z = 1.959964  # 95 % of a normal distribution lie within so many standard deviations

# A stranger is a true label that the request does not allow.
Verdict = Literal["right", "wrong", "stranger", "missing"]


@dataclass(slots=True, frozen=True)
class RowLabel:
    """The label of a row's first choice, without its outer white space."""

    label: str
    names: list[str]  # all labels, as the request spells them
    probability: float | None  # None: not known
    truth: str | None
    verdict: Verdict | None  # None: there is no column to compare it with

    def to_dict(self) -> dict[str, Any]:
        """Return what the page shows of it, for JSON."""
        truth = make_visible(self.truth or "")[:200]
        return {"p": self.probability, "truth": truth, "verdict": self.verdict}


def find_label(answer: AnswerFields, truth_column: str | None) -> RowLabel | None:
    """Return the label of an answered row; None: the row was not asked for one."""
    choice = next(iter(answer.choices), {})
    odds = as_dict(choice.get("label_probabilities"))
    names = _list_names(answer.request) or [*odds]
    if not answer.choices or not names:
        return None
    text = find_drawn_text(choice, answer.request)
    label = text.strip() if text in names else NO_LABEL
    if truth_column is None:
        return RowLabel(label, names, odds.get(text), None, None)

    value = answer.columns.get(truth_column)
    truth = (value if isinstance(value, str) else dump_value(value)).strip()
    verdict: Verdict = "right"
    if value is None or not truth:
        verdict = "missing"
    elif truth != label or label is NO_LABEL:
        is_known = any(truth == name.strip() for name in names)
        verdict = "wrong" if is_known else "stranger"
    return RowLabel(label, names, odds.get(text), truth, verdict)


def _list_names(request: Any) -> list[str]:
    """Return the labels that a request allows; an empty list if it asks for none."""
    fields = as_dict(request)
    structured = as_dict(fields.get("structured_outputs"))
    names = structured.get("choice") or fields.get("guided_choice")
    return [str(name) for name in names] if isinstance(names, list) else []


@dataclass(slots=True)
class ProbabilityBin:
    """Rows whose label has about the same probability."""

    num_rows: int = 0
    num_compared: int = 0
    num_right: int = 0
    total: float = 0.0  # of the probabilities of compared rows


@dataclass(slots=True)
class LabelTally:
    """Counts of labels over all rows, in memory that does not grow with them."""

    truth: str | None = None  # the column with the true labels
    has_truth: bool = False  # a row has that column
    columns: set[str] = field(default_factory=set)  # some that rows have
    names: list[str] = field(default_factory=list)  # labels of the last row
    num_unlabelled: int = 0
    num_several: int = 0  # rows with further choices
    counts: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    strangers: Counter[str] = field(default_factory=Counter)
    # by true label and answered label
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    bins: dict[int, ProbabilityBin] = field(default_factory=dict)

    def add(self, answer: AnswerFields, row: RowLabel | None) -> None:
        """Count an answered row."""
        if row is None:
            self.num_unlabelled += 1
            return
        self.num_several += len(answer.choices) > 1
        if row.names != self.names:  # labels that no row gets are counted, too
            self.names = row.names
            for name in row.names:
                count_name(self.counts, name.strip(), 0)
        name = count_name(self.counts, row.label)

        is_compared = row.verdict in ("right", "wrong")
        if row.probability is not None:
            place = min(int(NUM_BINS * row.probability), NUM_BINS - 1)
            part = self.bins.setdefault(place, ProbabilityBin())
            part.num_rows += 1
            part.num_compared += is_compared
            part.num_right += row.verdict == "right"
            part.total += row.probability if is_compared else 0.0
        if row.verdict is None:
            return

        self.verdicts[row.verdict] += 1
        if is_compared:
            self.pairs[count_name(self.counts, row.truth, 0), name] += 1
        elif row.verdict == "stranger":
            count_name(self.strangers, row.truth)
        self.has_truth |= self.truth in answer.columns
        if len(self.columns) < MAX_NAMES:
            self.columns |= answer.columns.keys() - {"row"}

    def check_truth(self) -> None:
        """Raise a UsageError if there is nothing to compare labels with."""
        if self.truth is None or self.has_truth:
            return
        if not self.counts:
            raise UsageError(
                f"--truth {self.truth} compares labels, and no answer is one: no request has "
                "structured_outputs.choice. Leave --truth out"
            )
        remedy = "nothing stands beside the requests. Leave --truth out"
        if self.columns:
            remedy = f"there are: {list_few(sorted(self.columns), 20)}"
        raise UsageError(f"--truth {self.truth}: no row has this column; {remedy}")

    @property
    def calibration_error(self) -> float:
        """The expected calibration error, by rows: |share that is right - mean probability|."""
        gaps = sum(abs(part.num_right - part.total) for part in self.bins.values())
        number = sum(part.num_compared for part in self.bins.values())
        return gaps / max(number, 1)


def compute_interval(num_right: int, number: int) -> tuple[float, float]:
    """Return Wilson's interval of 95 % for the share of rows that are right; of no row, all."""
    if not number:
        return 0.0, 1.0
    share = num_right / number
    scale = 1 + Z * Z / number
    middle = (share + Z * Z / (2 * number)) / scale
    spread = math.sqrt(share * (1 - share) / number + (Z / (2 * number)) ** 2)
    reach = Z * spread / scale
    return max(middle - reach, 0.0), min(middle + reach, 1.0)
