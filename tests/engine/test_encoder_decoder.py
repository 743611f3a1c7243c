"""An encoder and a decoder in the engine: each answer is transformers', in any mix of rows."""

from __future__ import annotations

import math
import random
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fminfer
from fminfer.core.errors import FminferError
from fminfer.engine.engine_core import BEHIND_ALL, Failed, Finished
from fminfer.text.grammars import find_grammars
from tests.conftest import more
from tests.encoder_families import make_encoder
from tests.sequence_models import TEXTS, save_sequence_model

Requests = list[dict[str, Any]]
NEW = 9
MODES: list[Any] = [
    {"kernels": "auto"},
    {"prefix_cache": False},
    {"chunk_size": 16},
    {"max_rows": 3},
    {"budget": 256, "block_size": 16},
    {"world_size": 2},
    {"tensor_parallel_size": 2},
    pytest.param({"world_size": 4, "tensor_parallel_size": 2}, marks=more),
    pytest.param({"data_group_size": 2}, marks=more),
    {"micro_batches": 1, "block_size": 8},
]


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    folder = tmp_path_factory.mktemp("t5")
    return save_sequence_model("t5", folder), str(folder)


@pytest.fixture(scope="module")
def expected(t5: Any) -> list[Any]:
    return answer(t5[1], some_requests())


def open_engine(folder: str, **options: Any) -> fminfer.Engine:
    return fminfer.Engine(folder, **({"dtype": "float32", "kernels": "off"} | options))


def answer(folder: str, requests: Requests, **options: Any) -> list[Any]:
    """Return results, or error codes, in the order of the requests."""
    with open_engine(folder, **options) as engine:
        records = sorted(engine.run(requests), key=lambda record: record.line.number)
    return [record.error.code if record.error else record.result for record in records]


def random_prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [
        [rng.randrange(3, 200) for _ in range(rng.randint(1, 60))] for _ in range(count)
    ]


def some_requests() -> Requests:
    """Return greedy and drawn rows, several choices, scores, and prompts that come twice."""
    how: dict[str, Any] = {"max_tokens": NEW, "temperature": 0, "logprobs": 2}
    prompts = random_prompts(12)
    drawn = how | {"temperature": 0.8, "seed": 3}
    rows = [how | {"prompt": prompt} for prompt in prompts]
    rows += [drawn | {"prompt": prompt, "n": 3, "top_p": 0.9} for prompt in prompts[:3]]
    rows += [
        how | {"prompt": prompts[0], "decoder_prompt": prompts[n]} for n in range(1, 4)
    ]
    scored = {"max_tokens": 0, "echo": True, "logprobs": 1}
    rows += [
        scored | {"prompt": prompts[n], "decoder_prompt": prompts[n + 1]}
        for n in range(3)
    ]
    rows.append(
        drawn | {"prompt": prompts[:3], "best_of": 3, "repetition_penalty": 1.3}
    )
    return [each | {"return_token_ids": True, "ignore_eos": True} for each in rows]


def compare(found: list[Any], expected: list[Any], tolerance: float = 1e-4) -> None:
    for one, other in zip(found, expected, strict=True):
        for ours, theirs in zip(one["choices"], other["choices"], strict=True):
            assert ours["token_ids"] == theirs["token_ids"]
            values = [each["logprobs"]["token_logprobs"] for each in (ours, theirs)]
            assert values[0] == pytest.approx(values[1], abs=tolerance)
        assert one["usage"]["prompt_tokens"] == other["usage"]["prompt_tokens"]


