"""What a seeded answer depends on, and what not: spelling, further wishes, the way it came."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fminfer
from fminfer.files.input_folders import find_inputs
from fminfer.files.line_reader import read_lines
from fminfer.files.output_paths import require_output_paths
from fminfer.split.merging import merge_parts
from fminfer.split.splitting import SplitOptions, split_file
from tests.conftest import run_files
from tests.streams import answer_in, events_of

SEEDED: dict[str, Any] = {
    "prompt": "Question: How do you go",
    "max_tokens": 12,
    "temperature": 1,
    "top_p": 1,
    "frequency_penalty": 1,
    "logit_bias": {"70": 1, "71": -1},
    "return_token_ids": True,
    "seed": 7,
}
UNSEEDED = {name: value for name, value in SEEDED.items() if name != "seed"}


Answer = list[list[int]]  # the ids of each choice


@pytest.fixture(scope="module")
def engine(llama_checkpoint: tuple[Path, Any]) -> Iterator[fminfer.Engine]:
    """Give a model that has no end of its own."""
    engine = fminfer.Engine(str(llama_checkpoint[0]), dtype="float32")
    yield engine
    engine.close()


def by_add(engine: fminfer.Engine, **request: Any) -> Answer:
    request_id = engine.add(request)
    return [choice["token_ids"] for choice in answer_in(events_of(engine), request_id)]


def by_run(engine: fminfer.Engine, *requests: dict[str, Any]) -> list[Answer]:
    records = sorted(engine.run(requests), key=lambda record: record.line.number)
    return [
        [c["token_ids"] for c in record.to_dict()["result"]["choices"]]
        for record in records
    ]


def by_file(engine: fminfer.Engine, folder: Path, *lines: str) -> list[Answer]:
    source = folder / "in.jsonl"
    output = folder / "out.jsonl"
    source.write_text("".join(line + "\n" for line in lines))
    run_files(engine, [source], [output])
    records = [json.loads(line) for line in output.read_text().splitlines()]
    return [[c["token_ids"] for c in record["result"]["choices"]] for record in records]


def num_different(answers: Answer) -> int:
    return len(set(map(tuple, answers)))


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": False},
        {"user": "somebody", "tag": 5},
        {"logprobs": 3},
        {"echo": False, "ignore_eos": True},
        {
            "temperature": 1.0,
            "top_p": 1.0,
            "frequency_penalty": 1.0,
            "max_tokens": 12.0,
        },
        {"presence_penalty": -0.0, "min_p": 0, "top_k": 0, "suffix": None},
        {"logit_bias": {"71": -1.0, "70": 1.0}},
        {"allowed_token_ids": None, "bad_words": [], "truncate_prompt_tokens": None},
        {"truncate_prompt_tokens": 50, "truncation_side": "right"},
        {"prompt": [SEEDED["prompt"]]},
        {"stop": "never said", "min_tokens": 2},
        {"best_of": 1, "n": 1},
    ],
)
def test_a_seeded_answer_is_the_same(
    engine: fminfer.Engine, fields: dict[str, Any]
) -> None:
    expected = by_add(engine, **SEEDED)
    assert by_add(engine, **SEEDED | fields) == expected
    reversed_keys = dict(reversed((SEEDED | fields).items()))
    assert by_run(engine, reversed_keys) == [expected]


def test_larger_n_and_max_tokens_begin_the_same(engine: fminfer.Engine) -> None:
    (ids,) = by_add(engine, **SEEDED)
    several = by_add(engine, **SEEDED | {"n": 4})
    assert several[0] == ids and num_different(several) == 4
    assert by_add(engine, **SEEDED | {"n": 6})[:4] == several
    (longer,) = by_add(engine, **SEEDED | {"max_tokens": 30})
    assert longer[:12] == ids and len(longer) == 30
    both = by_add(engine, **SEEDED | {"max_tokens": 30, "n": 2})
    assert both[0] == longer and both[1][:12] == several[1]


def test_prompts_of_one_request_draw_by_their_place(engine: fminfer.Engine) -> None:
    prompt = SEEDED["prompt"]
    assert num_different(by_add(engine, **SEEDED | {"prompt": [prompt] * 3})) == 3
    ids = engine.tokenizer.encode(prompt).ids
    assert by_add(engine, **SEEDED | {"prompt": ids}) == by_add(engine, **SEEDED)
    assert by_add(engine, **SEEDED | {"prompt": [ids]}) == by_add(engine, **SEEDED)


@pytest.mark.parametrize(
    "fields", [{"seed": 8}, {"temperature": 1.1}, {"prompt": "Question: How"}]
)
def test_what_changes_a_seeded_answer(
    engine: fminfer.Engine, fields: dict[str, Any]
) -> None:
    assert by_add(engine, **SEEDED | fields) != by_add(engine, **SEEDED)


def test_every_way_gives_the_seeded_answer(
    engine: fminfer.Engine, tmp_path: Path
) -> None:
    expected = by_add(engine, **SEEDED)
    wrapped = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    lines = (
        json.dumps(SEEDED),
        json.dumps(SEEDED | {"stream": False}, indent=None, separators=(" , ", " : ")),
        json.dumps({"request": dict(sorted(SEEDED.items()))}),
    )
    assert by_file(engine, tmp_path, *lines) == [expected] * 3
    batch = json.dumps(wrapped | {"body": SEEDED | {"model": "x"}})
    output = tmp_path / "batch.jsonl"
    (tmp_path / "b.jsonl").write_text(batch + "\n")
    run_files(engine, [tmp_path / "b.jsonl"], [output])
    record = json.loads(output.read_text())
    assert [c["token_ids"] for c in record["response"]["body"]["choices"]] == expected
    assert by_run(engine, SEEDED, SEEDED | {"user": "x"}) == [expected] * 2


def test_equal_ones_without_a_seed_differ(
    engine: fminfer.Engine, tmp_path: Path
) -> None:
    added = [by_add(engine, **UNSEEDED)[0] for _ in range(4)]
    assert num_different(added) == 4
    listed = [
        UNSEEDED,
        UNSEEDED | {"prompt": [UNSEEDED["prompt"]]},
        UNSEEDED | {"user": "x"},
    ]
    ran = by_run(engine, *listed)
    assert num_different([ids for (ids,) in ran]) == 3
    lines = [json.dumps(dict(reversed(each.items()))) for each in listed]
    assert by_file(engine, tmp_path, *lines) == ran, (
        "they are counted, whatever their spelling"
    )


def test_a_split_file_draws_as_the_whole_file(
    engine: fminfer.Engine, tmp_path: Path
) -> None:
    """Equal lines were counted anew in each part, and drew what those of other parts
    had drawn."""
    spellings = [UNSEEDED, UNSEEDED | {"n": UNSEEDED.get("n", 1), "top_p": 1.0}, SEEDED]
    whole = tmp_path / "whole.jsonl"
    whole.write_text("".join(json.dumps(row) + "\n" for row in spellings * 4))
    run_files(engine, [whole], [tmp_path / "whole.answers.jsonl"])
    split_file(whole, tmp_path / "parts", SplitOptions(100, 200))
    parts = find_inputs([tmp_path / "parts"])
    assert len(parts) > 4
    run_files(engine, parts, require_output_paths(parts, None))
    merge_parts(tmp_path / "parts", tmp_path / "merged.jsonl")
    found = [
        [
            [choice["text"] for choice in json.loads(line)["result"]["choices"]]
            for line in path.read_text().splitlines()
        ]
        for path in (tmp_path / "whole.answers.jsonl", tmp_path / "merged.jsonl")
    ]
    assert found[0] == found[1] and num_different(found[1]) == 9
    counts = [[line.num_equal for line in read_lines(part, 0)] for part in parts]
    assert sorted(count or 0 for part in counts for count in part) == [0] * 5 + [
        *range(1, 8)
    ]
    part = parts[0]
    assert counts[0] == [None, 2]
    part.write_bytes(part.read_bytes() + b"\n")
    assert not any(line.num_equal for line in read_lines(part, 0)), (
        "it is not what was split"
    )


def test_lines_that_a_run_refuses_do_not_count_in_a_split_file(
    engine: fminfer.Engine, tmp_path: Path
) -> None:
    """Behind a repeated custom_id, or a wrong method, parts drew otherwise than the
    whole file."""

    def line(name: str, method: str = "POST") -> str:
        asked = {"custom_id": name, "method": method, "url": "/v1/completions"}
        return json.dumps(asked | {"body": UNSEEDED})

    whole = tmp_path / "whole.jsonl"
    answers = tmp_path / "answers.jsonl"
    lines = [line("0", "GET"), line("1"), line("1"), line("2"), line("3")]
    whole.write_text("\n".join(lines) + "\n")
    run_files(engine, [whole], [answers])
    split_file(whole, tmp_path / "parts", SplitOptions(100, 1000))
    parts = find_inputs([tmp_path / "parts"])
    outputs = require_output_paths(parts, None)
    run_files(engine, parts, outputs)

    def texts(*paths: Path) -> dict[str, list[str]]:
        records = [
            json.loads(line) for path in paths for line in path.read_text().splitlines()
        ]
        return {
            each["custom_id"]: [
                choice["text"] for choice in each["response"]["body"]["choices"]
            ]
            for each in records
        }

    assert texts(answers) == texts(*outputs)
    assert sorted(texts(answers)) == ["1", "2", "3"], (
        "the repeated id is refused in the part, too"
    )


def test_equal_lines_of_several_files_are_told(
    engine: fminfer.Engine, tmp_path: Path
) -> None:
    """A file cut by hand gave half as many different answers, and nobody said why."""

    def warnings(*files: list[dict[str, Any]]) -> list[str]:
        paths = [tmp_path / f"{number}.jsonl" for number in range(len(files))]
        for path, rows in zip(paths, files, strict=True):
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        terms = {"restart": True}
        return [
            *run_files(
                engine, paths, require_output_paths(paths, None), **terms
            ).warnings
        ]

    other = UNSEEDED | {"prompt": "another"}
    assert not warnings([UNSEEDED, UNSEEDED]) and not warnings(
        [UNSEEDED, SEEDED], [other, SEEDED]
    )
    for later in ([UNSEEDED, UNSEEDED], [other]):
        (told,) = warnings([UNSEEDED], [other], later)
        assert "equal lines without a seed stand in several files" in told


def test_a_list_of_one_prompt_draws_as_the_prompt(engine: fminfer.Engine) -> None:
    """Also without a seed, where it is the first of its kind."""
    as_list = UNSEEDED | {"prompt": [UNSEEDED["prompt"]]}
    assert by_run(engine, as_list) == by_run(engine, UNSEEDED)


def test_greedy_answers_have_no_seed(engine: fminfer.Engine) -> None:
    greedy = SEEDED | {"temperature": 0}
    assert by_add(engine, **greedy) == by_add(engine, **greedy | {"seed": 8})
