"""How much probability constraints leave is measured in some rows, and changes no answer."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import fminfer
from fminfer.answers.answer_index import make_answer_key
from fminfer.contract.envelope import make_line, parse_envelope
from fminfer.contract.row_warnings import WarningCounts
from fminfer.core.config import Constraint
from fminfer.engine.engine_core import Finished
from fminfer.engine.intake import Intake
from fminfer.engine.observation import ObservedMass
from fminfer.engine.sequence import PreparedRequest
from fminfer.runtime.lines.constraint_watch import (
    MASS_ALONE,
    MAX_CONSTRAINTS,
    NUM_FIRST_ROWS,
    SAMPLE_INTERVAL,
    STYLES,
    ConstraintWatch,
    spell_labels,
)
from fminfer.runtime.lines.line_intake import Answer, LineRequest
from fminfer.text.grammars import find_grammars
from tests.conftest import make_model, save_byte_tokenizer

Options = dict[str, Any]
Measured = dict[int, tuple[PreparedRequest, ObservedMass]]
EOS = 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """Give (folder, transformers model) of bytes as tokens, which can end answers."""
    folder = tmp_path_factory.mktemp("llama-eos")
    model = make_model("llama")
    model.config.eos_token_id = EOS
    model.save_pretrained(folder)
    save_byte_tokenizer(folder)
    return str(folder), model


@pytest.fixture(scope="module")
def intake() -> Iterator[Intake]:
    with fminfer.Engine(dtype="float32") as engine:
        yield engine.intake


@pytest.fixture()
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    """Note what the watch is told, by the number of the line."""
    found: Measured = {}
    add = ConstraintWatch.add

    def note(self: ConstraintWatch, request: LineRequest, answer: Answer) -> None:
        if isinstance(answer, Finished) and answer.observed_mass is not None:
            assert request.line.number not in found, "a line is measured once"
            found[request.line.number] = request.prepared, answer.observed_mass
        add(self, request, answer)

    monkeypatch.setattr(ConstraintWatch, "add", note)
    return found


def outputs(**ways: Any) -> Options:
    return {"structured_outputs": ways}


CHOICE = outputs(choice=["ab", "Cd", "a long label"])
LABELS = outputs(choice=["xa", "xb"], probabilities=True)  # they have a first token
ROWS: list[Options] = [
    CHOICE | {"prompt": "Is it?", "temperature": 0},
    CHOICE | {"prompt": "Is it so?", "seed": 3, "n": 3, "temperature": 1.5},
    outputs(json_object=True) | {"prompt": [*range(40, 75)], "temperature": 0},
    outputs(regex="[^a]+") | {"prompt": "Is it so?", "seed": 1, "logprobs": 2},
    CHOICE | {"prompt": "Is it no?", "echo": True, "logprobs": 3, "temperature": 0},
    CHOICE | {"prompt": "Yes", "logit_bias": {"97": 9.0}, "bad_words": ["C"]},
    LABELS | {"prompt": "Is it so? "},
    outputs(choice=["no", "yes"], probabilities=True) | {"prompt": "It is"},
    {"prompt": "No constraint", "temperature": 0, "echo": True, "logprobs": 1},
    outputs(choice=["o"]) | {"prompt": ["two", "prompts"], "seed": 2, "best_of": 2},
]
ROWS = [{"max_tokens": 6} | row for row in ROWS]
MODES: list[Options] = [
    {},
    {"chunk_size": 8},
    {"world_size": 2},
    {"world_size": 2, "tensor_parallel_size": 2},
    {"world_size": 2, "data_group_size": 2},
]


def answer(folder: str, **options: Any) -> list[Any]:
    """Answer all rows; return their results without times."""
    with closing(fminfer.Engine(folder, dtype="float32", **options)) as engine:
        records = sorted(engine.run(ROWS), key=lambda each: each.line.number)
    assert not any(each.error for each in records), [each.error for each in records]
    return [each.choices and each.to_dict()["result"]["choices"] for each in records]


@pytest.mark.parametrize("options", MODES, ids=str)
def test_masses_are_those_of_transformers(
    checkpoint: tuple[str, Any], measured: Measured, options: Options
) -> None:
    """Few and many tokens, edits of logits, echo beside it, chunks, ranks and pipelines."""
    folder, model = checkpoint
    answer(folder, **options)
    assert sorted(measured) == [1, 2, 3, 4, 5, 6, 7, 8, 10]
    for number, (prepared, observed) in measured.items():
        constraint = prepared.params.constraint
        assert constraint is not None and prepared.observation is not None
        probs = compute_probs(model, prepared.prompts[0].ids)
        if constraint.kind == "labels":
            labels, _ = json.loads(constraint.text)
            mass = sum(
                compute_label(model, prepared.prompts[0].ids, label) for label in labels
            )
        else:
            mass = probs[find_allowed(folder, constraint)].sum().item()
        assert observed.mass == pytest.approx(mass, rel=1e-4), number
        firsts = [
            probs[[*each.first_ids]].sum().item()
            for each in prepared.observation.spellings
        ]
        assert [*observed.spelling_masses] == pytest.approx(firsts, rel=1e-4)
        # they are told of labels, which may be warned of
        best = probs.topk(5 if prepared.observation.spellings else 0)
        assert [each for each, _ in observed.likeliest_tokens] == best.indices.tolist()
        logprobs = [logprob for _, logprob in observed.likeliest_tokens]
        assert logprobs == pytest.approx(best.values.log().tolist(), abs=1e-4)


def compute_probs(model: Any, ids: list[int]) -> torch.Tensor:
    """Return the probabilities of the next token."""
    with torch.inference_mode():
        probs: torch.Tensor = model(torch.tensor([ids])).logits[0, -1].softmax(-1)
    return probs


def compute_label(model: Any, ids: list[int], label: str) -> float:
    """Return the probability of a text whose tokens are its bytes."""
    found = 1.0
    for place, token_id in enumerate(label.encode()):
        probs = compute_probs(model, [*ids, *label.encode()[:place]])
        found *= probs[token_id].item()
    return found


@cache
def find_allowed(folder: str, constraint: Constraint) -> list[int]:
    """Return the tokens that a constraint allows first; of choices those that begin one."""
    with fminfer.Engine(folder, dtype="float32") as engine:
        grammars = find_grammars(engine.tokenizer, engine.vocab_size, frozenset({EOS}))
        bits = grammars.find(constraint).first_node.mask.bits
    allowed = [
        each for each in range(engine.vocab_size) if bits[each // 8] >> each % 8 & 1
    ]
    if constraint.kind == "choice":
        texts = json.loads(constraint.text)
        assert allowed == sorted({text.encode()[0] for text in texts})
    return allowed


def test_rows_behind_the_judged_ones_have_their_mass_alone(
    checkpoint: tuple[str, Any], measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else is computed of them; labels with probabilities have it anyway."""
    folder, _ = checkpoint
    answers = answer(folder)
    masses = {number: observed.mass for number, (_, observed) in measured.items()}
    measured.clear()

    def observe(self: ConstraintWatch, prepared: PreparedRequest) -> PreparedRequest:
        is_free = prepared.params.constraint is None
        return prepared if is_free else replace(prepared, observation=MASS_ALONE)

    monkeypatch.setattr(ConstraintWatch, "observe", observe)
    assert answer(folder) == answers
    assert {number: observed.mass for number, (_, observed) in measured.items()} == (
        pytest.approx(masses)
    )
    for _, observed in measured.values():
        assert not observed.spelling_masses and not observed.likeliest_tokens


