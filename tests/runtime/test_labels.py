"""Label probabilities of a whole engine: those that `echo` gives, however they are computed."""

from __future__ import annotations

import collections
import json
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest

import fminfer
from fminfer.core.config import Constraint
from fminfer.text.grammars import find_grammars

Options = dict[str, Any]
PROMPTS = [
    "Question: How do you go from the den to the porch?\nAnswer:",
    "Say it:",
    "Is the way to the garden short or long?",
]
# Three begin others, by their tokens; some share their first tokens.
LABELS = [" north", " north and east", " north and", " south", " up", "up", " é€", "no"]
MANY = sorted(
    {
        " " + "".join(random.Random(i).choices("north eadsu", k=1 + i % 9))
        for i in range(77)
    }
)


@pytest.fixture(scope="module")
def engine() -> Iterator[fminfer.Engine]:
    with fminfer.Engine(dtype="float32") as engine:
        yield engine


def ask(prompt: str | list[int], labels: list[str], **fields: Any) -> Options:
    outputs = {"choice": labels, "probabilities": fields.pop("probabilities", True)}
    return {"prompt": prompt, "structured_outputs": outputs} | fields


def answer(engine: fminfer.Engine, *requests: Options) -> list[list[Options]]:
    """Return the choices of each request, in order."""
    records = sorted(engine.run(list(requests)), key=lambda record: record.line.number)
    errors = [record.error for record in records if record.error]
    assert not errors, errors
    return [record.to_dict()["result"]["choices"] for record in records]


def refuse(engine: fminfer.Engine, request: Options) -> str:
    (record,) = engine.run([request])
    assert record.error is not None, "it was answered"
    return record.error.message


def score_by_echo(
    engine: fminfer.Engine, prompt: str, labels: list[str]
) -> dict[str, float]:
    """Return each label's probability, less that of what goes on into a longer label."""
    limits = engine.intake.limits
    vocabulary = find_grammars(
        engine.tokenizer, limits.vocab_size, limits.eos_ids
    ).vocabulary
    start = engine.tokenizer.encode(prompt).ids
    paths = {label: tuple(vocabulary(label)) for label in labels}
    lines = [
        {"prompt": [*start, *path], "max_tokens": 0, "echo": True, "logprobs": 0}
        for path in paths.values()
    ]
    whole: dict[tuple[int, ...], float] = {}
    for path, (choice,) in zip(paths.values(), answer(engine, *lines), strict=True):
        whole[path] = math.exp(sum(choice["logprobs"]["token_logprobs"][-len(path) :]))
    own: dict[str, float] = {}
    for label, path in paths.items():
        longer = [p for p in whole if len(p) > len(path) and p[: len(path)] == path]
        next_ones = [
            p
            for p in longer
            if not any(len(q) < len(p) and p[: len(q)] == q for q in longer)
        ]
        own[label] = whole[path] - sum(whole[p] for p in next_ones)
    return own


def check_answer(choice: Options, expected: dict[str, float]) -> None:
    """Hold a choice to the probabilities that `echo` gives."""
    mass = sum(expected.values())
    assert choice["label_mass"] == pytest.approx(mass, abs=1e-4, rel=1e-4)
    found = choice["label_probabilities"]
    assert [*found.values()] == sorted(found.values(), reverse=True)
    assert found == pytest.approx(
        {label: each / mass for label, each in expected.items()}, abs=1e-4
    )


def test_probabilities_are_those_of_echo(engine: fminfer.Engine) -> None:
    """Labels that begin others, and 77 that part in the middle of their tokens."""
    sets = [(prompt, labels) for prompt in PROMPTS for labels in (LABELS, MANY)]
    asked = [ask(*each) for each in sets]
    for (prompt, labels), (choice,) in zip(sets, answer(engine, *asked), strict=True):
        expected = score_by_echo(engine, prompt, labels)
        check_answer(choice, expected)
        text = choice["text"]
        assert text == max(expected, key=expected.__getitem__)
        assert choice["finish_reason"] == "stop"


