"""Constrained answers of a whole engine: they parse, and draw what they would draw anyway."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import fminfer
from fminfer.core.config import Constraint
from fminfer.core.errors import RequestError
from fminfer.models.known_sizes import DEMO_MODEL
from fminfer.text import grammars

Options = dict[str, Any]
PERSON: Options = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {
            "type": "array",
            "items": {"enum": ["a", "long tag", "é"]},
            "maxItems": 3,
        },
        "home": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"zip_code": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["zip_code"],
            "additionalProperties": False,
        }
    },
}
AS_PERSON: Options = {
    "response_format": {"type": "json_schema", "json_schema": {"schema": PERSON}}
}
BAN_EOS = {"0": -100}
LABELS = ["positive", "negative", "neutral", "I do not know"]


@pytest.fixture(scope="module")
def engine() -> Iterator[fminfer.Engine]:
    with fminfer.Engine(dtype="float32") as engine:
        yield engine


def choices(engine: fminfer.Engine, *requests: Options) -> list[Options]:
    """Return all choices of some requests, in order."""
    base = {"prompt": "Say it:", "max_tokens": 300, "return_token_ids": True}
    records = sorted(
        engine.run([base | r for r in requests]), key=lambda r: r.line.number
    )
    assert not any(record.error for record in records), [
        record.error for record in records
    ]
    return [
        each for record in records for each in record.to_dict()["result"]["choices"]
    ]


def refused(engine: fminfer.Engine, **request: Any) -> str:
    """Return the text of a request's error."""
    (record,) = engine.run([{"prompt": "Say it:"} | request])
    assert record.error is not None
    return record.error.message


def outputs(**ways: Any) -> Options:
    return {"structured_outputs": ways}


@pytest.mark.parametrize(
    "filters",
    [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.05}, {"frequency_penalty": 1}],
)
def test_answers_that_end_by_themselves_parse(
    engine: fminfer.Engine, filters: Options
) -> None:
    asked = [
        AS_PERSON | filters | {"seed": seed, "temperature": 1.3} for seed in range(12)
    ]
    found = choices(engine, *asked)
    whole = [each for each in found if each["finish_reason"] == "stop"]
    assert len(whole) >= 10
    for each in whole:
        value = json.loads(each["text"])
        jsonschema.validate(value, PERSON)
        assert list(value) == list(PERSON["properties"]), "the order of the schema"


def test_choices_regexes_and_grammars_hold(engine: fminfer.Engine) -> None:
    found = choices(
        engine,
        outputs(choice=LABELS) | {"n": 8, "seed": 1},
        outputs(choice=LABELS) | {"temperature": 0},
        outputs(regex=r"[A-Z][a-z]{2,9} [0-9]{3}") | {"seed": 3},
        outputs(grammar='root ::= "<" [a-c]+ ">"') | {"seed": 4},
        outputs(grammar='start: "(" /[0-9]+/ ")"') | {"seed": 5},
        outputs(json_object=True, disable_any_whitespace=True)
        | {"seed": 6, "max_tokens": 600},
    )
    assert all(each["finish_reason"] == "stop" for each in found[:-1])
    labels = [each["text"] for each in found[:9]]
    texts = [each["text"] for each in found[9:]]
    assert set(labels) <= set(LABELS) and len(set(labels)) > 1
    shapes = (r"[A-Z][a-z]{2,9} [0-9]{3}", r"<[a-c]+>", r"\([0-9]+\)", r"\{.*")
    for shape, text in zip(shapes, texts, strict=True):
        assert re.fullmatch(shape, text, re.DOTALL), text