def test_no_answer_depends_on_it(
    checkpoint: tuple[str, Any], measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not its bytes, its draws, its kept answer's key."""
    watched = answer(checkpoint[0])
    assert len(measured) == 9
    for prepared, _ in measured.values():
        unwatched = replace(prepared, observation=None)
        assert make_answer_key(prepared) == make_answer_key(unwatched)
    measured.clear()
    monkeypatch.setattr(ConstraintWatch, "observe", lambda self, prepared: prepared)
    assert answer(checkpoint[0]) == watched
    assert not measured


def test_a_row_that_is_fed_again_is_measured_once(
    checkpoint: tuple[str, Any], measured: Measured
) -> None:
    """Rows that ended early let others enter; those need more blocks, and lose theirs."""
    folder, model = checkpoint
    rng = random.Random(1)
    row = outputs(regex="[^a]+") | {"max_tokens": 100, "stop_token_ids": [*range(12)]}
    rows = [
        row
        | {"prompt": [rng.randrange(5, 250) for _ in range(rng.randint(3, 20))]}
        | {"temperature": rng.choice([0, 1.0]), "seed": seed}
        for seed in range(NUM_FIRST_ROWS)
    ]
    with fminfer.Engine(folder, dtype="float32", budget=900, block_size=8) as engine:
        records = [*engine.run(rows)]
        assert engine.stats.num_put_back > 0
    assert not any(record.error for record in records)
    assert len(measured) == len(rows)
    for prepared, observed in measured.values():
        probs = compute_probs(model, prepared.prompts[0].ids)
        constraint = prepared.params.constraint
        assert constraint is not None, "it has one"
        allowed = find_allowed(folder, constraint)
        assert observed.mass == pytest.approx(probs[allowed].sum().item(), rel=1e-4)


def test_equal_lines_are_measured_once(
    checkpoint: tuple[str, Any], measured: Measured
) -> None:
    row = ROWS[0]
    with fminfer.Engine(checkpoint[0], dtype="float32") as engine:
        assert len([*engine.run([row] * 5 + [row | {"prompt": "Other"}])]) == 6
    assert sorted(measured) == [1, 6]


# What is chosen, and what is told of it.


def prepare(intake: Intake, **fields: Any) -> PreparedRequest:
    request = intake.parse({"prompt": "Say it:", **fields})
    return intake.prepare(request)


def make_request(number: int, prepared: PreparedRequest) -> LineRequest:
    line = make_line(number, {"prompt": "Say it:"})
    return LineRequest(line, parse_envelope(line), prepared, None)


def make_watch(intake: Intake) -> ConstraintWatch:
    return ConstraintWatch(intake, lambda line: f"line {line.number} of it")


def test_the_first_rows_of_each_constraint_are_measured_and_then_every_20th(
    intake: Intake,
) -> None:
    watch = make_watch(intake)
    choice = prepare(intake, **outputs(choice=["a", "b"]))
    regex = prepare(intake, **outputs(regex="[a-c]"))
    free = prepare(intake)
    numbers: list[int] = []
    for number in range(1, 201):
        assert watch.observe(free) is free
        if watch.observe(choice).observation is not None:
            numbers.append(number)
    expected = [*range(1, NUM_FIRST_ROWS + 1)]
    assert numbers == [*expected, 60, 80, 100, 120, 140, 160, 180, 200]
    assert watch.observe(regex).observation is not None, "counted by itself"


def test_labels_are_spelled_until_they_are_judged(intake: Intake) -> None:
    watch = make_watch(intake)
    choice = prepare(intake, **outputs(choice=["good", "bad"]))
    for number in range(1, 2 * NUM_FIRST_ROWS + 1):
        prepared = watch.observe(choice)
        if prepared.observation is None:
            continue
        assert (prepared.observation == MASS_ALONE) == (number > NUM_FIRST_ROWS)
        masses = (0.5,) * len(prepared.observation.spellings)
        observed = ObservedMass(0.5, masses, ())
        finished = Finished(number, [], {}, {}, observed_mass=observed)
        watch.add(make_request(number, prepared), finished)
    summary = watch.summarize()
    assert summary is not None and summary.num_rows == NUM_FIRST_ROWS + 3


def test_many_constraints_are_counted_together(intake: Intake) -> None:
    watch = make_watch(intake)
    numbers: list[int] = []
    for number in range(MAX_CONSTRAINTS + NUM_FIRST_ROWS + SAMPLE_INTERVAL):
        prepared = prepare(intake, **outputs(choice=[f"label {number}", "b"]))
        if (observation := watch.observe(prepared).observation) is not None:
            numbers.append(number)
            assert observation.spellings[0].labels == (f"label {number}", "b")
    assert numbers[:-1] == [*range(MAX_CONSTRAINTS + NUM_FIRST_ROWS)]
    assert numbers[-1] == MAX_CONSTRAINTS + 60 - 1


def test_spellings_tell_labels_apart() -> None:
    spelled = spell_labels((" Yes", " NO"))
    texts = [*spelled.values()]
    assert texts[0] == (" Yes", " NO")
    assert set(texts[1:]) == {
        ("Yes", "NO"),
        ("yes", "no"),
        ("YES", "NO"),
        ("Yes", "No"),
        (" yes", " no"),
        (" YES", " NO"),
        (" Yes", " No"),
    }
    assert len(texts) == len(set(texts)) <= len(STYLES)
    assert [*spell_labels(("a", "A")).values()] == [("a", "A"), (" a", " A")]


def judge(intake: Intake, labels: list[str], mass: float, **masses: float) -> list[str]:
    """Return the warnings of rows of labels whose spellings have these masses, or 0."""
    intake.warnings = WarningCounts()
    told: list[str] = []
    intake.on_warning = told.append
    watch = make_watch(intake)
    (free,) = intake.tokenizer.encode(" the", add_special_tokens=False).ids[:1]
    for number in range(1, NUM_FIRST_ROWS + 30):
        prepared = watch.observe(prepare(intake, **outputs(choice=labels)))
        if prepared.observation is None:
            continue
        spelling_masses = tuple(
            mass if place == 0 else masses.get(spelling.labels[0].replace(" ", "_"), 0)
            for place, spelling in enumerate(prepared.observation.spellings)
        )
        observed = ObservedMass(mass, spelling_masses, ((free, math.log(0.25)),))
        finished = Finished(number, [], {}, {}, observed_mass=observed)
        watch.add(make_request(number, prepared), finished)
        assert bool(told) == bool(number >= NUM_FIRST_ROWS and intake.warnings.kinds)
    return told


def test_labels_that_the_model_would_not_write_are_warned_of(intake: Intake) -> None:
    (text,) = judge(intake, ["NEGATIVE", "POSITIVE"], 0.00013, _negative=0.91)
    piece = json.dumps(
        intake.tokenizer.decode(
            intake.tokenizer.encode(" the", add_special_tokens=False).ids[:1]
        )
    )
    assert text == (
        'Warning: labels such as "NEGATIVE", "POSITIVE" have 0.013% of the model\'s '
        "probability, in the median of the first 50 rows. Likelier is "
        f'{piece} (25%). Write them as " negative", " positive", whose first '
        "tokens have 91%"
    )
    assert intake.warnings.to_dict() == {text.removeprefix("Warning: "): 50}


def test_a_spelling_that_is_hardly_likelier_is_not_named(intake: Intake) -> None:
    (text,) = judge(intake, ["no", "yes"], 0.004, _no=0.0079)
    assert text.endswith(
        "Let the prompt show which answers there are, and how they are written"
    )
    assert "Write them" in judge(intake, ["no", "yes"], 0.006, _no=0.0121)[0]
    rare = judge(intake, ["no", "yes"], 0.0001, _no=0.0099)
    assert "Let the prompt show" in rare[0], "it would be warned of as well"


@pytest.mark.parametrize(("num_rows", "is_warned"), [(4, False), (5, True), (49, True)])
def test_a_first_try_of_few_rows_is_judged_at_its_end(
    intake: Intake, num_rows: int, is_warned: bool
) -> None:
    """People try five rows first, and saw no warning of labels that are nonsense."""
    intake.warnings = WarningCounts()
    texts: list[str] = []
    intake.on_warning = texts.append
    watch = make_watch(intake)
    for number in range(num_rows):
        prepared = watch.observe(prepare(intake, **outputs(choice=["no", "yes"])))
        assert prepared.observation is not None
        masses = (1e-5,) * len(prepared.observation.spellings)
        observed = ObservedMass(1e-5, masses, ())
        finished = Finished(number, [], {}, {}, observed_mass=observed)
        watch.add(make_request(number, prepared), finished)
    assert not texts
    watch.judge_few()
    assert bool(texts) == is_warned


def test_labels_with_a_hundredth_of_the_probability_are_not_warned_of(
    intake: Intake,
) -> None:
    assert judge(intake, ["no", "yes"], 0.01, _no=0.9) == []


def test_many_labels_are_named_in_part_and_on_one_line(intake: Intake) -> None:
    labels = ["a\nb", "c", "d", "e" * 100, "f"]
    (text,) = judge(intake, labels, 0.0)
    assert 'such as "a\\nb", "c", "d" and 2 more have less than 0.0001%' in text
    assert "\n" not in text


def test_the_median_and_the_worst_rows_are_told(intake: Intake) -> None:
    watch = make_watch(intake)
    assert watch.summarize() is None
    masses = [0.5, 0.03, 0.9, 0.1, 0.0004567, 0.7, 0.8]
    for number, mass in enumerate(masses, start=1):
        prepared = watch.observe(prepare(intake, **outputs(regex="a+")))
        observed = ObservedMass(mass, (), ())
        finished = Finished(number, [], {}, {}, observed_mass=observed)
        watch.add(make_request(number, prepared), finished)
    found = watch.summarize()
    assert found is not None
    assert (found.num_rows, found.median) == (7, 0.5)
    assert [*found.worst.items()] == [
        ("line 5 of it", 0.000457),
        ("line 2 of it", 0.03),
        ("line 4 of it", 0.1),
    ]
    assert found.to_text() == (
        "constraints left 50% of the model's probability (median of 7 measured "
        "rows); least: line 5 of it (0.046%), line 2 of it (3%), line 4 of it (10%)"
    )
