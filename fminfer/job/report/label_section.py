"""The report's section on labels: counts, probabilities, and how many are right."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fminfer.core.quantities import list_few, with_noun
from fminfer.job.report.label_tally import NO_LABEL, LabelTally, compute_interval
from fminfer.job.report.page_parts import make_notes, make_tiles
from fminfer.job.report.plain_text import make_visible, shorten_text

MAX_CHARS = 60  # of a label


def make_label_section(tally: LabelTally, num_errors: int) -> str:
    """Return the section, whose tables the page's script draws; "": there are no labels."""
    if not tally.counts:
        return ""
    return (
        '<section class="labels" aria-labelledby="labels"><h2 id="labels">Labels</h2>'
        f"{make_tiles(_list_tiles(tally))}{make_notes(_list_notes(tally, num_errors))}"
        '<noscript><p class="bad">Tables of labels are drawn by a script, and scripts are off.'
        '</p></noscript><div id="label-tables"></div></section>'
    )


def make_label_data(tally: LabelTally) -> dict[str, Any]:
    """Return what the tables hold, for JSON."""
    places = {label: number for number, label in enumerate(tally.counts)}
    return {
        "names": [shorten_text(make_visible(label), MAX_CHARS) for label in places],
        "counts": [*tally.counts.values()],
        # places of the true label and of the answered one, and how many rows
        "pairs": [
            (places[truth], places[label], number)
            for (truth, label), number in tally.pairs.items()
        ],
        "bins": [
            [place, asdict(part), compute_interval(part.num_right, part.num_compared)]
            for place, part in sorted(tally.bins.items())
        ],
    }


def _list_tiles(tally: LabelTally) -> list[tuple[str, str, str]]:
    tiles = [("Rows labelled", f"{tally.counts.total():,}", "")]
    if number := tally.pairs.total():
        num_right = tally.verdicts["right"]
        low, high = compute_interval(num_right, number)
        tiles += [
            ("Rows compared", f"{number:,}", ""),
            ("Accuracy", _show_share(num_right, number), ""),
            ("95 % interval", f"{100 * low:.1f} – {100 * high:.1f} %", ""),
        ]
    if tally.pairs and tally.bins:
        error = f"{100 * tally.calibration_error:.1f} %"
        tiles.append(("Expected calibration error", error, ""))
    return tiles


def _list_notes(tally: LabelTally, num_errors: int) -> list[str]:
    """Say what is compared, and which rows are not counted as one may expect."""
    num_strangers = tally.verdicts["stranger"]
    names = [
        f"“{shorten_text(name, MAX_CHARS)}” ({count:,})"
        for name, count in tally.strangers.most_common()
    ]
    as_wrong = _show_share(tally.verdicts["right"], tally.pairs.total() + num_strangers)
    notes = [
        (tally.num_several, "with several choices: the first choice counts."),
        (
            tally.num_unlabelled,
            "without labels: they asked for none, or are Batch answers, which do not "
            "repeat the labels. They are left out here.",
        ),
        (
            tally.counts[NO_LABEL],
            "with an answer that is no label, as where max_tokens cuts it. It is never right.",
        ),
        (
            tally.verdicts["missing"],
            "without a true label: it is missing, null or empty. They are not compared.",
        ),
        (
            num_strangers,
            f"with a true label that the request does not allow: {list_few(names, 3)}. They are "
            f"not compared. Counted as wrong, they would make the accuracy {as_wrong}.",
        ),
        (num_errors if tally.truth else 0, "in error: they have no label to compare."),
    ]
    rule = (
        f"Labels are compared with “{tally.truth}”. White space around both is left out, and "
        "upper and lower case differ."
    )
    told_notes = [
        f"{with_noun(number, 'row')} {text}" for number, text in notes if number
    ]
    return [rule, *told_notes] if tally.truth else told_notes


def _show_share(part: float, number: int) -> str:
    return f"{100 * part / max(number, 1):.1f} %"
