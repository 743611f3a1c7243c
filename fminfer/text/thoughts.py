"""Tells the thought before an answer from the answer, as its text comes.

    reader = ThoughtReader(thought)
    reader.feed(piece)  # for each piece, as it comes
    reader.finish()  # once the text has ended

A reader keeps places in the text, no text. A thought stands at the beginning: tags that come
behind the answer's first character are a part of the answer.
"""

from __future__ import annotations

from typing import Literal

from fminfer.core.config import KnownThoughts
from fminfer.core.thought_form import Thought, ThoughtForm

HARMONY_START = "<|start|>assistant"
HARMONY_THOUGHT = "<|channel|>analysis<|message|>"
HARMONY_ANSWER = "<|channel|>final<|message|>"
HARMONY_JSON = "<|channel|>final <|constrain|>json<|message|>"
QWEN3_SENTENCE = (
    "\n\nConsidering the limited time by the user, I have to give the solution based on "
    "the thinking directly now.\n"
)


# The first one whose tags and sign a template has is the model's.
THOUGHT_FORMS: dict[KnownThoughts, ThoughtForm] = {
    "qwen3": ThoughtForm(
        "<think>", "</think>", sign="multi_step_tool", sentence=QWEN3_SENTENCE
    ),
    "deepseek_r1": ThoughtForm("<think>", "</think>"),
    "seed_oss": ThoughtForm("<seed:think>", "</seed:think>", behind="\n"),
    "mistral": ThoughtForm("[THINK]", "[/THINK]", behind=""),
    "openai_gptoss": ThoughtForm(
        HARMONY_THOUGHT,
        "<|end|>",
        sign="<|channel|>analysis",
        behind=HARMONY_START + HARMONY_ANSWER,
        later_openings=(HARMONY_START + HARMONY_THOUGHT,),
        leads=(
            HARMONY_START + HARMONY_JSON,
            HARMONY_JSON,
            HARMONY_START + HARMONY_ANSWER,
            HARMONY_ANSWER,
        ),
    ),
    "cohere": ThoughtForm(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        behind="<|START_RESPONSE|>",
        leads=("<|START_RESPONSE|>",),
        answer_end="<|END_RESPONSE|>",
    ),
    "kimi": ThoughtForm("◁think▷", "◁/think▷", behind=""),
    "granite": ThoughtForm(
        "Here is my thought process:", "Here is my response:", behind="\n"
    ),
    "open_thoughts": ThoughtForm("<|begin_of_thought|>", "<|end_of_thought|>"),
    "thinking": ThoughtForm("<thinking>", "</thinking>"),
    "thought": ThoughtForm("<thought>", "</thought>"),
    "reasoning": ThoughtForm("<reasoning>", "</reasoning>"),
}


def find_thoughts(template: str) -> KnownThoughts | None:
    """Tell by a chat template how its model writes thoughts; None: it names no known tags."""
    for name, form in THOUGHT_FORMS.items():
        tags = (form.opening, form.closing)
        if form.sign in template and any(tag in template for tag in tags):
            return name
    return None


def ends_in_thought(prompt: str) -> bool:
    """Return whether a prompt ends with the tag that begins a thought of any family."""
    openings = (form.opening for form in THOUGHT_FORMS.values())
    return prompt.rstrip().endswith((*openings, "<|channel|>analysis"))


def has_open_thought(text: str, form: ThoughtForm) -> bool:
    """Return whether a text ends within a thought."""
    return text.rfind(form.opening) > text.rfind(form.closing)


Phase = Literal["before", "inside", "behind", "answer"]


class ThoughtReader:
    """Where the thought of one choice begins and ends in its text.

    Args:
        thought: what the request says of it.
    """

    def __init__(self, thought: Thought) -> None:
        self.thought = thought
        self.phase: Phase = "inside" if thought.is_open else "before"
        # Where thoughts begin and end, in code points; the last end is the least it can be.
        self.spans: list[tuple[int, int]] = [(0, 0)] if thought.is_open else []
        self.answer_start = 0  # in the phase "answer"
        self.held = ""  # a text's end that may be a tag, or a part of one
        self.num_read = 0  # characters of the text, with `held`

    def feed(self, text: str) -> None:
        """Read the next piece."""
        self.num_read += len(text)
        if self.phase == "answer":
            return
        self.held += text
        while self._read_tag():
            pass

    def finish(self) -> None:
        """Settle what the text's end is, once it has ended."""
        if self.phase == "inside":
            self.spans[-1] = (self.spans[-1][0], self.num_read)
        elif self.phase == "before":
            self.begin_answer(0)
        elif self.phase == "behind" and self.held.strip():
            self.begin_answer(self.num_read - len(self.held.lstrip()))

    def begin_answer(self, start: int) -> None:
        """Take all from a place on for the answer."""
        self.phase = "answer"
        self.answer_start = start
        self.held = ""

    @property
    def has_thought(self) -> bool:
        return bool(self.spans)

    @property
    def num_undecided(self) -> int:
        """Characters at the text's end that may be the answer's, or white space, or a tag."""
        return len(self.held) if self.phase in ("before", "behind") else 0

    @property
    def seams(self) -> tuple[str, ...]:
        """The texts that may come next, and are no part of the answer."""
        form = self.thought.form
        return (form.opening, *form.later_openings, *form.leads)

    def _read_tag(self) -> bool:
        """Read a tag that begins, ends or follows a thought; False: there is none yet."""
        if self.phase == "inside":
            return self._read_closing()
        text = self.held.lstrip()
        start = self.num_read - len(text)
        for seam in self.seams:
            if text.startswith(seam):
                self.held = text[len(seam) :]
                place = start + len(seam)
                if seam in self.thought.form.leads:
                    self.begin_answer(place)
                    return False
                self.phase = "inside"
                self.spans.append((place, place))
                return True
        if text and not any(seam.startswith(text) for seam in self.seams):
            self.begin_answer(start if self.phase == "behind" else 0)
        return False

    def _read_closing(self) -> bool:
        closing = self.thought.form.closing
        inner, tag, rest = self.held.partition(closing)
        self.held = rest if tag else find_begun_tag(inner, closing)
        end = self.num_read - len(self.held) - len(tag)
        self.spans[-1] = (self.spans[-1][0], end)
        if tag:
            self.phase = "behind"
        return bool(tag)


def find_begun_tag(text: str, tag: str) -> str:
    """Return the longest end of a text that a tag begins with, and is not the whole tag."""
    sizes = range(min(len(text), len(tag) - 1), 0, -1)
    return next((tag[:size] for size in sizes if text.endswith(tag[:size])), "")