def test_labels_that_begin_others_are_tokens_of_them(engine: fminfer.Engine) -> None:
    """What the test above says of LABELS is so."""
    limits = engine.intake.limits
    grammars = find_grammars(engine.tokenizer, limits.vocab_size, limits.eos_ids)
    constraint = Constraint("labels", json.dumps([LABELS, len(LABELS)]))
    trie = grammars.find_labels(constraint)
    inner = [trie.nodes[end] for end in trie.ends if trie.nodes[end].children]
    assert len(inner) >= 2


@pytest.mark.parametrize(
    "options",
    [
        {"max_rows": 2, "chunk_size": 16},
        {"prefix_cache": False},
        {"budget": 256, "max_model_len": 128},
    ],
    ids=str,
)
def test_little_room_changes_no_probability(
    engine: fminfer.Engine, options: Options
) -> None:
    """Prompts and branches wait for rows and blocks, and are fed in chunks."""
    asked = [ask(prompt, MANY) for prompt in PROMPTS] + [ask(PROMPTS[0], LABELS)]
    expected = answer(engine, *asked)
    with fminfer.Engine(dtype="float32", **options) as small:
        for (found,), (choice,) in zip(answer(small, *asked), expected, strict=True):
            check_same(found, choice)
        small._core.check_books()


def check_same(found: Options, expected: Options) -> None:
    assert found["text"] == expected["text"]
    assert found["label_mass"] == pytest.approx(expected["label_mass"], rel=1e-4)
    assert found["label_probabilities"] == pytest.approx(
        expected["label_probabilities"], abs=1e-4
    )


@pytest.mark.parametrize(
    "ranks", [{"tensor_parallel_size": 2}, {"world_size": 2}, {"data_group_size": 2}]
)
def test_ranks_give_the_same(engine: fminfer.Engine, ranks: Options) -> None:
    asked = [ask(prompt, labels) for prompt in PROMPTS for labels in (LABELS, MANY)]
    expected = answer(engine, *asked)
    with fminfer.Engine(dtype="float32", **ranks) as several:
        for (found,), (choice,) in zip(answer(several, *asked), expected, strict=True):
            check_same(found, choice)


def test_a_label_is_drawn_by_its_probability(engine: fminfer.Engine) -> None:
    """By temperature and the row's seed, for each of n choices."""
    labels = ["\n", " south", " north"]
    asked = ask(PROMPTS[2], labels, temperature=1.0, n=128)
    (choices,) = answer(engine, asked | {"seed": 3})
    shares = choices[0]["label_probabilities"]
    counts = collections.Counter(choice["text"] for choice in choices)
    (warm,) = answer(engine, asked | {"seed": 3, "temperature": 2})
    roots = {label: math.sqrt(share) for label, share in shares.items()}
    warm_counts = collections.Counter(choice["text"] for choice in warm)
    for label, share in shares.items():
        check_count(counts[label], share)
        check_count(warm_counts[label], roots[label] / sum(roots.values()))
    assert len(counts) > 1
    (again,), (other,) = (answer(engine, asked | {"seed": seed}) for seed in (3, 4))
    assert again == choices
    assert [each["text"] for each in other] != [each["text"] for each in choices]
    (cold,) = answer(engine, asked | {"seed": 3, "temperature": 1e-6})
    assert {each["text"] for each in cold} == {next(iter(shares))}


def check_count(count: int, share: float) -> None:
    """Hold how often a label was drawn in 128 draws to its probability."""
    deviation = math.sqrt(128 * share * (1 - share))
    assert abs(count - 128 * share) <= 4 * deviation + 1