@pytest.mark.parametrize(
    "draws", [{"temperature": 0}, {"seed": 5}, {"seed": 6, "temperature": 2}]
)
def test_an_allowed_token_is_the_unconstrained_draw(
    engine: fminfer.Engine, draws: Options
) -> None:
    """Noise is by token id, so a constraint changes a draw only where its token is not
    allowed."""
    (free,) = choices(engine, draws | {"max_tokens": 40})
    missing = re.escape(free["text"][len(free["text"]) // 2])
    regex = f"[^{missing}]*"
    (bound,) = choices(engine, draws | outputs(regex=regex) | {"logprobs": 0})
    ids = free["token_ids"]
    bound_ids = bound["token_ids"]
    end = next(
        place
        for place, pair in enumerate(zip(ids, bound_ids, strict=False))
        if len(set(pair)) > 1
    )
    limits = engine.intake.limits
    compiled = grammars.find_grammars(
        engine.tokenizer, limits.vocab_size, limits.eos_ids
    )
    matcher = compiled.find(Constraint("regex", regex)).make_matcher()
    for token_id in ids[:end]:
        matcher.advance(token_id)
    bits = matcher.mask.bits
    other = ids[end]
    assert not bits[other // 8] >> other % 8 & 1, (
        "it was allowed, and another was drawn"
    )


def test_logprobs_are_those_of_raw_logits(engine: fminfer.Engine) -> None:
    """They are the ones that scoring the same tokens gives."""
    asked = AS_PERSON | {"seed": 2, "logprobs": 2, "prompt": "A:"}
    (found,) = choices(engine, asked)
    ids = found["prompt_token_ids"] + found["token_ids"]
    (scored,) = choices(
        engine, {"prompt": ids, "echo": True, "max_tokens": 0, "logprobs": 2}
    )
    told = found["logprobs"]["token_logprobs"]
    again = scored["logprobs"]["token_logprobs"][len(found["prompt_token_ids"]) :]
    assert told == pytest.approx(again[: len(told)], abs=1e-4)


def test_tokens_without_an_alternative_take_no_step(engine: fminfer.Engine) -> None:
    """They are the same as where each is drawn, count as all do, and EOS is among them."""
    asked = [AS_PERSON | {"seed": seed, "max_tokens": 120} for seed in range(4)]
    before = engine.stats.num_steps, engine.stats.num_generated_tokens
    quick = choices(engine, *asked)
    between = engine.stats.num_steps, engine.stats.num_generated_tokens
    slow = choices(engine, *(each | {"logprobs": 0} for each in asked))
    after = engine.stats.num_steps, engine.stats.num_generated_tokens
    assert [each["token_ids"] for each in quick] == [each["token_ids"] for each in slow]
    assert [each["text"] for each in quick] == [each["text"] for each in slow]
    assert between[0] - before[0] < 0.7 * (after[0] - between[0])
    assert between[1] - before[1] == after[1] - between[1]
    eos = min(engine.intake.limits.eos_ids)
    assert all(e["token_ids"][-1] == eos for e in quick if e["finish_reason"] == "stop")


@pytest.mark.parametrize("most", range(1, 30, 4))
def test_forced_tokens_stop_at_max_tokens(engine: fminfer.Engine, most: int) -> None:
    asked = outputs(regex="begin the long words that are always the same(!|\\?)") | {
        "max_tokens": most
    }
    (found,) = choices(engine, asked)
    assert found["finish_reason"] == "length" and len(found["token_ids"]) == most


def test_rows_cut_off_inside_their_schema_are_counted(engine: fminfer.Engine) -> None:
    """One that is complete at its last token is not among them."""
    before = engine.stats.num_cut_off
    choices(
        engine,
        AS_PERSON | {"max_tokens": 9},
        outputs(choice=LABELS) | {"max_tokens": 1},
    )
    choices(engine, outputs(regex="[ab]+") | {"max_tokens": 3, "logit_bias": BAN_EOS})
    assert engine.stats.num_cut_off == before + 2


def test_bans_count_beside_a_constraint(engine: fminfer.Engine) -> None:
    """min_tokens, bad_words and allowed_token_ids narrow what it leaves, down to nothing."""
    (found,) = choices(
        engine, outputs(regex="[ab]{2,40}") | {"bad_words": ["b"], "min_tokens": 9}
    )
    assert set(found["text"]) == {"a"} and len(found["token_ids"]) >= 9
    ids = engine.tokenizer.encode("z").ids
    assert "generated token 0" in refused(
        engine, **outputs(regex="[ab]+"), allowed_token_ids=ids
    )


@pytest.mark.parametrize(
    ("way", "texts"),
    [
        ({"json": {"type": "boolean"}}, {"true", "false"}),
        ({"choice": ["yes", "no"]}, {"yes", "no"}),
        ({"choice": ["a", "ab"]}, {"ab"}),
        ({"regex": "[0-9]"}, {*"0123456789"}),
    ],
)
@pytest.mark.parametrize("more", [{}, {"logprobs": 0}, {"n": 2, "seed": 1}])
def test_min_tokens_give_way_to_an_end(
    engine: fminfer.Engine, way: Options, texts: set[str], more: Options
) -> None:
    """An answer shorter than min_tokens was an error once it was computed."""
    for each in choices(engine, outputs(**way) | more | {"min_tokens": 20}):
        assert each["text"] in texts and each["finish_reason"] == "stop"
    assert any(
        "min_tokens lengthens constrained answers" in text for text in engine.warnings
    )


def test_a_complete_answer_ends_where_bans_leave_nothing_else(
    engine: fminfer.Engine,
) -> None:
    asked = outputs(choice=["a", "ab"]) | {"min_tokens": 9, "bad_words": ["b", "ab"]}
    assert [each["text"] for each in choices(engine, asked)] == ["a"]


def test_what_leaves_no_first_token_is_found_before_computing(
    engine: fminfer.Engine,
) -> None:
    """`check` passed such a line, and the run refused it."""
    ids = engine.tokenizer.encode("z").ids
    fields = {"prompt": "a", "allowed_token_ids": ids} | outputs(regex="[ab]+")
    with pytest.raises(RequestError, match="no token for generated token 0"):
        engine.intake.parse(fields)


def test_rows_that_lose_their_blocks_go_on_where_they_were() -> None:
    """Their state is kept; tokens that no step has fed yet are fed with all others."""
    # so that few tokens are expected
    short = [{"max_tokens": 150} | outputs(choice=["a"])] * 9
    asked = [AS_PERSON | {"seed": seed, "max_tokens": 150} for seed in range(12)]
    with fminfer.Engine(
        dtype="float32", budget=400, block_size=16, prefix_cache=False
    ) as engine:
        choices(engine, *short)
        scarce = choices(engine, *asked)
        assert engine.stats.num_put_back > 0
    with fminfer.Engine(dtype="float32", chunk_size=4) as engine:
        assert choices(engine, *asked) == scarce


def test_ends_that_the_head_has_no_row_for_end_nothing(tmp_path: Path) -> None:
    """A line with min_tokens ended the run by an IndexError; one with a constraint failed."""
    shutil.copytree(DEMO_MODEL, tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        path = tmp_path / "model" / name
        path.write_text(
            json.dumps(json.loads(path.read_text()) | {"eos_token_id": [0, 500_000]})
        )
    with fminfer.Engine(str(tmp_path / "model"), dtype="float32") as engine:
        asked = [
            {"min_tokens": 2},
            outputs(choice=["a"]),
            outputs(regex="a{9}") | {"min_tokens": 2},
        ]
        *_, last = choices(engine, *asked)
    assert last["text"] == "a" * 9


def test_misspelled_keywords_of_a_schema_are_told(engine: fminfer.Engine) -> None:
    """`requried` and `maxLenght` had no effect, and nobody heard of it."""
    inner = {"type": "string", "maxLenght": 3, "title": "A"}
    schema = {
        "type": "object",
        "properties": {"minumum": inner},
        "requried": ["minumum"],
    }
    choices(engine, outputs(json=schema) | {"max_tokens": 3})
    (told,) = [
        text for text in engine.warnings if "unknown keywords of JSON schemas" in text
    ]
    assert (
        "maxLenght (did you mean maxLength?), requried (did you mean required?)" in told
    )
    assert "minumum" not in told, "a property's name"


def test_thousands_of_choices_are_followed(engine: fminfer.Engine) -> None:
    """Above 2,000, each row ended with an error of the library."""
    (found,) = choices(engine, outputs(choice=[f"label {n:05}" for n in range(10_000)]))
    assert (
        re.fullmatch(r"label 0[0-9]{4}", found["text"])
        and found["finish_reason"] == "stop"
    )


def test_classes_of_regexes_are_of_ascii(engine: fminfer.Engine) -> None:
    r"""`\d` drew digits of all scripts, which programs cannot read."""
    asked = [
        outputs(regex=r"\d{9}\w{9}") | {"seed": n, "temperature": 2} for n in range(4)
    ]
    for each in choices(engine, *asked):
        assert re.fullmatch(r"[0-9]{9}[0-9A-Za-z_]{9}", each["text"])


HOSTILE: list[Options] = [
    outputs(json={"type": "integer", "multipleOf": 123456789}),
    outputs(
        json={"allOf": [{"type": "string", "pattern": f"a.*{n}"} for n in range(100)]}
    ),
    outputs(json={"enum": [f"value {n}" for n in range(20_000)]}),
    outputs(json={"enum": ["x" * (4 << 20)]}),
    outputs(json=json.loads('{"items":' * 100 + "{}" + "}" * 100)),
    outputs(json={"not": {}}),
    outputs(json={"allOf": [{"const": 1}, {"const": 2}]}),
    outputs(regex="(a?){3000}a{3000}" + "b?" * 3000 + "b" * 3000),
    outputs(regex="(" * 2000 + ")" * 2000),
    outputs(
        grammar="root ::= r0\n"
        + "".join(f'r{n} ::= "a" r{n + 1}\n' for n in range(8000))
    ),
    outputs(grammar="root ::= " + "(" * 9000 + '"a"' + ")" * 9000),
    outputs(grammar="start: start"),
    outputs(choice=["\ud800"]),
    outputs(json={"$ref": "#/$defs/none"}),
    outputs(json={"type": "string", "format": "uri-template"}),
    outputs(json={"minimum": [], "multipleOf": {}}),
    outputs(grammar="root ::= " + "[" * 9000),
]


def test_hostile_constraints_cost_their_own_lines(engine: fminfer.Engine) -> None:
    """llguidance took hours for the first: nothing of it limits the time."""
    start = time.monotonic()
    asked = [
        HOSTILE[n % len(HOSTILE)] | {"prompt": "x", "max_tokens": 2} for n in range(200)
    ]
    records = [*engine.run([*asked, {"prompt": "x", "max_tokens": 2}])]
    assert time.monotonic() - start < 60
    good = [record for record in records if record.error is None]
    assert len(records) == 201 and [each.line.number for each in good] == [201]
    assert all(r.error.code != "internal_error" for r in records if r.error is not None)