def oracle_logprobs(model: Any, prompt: list[int], fed: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        inputs = torch.tensor([prompt])
        own = torch.tensor([[0, *fed]])
        logits = model(input_ids=inputs, decoder_input_ids=own).logits
    found: torch.Tensor = logits[0].log_softmax(-1)
    return found


@pytest.mark.parametrize("kernels", ["off", "auto"])
def test_greedy_and_drawn_texts_are_those_of_transformers(
    t5: Any, kernels: str
) -> None:
    """30 prompts: greedy ids are `generate`'s; each drawn token's logprob is the model's."""
    model, folder = t5
    prompts = random_prompts(30, seed=1)
    how = {"max_tokens": NEW, "logprobs": 1, "return_token_ids": True}
    rows = [how | {"prompt": p, "temperature": 0} for p in prompts]
    rows += [
        how | {"prompt": p, "temperature": 0.9, "seed": n}
        for n, p in enumerate(prompts)
    ]
    results = answer(folder, rows, kernels=kernels)
    for prompt, result in zip(prompts * 2, results, strict=True):
        (choice,) = result["choices"]
        ids = choice["token_ids"]
        logprobs = oracle_logprobs(model, prompt, ids[:-1])
        told = choice["logprobs"]["token_logprobs"]
        expected = [
            logprobs[place, token_id].item() for place, token_id in enumerate(ids)
        ]
        assert told == pytest.approx(expected[: len(told)], abs=1e-4)
        if result in results[:30]:
            given = torch.tensor([prompt])
            made = model.generate(
                given, max_new_tokens=NEW, do_sample=False, num_beams=1
            )
            assert ids == made[0, 1:].tolist()
    lengths = [result["usage"]["completion_tokens"] for result in results]
    assert len(set(lengths)) > 1, "some end by themselves"


@pytest.mark.parametrize("options", MODES, ids=str)
def test_no_mode_changes_an_answer(
    t5: Any, expected: list[Any], options: dict[str, Any]
) -> None:
    _, folder = t5
    requests = some_requests()
    compare(answer(folder, requests, **options), expected)


def test_bart_starts_with_what_it_is_forced_to(tmp_path: Path) -> None:
    """A decoder prompt takes the place of the forced BOS; `generate` forces it as a
    first draw."""
    model = save_sequence_model("bart", tmp_path)
    model.generation_config.forced_bos_token_id = 7
    model.save_pretrained(tmp_path)
    prompts = random_prompts(6)
    how = {
        "max_tokens": NEW,
        "temperature": 0,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    results = answer(str(tmp_path), [how | {"prompt": prompt} for prompt in prompts])
    for prompt, result in zip(prompts, results, strict=True):
        made = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NEW + 1,
            min_new_tokens=NEW + 1,
            num_beams=1,
        )
        assert [7, *result["choices"][0]["token_ids"]] == made[0, 1:].tolist()
        assert result["usage"]["prompt_tokens"] == len(prompt)
    given = how | {"prompt": prompts[0], "decoder_prompt": [7]}
    (other,) = answer(str(tmp_path), [given])
    assert other["choices"][0]["token_ids"] == results[0]["choices"][0]["token_ids"]


def test_texts_sentinels_and_scores(t5: Any) -> None:
    model, folder = t5
    with open_engine(folder) as engine:
        hf = engine.tokenizer.hf
        rows = [
            {"prompt": t, "max_tokens": NEW, "temperature": 0, "logprobs": 0}
            for t in TEXTS
        ]
        rows.append({"prompt": TEXTS[0], "decoder_prompt": TEXTS[1], "max_tokens": 0})
        rows[-1] |= {"echo": True, "logprobs": 2}
        rows.append(
            {"prompt": TEXTS[0], "max_tokens": 3, "echo": True, "temperature": 0}
        )
        results = [
            r.result for r in sorted(engine.run(rows), key=lambda r: r.line.number)
        ]
    for text, result in zip(TEXTS, results, strict=False):
        assert result is not None
        ids = hf(text).input_ids
        assert result["usage"]["prompt_tokens"] == len(ids)
        made = model.generate(torch.tensor([ids]), max_new_tokens=NEW, num_beams=1)[0]
        assert result["choices"][0]["text"] == hf.decode(made, skip_special_tokens=True)
    scored, echoed = results[-2:]
    assert scored is not None and echoed is not None
    ids = hf(TEXTS[1], add_special_tokens=False).input_ids
    logprobs = oracle_logprobs(model, hf(TEXTS[0]).input_ids, ids[:-1])
    told = scored["choices"][0]["logprobs"]
    expected = [logprobs[place, token_id].item() for place, token_id in enumerate(ids)]
    assert told["token_logprobs"] == pytest.approx(expected, abs=1e-4), (
        "each token has one"
    )
    assert scored["choices"][0]["text"] == TEXTS[1]
    assert [*map(len, told.values())] == [len(ids)] * 4
    assert echoed["choices"][0]["text"].startswith(TEXTS[0])


def test_stops_and_streams(t5: Any) -> None:
    _, folder = t5
    how: dict[str, Any] = {
        "max_tokens": 20,
        "temperature": 2,
        "seed": 1,
        "ignore_eos": True,
    }
    rows = [how | {"prompt": text} for text in TEXTS]
    texts = [result["choices"][0]["text"] for result in answer(folder, rows)]
    whole = max(texts, key=len)
    row = rows[texts.index(whole)]
    stop = whole[3:5]
    (cut,) = answer(folder, [row | {"stop": stop}])
    assert len(stop) == 2 and cut["choices"][0]["text"] == whole[: whole.index(stop)]
    with open_engine(folder) as engine:
        engine.add(row, is_streamed=True)
        events = []
        while engine.has_work:
            events += engine.step()
    assert (
        "".join(event.text for event in events if not isinstance(event, Finished))
        == whole
    )


def test_a_prompt_is_read_once(t5: Any) -> None:
    """However many choices it has, and however often it comes, while there is room for it."""
    _, folder = t5
    prompt = random_prompts(1)[0] * 2
    rows: Requests = [
        {"prompt": prompt, "max_tokens": NEW, "n": 4, "seed": n} for n in range(5)
    ]
    with open_engine(folder, kernels="off") as engine:
        results = [record.result for record in engine.run(rows)]
        assert engine.stats.num_cached_tokens == 4 * len(prompt)
        # each row's first token is the decoder's
        read = engine.stats.num_prompt_tokens - 5
        assert read == len(prompt)
    cached = [
        r["usage"]["prompt_tokens_details"]["cached_tokens"] for r in results if r
    ]
    assert sorted(cached) == [0] + [len(prompt)] * 4


def test_rows_that_lost_their_blocks_read_again_or_find_their_memory(t5: Any) -> None:
    _, folder = t5
    rows: Requests = [
        {"prompt": prompt, "max_tokens": 40, "temperature": 0, "logprobs": 0}
        | {"return_token_ids": True, "ignore_eos": True}
        for prompt in random_prompts(12, seed=4)
    ]
    with open_engine(folder, budget=256, block_size=8) as engine:
        # It expects short rows, for all that ended so far were: then some must give way.
        engine_rows = [row | {"max_tokens": 40, "stop_token_ids": []} for row in rows]
        learned = [
            row | {"ignore_eos": False, "prompt": [n]} for n, row in enumerate(rows, 3)
        ]
        list(engine.run([row | {"stop_token_ids": [*range(300)]} for row in learned]))
        found = sorted(engine.run(engine_rows), key=lambda record: record.line.number)
        assert engine.stats.num_put_back > 0
    compare([record.result for record in found], answer(folder, rows))


@pytest.mark.parametrize(
    ("kernels", "value"),
    [
        ("off", "int8"),
        ("auto", "int4"),
        pytest.param("off", "int4", marks=more),
        pytest.param("auto", "int8", marks=more),
    ],
)
def test_weights_of_few_bits(t5: Any, value: str, kernels: str) -> None:
    """Answers are near those of floats, and two ranks give the same."""
    _, folder = t5
    rows = [
        row | {"temperature": 0, "n": 1, "best_of": 1} for row in some_requests()[:12]
    ]
    some = answer(folder, rows, quantize=value, kernels=kernels)
    other = answer(folder, rows, quantize=value, kernels=kernels, world_size=2)
    compare(some, other)


def test_what_is_refused(t5: Any) -> None:
    _, folder = t5
    long = [5] * 9000
    rows: Requests = [
        {"prompt": TEXTS[0], "echo": True, "logprobs": 1, "max_tokens": 1},
        {"prompt": long, "max_tokens": 1},
        {"prompt": [5], "decoder_prompt": [999], "max_tokens": 1},
        {"prompt": [5], "decoder_prompt": 5, "max_tokens": 1},
        {"prompt": [5], "decoder_prompt": long, "max_tokens": 1},
        {"messages": [{"role": "user", "content": "hello"}]},
        {"prompt": [5], "max_tokens": 1},
    ]
    *codes, last = answer(folder, rows)
    assert codes == [
        "unsupported_parameter",
        "context_length_exceeded",
        "token_out_of_range",
        "invalid_type",
        "context_length_exceeded",
        "unsupported_parameter",
    ]
    assert last["choices"]
    with open_engine(folder, max_model_len=64, on_too_long="truncate-left") as engine:
        (record,) = engine.run([{"prompt": [*range(3, 103)], "max_tokens": 64 - 1}])
        assert record.error is None
        assert (
            record.result is not None and record.result["usage"]["prompt_tokens"] == 64
        )
    with fminfer.Engine(dtype="float32") as engine:
        (record,) = engine.run([{"prompt": "a", "decoder_prompt": "b"}])
        assert record.error is not None and "no encoder" in record.error.message


def test_what_is_too_long_for_the_memory_is_refused_with_what_there_is(t5: Any) -> None:
    _, folder = t5
    with open_engine(folder) as engine:
        engine.pipeline.core._scheduler.most_read = 20
        found = {
            r.line.number: r
            for r in engine.run([{"prompt": [5] * n} for n in (20, 21)])
        }
    assert found[1].error is None and found[2].error is not None
    assert found[2].error.code == "out_of_memory" and "for 20" in found[2].error.message


def test_a_cancelled_request_leaves_nothing_behind(t5: Any) -> None:
    """While it waits, while it is read, while its memory waits, and while it draws."""
    _, folder = t5
    row: dict[str, Any] = {"max_tokens": 30, "n": 2, "seed": 1, "ignore_eos": True}
    prompts = random_prompts(3, seed=9)
    with closing(open_engine(folder)) as engine:
        for num_steps in range(8):
            ids = [engine.add(row | {"prompt": prompt}) for prompt in prompts]
            for _ in range(num_steps):
                engine.step()
            for request_id in ids[:2]:
                engine.cancel(request_id)
            events = []
            while engine.has_work:
                events += engine.step()
            assert [type(event) for event in events if event.request_id == ids[2]] == [
                Finished
            ]
            engine.pipeline.core.check_books()


def test_a_prompt_whose_memory_is_nan_spoils_no_other(t5: Any, tmp_path: Path) -> None:
    """Those that share it have a verdict of their own, and the next run of it begins anew."""
    model = save_sequence_model("t5", tmp_path)
    with torch.no_grad():
        model.shared.weight[77] = float("nan")
        model.lm_head.weight = torch.nn.Parameter(
            model.shared.weight.nan_to_num(0.1).clone()
        )
    model.config.tie_word_embeddings = False
    model.save_pretrained(tmp_path)
    rows: Requests = [
        {"prompt": [5, 77, 6], "max_tokens": 3, "seed": n} for n in range(3)
    ]
    rows += [{"prompt": [5, 78, 6], "max_tokens": 3, "seed": n} for n in range(3)]
    assert [isinstance(each, dict) for each in answer(str(tmp_path), rows)] == [
        False
    ] * 3 + [True] * 3


def test_ranks_have_layers_of_both(t5: Any) -> None:
    _, folder = t5
    with open_engine(folder, world_size=2) as engine:
        parts = [rank.part for rank in engine.pipeline.plan.ranks]
    assert [part.layer_numbers for part in parts] == [[0, 2], [1, 3, 4]], (
        "the decoder's come first"
    )
    with pytest.raises(FminferError, match="2 layers"):
        open_engine(folder, world_size=3)


def test_in_float16_what_overflows_stays_finite(tmp_path: Path) -> None:
    """`wo` is float32 there, and sums are clamped, as in transformers."""
    model = save_sequence_model("t5", tmp_path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("wo.weight"):
                parameter *= 3e4
    model.save_pretrained(tmp_path)
    rows: Requests = [
        {"prompt": prompt, "max_tokens": 3} for prompt in random_prompts(3)
    ]
    assert all(
        isinstance(each, dict) for each in answer(str(tmp_path), rows, dtype="float16")
    )


def finish_beside_others(
    engine: fminfer.Engine, first: list[int], second: list[int]
) -> set[str]:
    """Return which end beside 40 live rows: a batch's prompt, and a live one that comes
    later."""
    rng = random.Random(0)
    for number in range(40):
        how = {
            "max_tokens": rng.randint(200, 300),
            "temperature": 0,
            "ignore_eos": True,
        }
        engine.add({"prompt": [3 + number, 5, 7]} | how)
    for _ in range(15):
        engine.step()
    short = {"max_tokens": 2, "ignore_eos": True}
    names = {engine.add({"prompt": first} | short, priority=BEHIND_ALL): "batch"}
    for number in range(100):
        if number == 3:
            names[engine.add({"prompt": second} | short)] = "live"
        for event in engine.step():
            names.pop(event.request_id, "")
    return set(names.values())


@pytest.mark.parametrize("second", [[9, 9, 9], [8, 9]])
def test_prompts_behind_all_are_read_in_their_turn(t5: Any, second: list[int]) -> None:
    """They never were while two steps of live rows were in flight; nor was an equal
    live prompt."""
    with open_engine(t5[1], chunk_size=32) as engine:
        assert not finish_beside_others(engine, [9, 9, 9], second)


def test_blocks_of_an_unread_prompt_go_to_a_live_one(t5: Any) -> None:
    with open_engine(t5[1], chunk_size=32, block_size=16, budget=40 * 336) as engine:
        free = engine.pipeline.core._scheduler.pool.num_blocks - 40 * 20
        left = finish_beside_others(engine, [9, 5] * (4 * free), [8] * 100)
        assert "live" not in left


def test_the_last_rank_has_the_encoders_final_norm(tmp_path: Path) -> None:
    """With fewer layers than ranks the first rank had them, and the norm was left out."""
    model = make_encoder("mbart")
    config = model.config
    config.encoder_layers = 1
    config.decoder_layers = 2
    model = type(model)(config).eval()
    with torch.no_grad():
        model.model.encoder.layer_norm.weight *= 3
    model.save_pretrained(tmp_path)
    rows: Requests = [
        {"prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0, "logprobs": 0}
    ]
    how: dict[str, Any] = {"skip_tokenizer_init": True}
    rows[0]["return_token_ids"] = True
    compare(
        answer(str(tmp_path), rows, **how, world_size=2),
        answer(str(tmp_path), rows, **how),
    )


def test_a_source_is_as_long_as_its_positions(tmp_path: Path) -> None:
    """With echo one token more was read, for which BART has no position: that ended the run."""
    save_sequence_model("bart", tmp_path)
    rows: Requests = [
        {"prompt": [5] * n, "max_tokens": 2, "echo": True} for n in (128, 129)
    ]
    first, second = answer(str(tmp_path), rows)
    assert isinstance(first, dict) and second == "context_length_exceeded"


def test_an_empty_decoder_prompt_is_none_and_a_cut_text_keeps_its_end(t5: Any) -> None:
    _, folder = t5
    how: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "return_token_ids": True}
    rows: Requests = [
        {"prompt": [5, 6], "decoder_prompt": each} | how for each in ("", [], None)
    ]
    ids = [result["choices"][0]["token_ids"] for result in answer(folder, rows)]
    assert ids[0] == ids[1] == ids[2]
    with open_engine(folder, max_model_len=9, on_too_long="truncate-right") as engine:
        prepared = engine.prepare({"prompt": TEXTS[0], "max_tokens": 4})
        whole = engine.tokenizer.encode(TEXTS[0]).ids
    assert prepared.sources[0].ids == [*whole[:8], 1]


def test_a_failed_request_is_told_once(t5: Any) -> None:
    _, folder = t5
    with open_engine(folder) as engine:
        engine.add({"prompt": [[5, 6], [7]], "max_tokens": 2})
        events = []
        while engine.has_work:
            events += engine.step()
    (event,) = events
    assert not isinstance(event, Failed) and np.isscalar(event.request_id)


@pytest.mark.parametrize("options", [{}, {"max_rows": 2}, {"prefix_cache": False}])
def test_label_probabilities_are_those_of_a_scored_decoder_prompt(
    t5: Any, options: dict[str, Any]
) -> None:
    """Every branch of the labels reads the encoder output of their prompt."""
    prompts = random_prompts(3)
    with open_engine(t5[1], **options) as engine:
        limits = engine.intake.limits
        vocabulary = find_grammars(
            engine.tokenizer, limits.vocab_size, limits.eos_ids
        ).vocabulary
        words = [word for text in TEXTS for word in text.split()]
        labels = [" ".join(["", *words[:size]]) for size in (1, 2, 4)] + words[-2:]
        paths = {label: vocabulary(label) for label in dict.fromkeys(labels)}
        outputs = {"choice": [*paths], "probabilities": True}
        asked = [{"prompt": each, "structured_outputs": outputs} for each in prompts]
        scored = {"max_tokens": 0, "echo": True, "logprobs": 0}
        asked += [
            scored | {"prompt": prompt, "decoder_prompt": path}
            for prompt in prompts
            for path in paths.values()
        ]
        records = sorted(engine.run(asked), key=lambda record: record.line.number)
    answers = [record.choices[0].fields for record in records]
    whole = iter(
        math.exp(sum(each["logprobs"]["token_logprobs"][-size:]))
        for each, size in zip(
            answers[len(prompts) :],
            [len(path) for _ in prompts for path in paths.values()],
            strict=True,
        )
    )
    for choice in answers[: len(prompts)]:
        masses = {label: next(whole) for label in paths}
        outer = [
            label for label, path in paths.items() if path[:1] != paths[labels[0]][:1]
        ]
        mass = masses[labels[0]] + sum(masses[label] for label in outer)
        assert choice["label_mass"] == pytest.approx(mass, rel=1e-3)
        assert choice["text"] == next(iter(choice["label_probabilities"]))
        share = masses[labels[2]] / mass
        assert choice["label_probabilities"][labels[2]] == pytest.approx(
            share, abs=1e-4
        )