def test_a_choice_is_the_label_and_its_tokens(engine: fminfer.Engine) -> None:
    """Its logprobs are those of the label's tokens; only the likeliest labels are told."""
    (choice,) = answer(engine, ask(PROMPTS[0], LABELS, probabilities=2, logprobs=2))[0]
    assert len(choice["label_probabilities"]) == 2
    best = next(iter(choice["label_probabilities"]))
    logprobs = choice["logprobs"]
    assert choice["text"] == best
    assert len(logprobs["tokens"]) == len(logprobs["top_logprobs"])
    (_, free) = answer(
        engine,
        ask(PROMPTS[0], [best], logprobs=2),
        {"prompt": PROMPTS[0] + best, "echo": True, "max_tokens": 0, "logprobs": 2},
    )
    num = len(logprobs["tokens"])
    assert logprobs["tokens"] == free[0]["logprobs"]["tokens"][-num:]
    assert logprobs["text_offset"] == free[0]["logprobs"]["text_offset"][-num:]
    assert logprobs["token_logprobs"] == pytest.approx(
        free[0]["logprobs"]["token_logprobs"][-num:], abs=1e-4
    )


def test_one_label_has_all_of_the_mass(engine: fminfer.Engine) -> None:
    (choice,) = answer(engine, ask(PROMPTS[0], [" north and east"]))[0]
    assert choice["label_probabilities"] == {" north and east": 1.0}
    expected = score_by_echo(engine, PROMPTS[0], [" north and east"])
    assert choice["label_mass"] == pytest.approx(expected[" north and east"], rel=1e-4)


def test_several_prompts_of_a_request(engine: fminfer.Engine) -> None:
    (choices,) = answer(engine, ask(PROMPTS[0], LABELS) | {"prompt": PROMPTS})
    alone = answer(engine, *(ask(prompt, LABELS) for prompt in PROMPTS))
    for found, (expected,) in zip(choices, alone, strict=True):
        check_same(found, expected)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"top_p": 0.5}, "top_p is 0.5"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"stop": ["a"]}, "stop is"),
        ({"best_of": 3}, "best_of is 3"),
        ({"echo": True}, "echo is true"),
        ({"min_tokens": 1}, "min_tokens is 1"),
        ({"max_tokens": 1}, "longest label takes"),
        ({"max_tokens": 0}, "longest label takes"),
        ({"ignore_eos": True}, "ignore_eos is true"),
    ],
)
def test_what_changes_logits_or_ends_is_refused(
    engine: fminfer.Engine, fields: Options, words: str
) -> None:
    assert words in refuse(engine, ask(PROMPTS[0], LABELS) | fields)


def test_neutral_values_are_not(engine: fminfer.Engine) -> None:
    neutral = {"top_p": 1, "top_k": -1, "stop": [], "logit_bias": {}, "n": 1}
    plain, odd = answer(
        engine,
        ask(PROMPTS[0], LABELS),
        ask(PROMPTS[0], LABELS) | neutral | {"max_tokens": 400},
    )
    check_same(odd[0], plain[0])


def test_a_label_of_a_special_token_is_its_text(engine: fminfer.Engine) -> None:
    """Constraints do not let a model write a special token for text that spells it."""
    tokenizer = engine.tokenizer
    special = next(iter(tokenizer.special_ids))
    name = tokenizer.backend.id_to_token(special)
    (choice,) = answer(
        engine, ask(PROMPTS[0], [name, " north"]) | {"return_token_ids": True}
    )[0]
    limits = engine.intake.limits
    grammars = find_grammars(tokenizer, limits.vocab_size, limits.eos_ids)
    assert special not in grammars.vocabulary(name)
    assert choice["text"] == " north"


def test_a_cancelled_request_leaves_nothing(engine: fminfer.Engine) -> None:
    """Its branches are forgotten, whether they wait or are in a step."""
    core = engine._core
    for num_steps in range(4):
        prepared = engine.intake.prepare(engine.intake.parse(ask(PROMPTS[0], MANY)))
        request_id = core.add(prepared)
        for _ in range(num_steps):
            core.step()
        core.cancel(request_id)
        while core.has_work:
            assert not core.step()
        core.check_books()
