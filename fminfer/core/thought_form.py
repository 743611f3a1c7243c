"""How families write thoughts, and what a request says of the one before its answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class ThoughtForm:
    """How a family writes its thoughts."""

    opening: str
    closing: str
    sign: str = ""  # what a template has, beside the tags
    sentence: str = ""  # that the makers publish for a budget that is used up
    behind: str = (
        "\n\n"  # what the family writes between the closing tag and the answer
    )
    later_openings: tuple[str, ...] = ()  # of thoughts behind the first one
    leads: tuple[str, ...] = ()  # what may begin the answer, and is no part of it
    answer_end: str = ""  # what ends it, and is no part of it

    @property
    def ending(self) -> str:
        """What is forced where a budget is used up."""
        return self.sentence + self.closing + self.behind


@dataclass(slots=True, frozen=True)
class Thought:
    """What a request knows and wants of the thought before its answer."""

    form: ThoughtForm
    is_open: bool = False  # the prompt ends within it
    budget: int | None = None  # most tokens of it; None: any number
    is_told: bool = True  # the answer has its text
