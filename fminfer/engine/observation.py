"""What is measured of a constrained request: how much probability its constraint leaves."""

from __future__ import annotations

from dataclasses import dataclass

NUM_LIKELIEST = 5  # tokens that are listed of a prompt under observation


@dataclass(slots=True, frozen=True)
class LabelSpelling:
    """A way to spell the labels of a constraint."""

    style: int  # as `constraint_watch.spell_labels` numbers them
    labels: tuple[str, ...]
    first_ids: tuple[int, ...]  # tokens that labels begin with


@dataclass(slots=True, frozen=True)
class Observation:
    """What is measured of a constrained request: at the first token of its first prompt."""

    spellings: tuple[LabelSpelling, ...]  # of its labels, first that of the constraint


@dataclass(slots=True, frozen=True)
class ObservedMass:
    """The probabilities that the model gave before bias, temperature and filters."""

    mass: float  # of the tokens that the constraint allows first, or of whole labels
    spelling_masses: tuple[float, ...]  # of the first tokens of each spelling
    likeliest_tokens: tuple[tuple[int, float], ...]  # with their logprobs
