"""The engine with a small real model: draws belong to their request, neighbours do not
matter."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import random
import re
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fminfer
from fminfer.compute.sampling.sampler import score_tokens
from fminfer.compute.values.step import Step, StepResult
from fminfer.core import errors
from fminfer.core.config import EngineConfig, make_config
from fminfer.core.errors import PipelineError, StepLimitError
from fminfer.machine.device import describe_slow_dtype
from fminfer.models.checkpoint import open_model
from fminfer.models.layer_source import open_weights
from fminfer.pipeline.local import LocalPipeline
from fminfer.text.encoded_prompt import EncodedPrompt

Options = dict[str, Any]


@pytest.fixture
def engine(llama_checkpoint: tuple[Path, Any]) -> Iterator[fminfer.Engine]:
    engine = fminfer.Engine(str(llama_checkpoint[0]), dtype="float32", kernels="off")
    yield engine
    engine.close()


def texts(engine: fminfer.Engine, requests: list[Options]) -> list[list[str]]:
    records = sorted(engine.run(requests), key=lambda record: record.line.number)
    return [
        [
            "".join(c["logprobs"]["tokens"])
            for c in record.to_dict()["result"]["choices"]
        ]
        for record in records
    ]


def sampled(index: int, **fields: Any) -> Options:
    prompt = random.Random(index).choices(range(300), k=1 + index * 7 % 60)
    return {
        "prompt": prompt,
        "max_tokens": 8,
        "temperature": 1.2,
        "logprobs": 0,
    } | fields


def test_text_is_the_same_alone_and_among_others(engine: fminfer.Engine) -> None:
    requests = [sampled(i, top_p=0.9, seed=i, n=1 + i % 2) for i in range(33)]
    together = texts(engine, requests)
    for index in (0, 7, 32):
        assert texts(engine, [requests[index]]) == [together[index]]


def test_a_shuffled_file_gives_the_same_answers(engine: fminfer.Engine) -> None:
    requests = [sampled(i, tag=i) for i in range(20)]  # without seeds
    order = random.Random(1).sample(range(20), 20)
    expected = texts(engine, requests)
    assert texts(engine, [requests[i] for i in order]) == [expected[i] for i in order]


def test_equal_lines_differ_without_a_seed_and_agree_with_one(
    llama_checkpoint: tuple[Path, Any],
) -> None:
    runs = []
    for _ in range(2):
        engine = fminfer.Engine(
            str(llama_checkpoint[0]), dtype="float32", kernels="off"
        )
        unseeded = sampled(3)
        seeded = sampled(3, seed=9)
        runs.append(texts(engine, [unseeded] * 4 + [seeded] * 3))
        engine.close()
    assert runs[0] == runs[1], "a whole run repeats"
    assert len({answer[0] for answer in runs[0][:4]}) == 4
    assert len({answer[0] for answer in runs[0][4:]}) == 1


def test_candidates_share_their_prompt_and_differ(engine: fminfer.Engine) -> None:
    """The prompt's last block is half full, so each candidate writes into a copy of its own."""
    request = sampled(5, n=6, max_tokens=40)
    (together,) = texts(engine, [request])
    assert len(set(together)) == 6
    greedy = {
        "prompt": request["prompt"],
        "max_tokens": 40,
        "temperature": 0,
        "logprobs": 0,
    }
    others = [sampled(i, n=5, max_tokens=30) for i in range(8)]
    alone = texts(engine, [greedy])
    assert texts(engine, [*others, greedy, *others])[8] == alone[0]
    assert texts(engine, [*others, request])[8] == together


def test_best_of_returns_the_candidates_with_the_highest_mean_logprob(
    engine: fminfer.Engine,
) -> None:
    prompt = sampled(5)["prompt"]
    request = {
        "prompt": prompt,
        "max_tokens": 6,
        "logprobs": 0,
        "seed": 4,
        "temperature": 1,
    }
    # The draws of a candidate depend on the request's bytes: ask for all of the very
    # same request.
    (record,) = engine.run([request | {"n": 2, "best_of": 7}])
    result = record.to_dict()["result"]
    means = [sum(c["logprobs"]["token_logprobs"]) / 6 for c in result["choices"]]
    assert len(means) == 2 and means[0] >= means[1]
    assert result["usage"]["completion_tokens"] == 42
    (every,) = engine.run([request | {"n": 7}])
    spread = [
        sum(c["logprobs"]["token_logprobs"]) / 6
        for c in every.to_dict()["result"]["choices"]
    ]
    assert means[0] > sorted(spread)[3], (
        "the best of seven is above the middle of seven others"
    )


def test_few_rows_stay_one_micro_batch(engine: fminfer.Engine) -> None:
    """Two half-filled micro-batches that never meet would read all weights twice as often."""
    requests = [sampled(i, max_tokens=20, temperature=0) for i in range(16)]
    list(engine.run(requests))
    assert engine.stats.num_steps <= 20 + 4


def test_stages_work_while_records_are_handled(engine: fminfer.Engine) -> None:
    """The next step was given only after a record was built and written and new lines
    were read."""
    row = {"temperature": 0, "ignore_eos": True}
    run = engine.run([row | {"prompt": "a", "max_tokens": n} for n in (2, 90)])
    next(run)
    assert engine.pipeline.stages.num_in_flight > 0
    run.close()


def test_nan_weights_cost_each_row_an_error_and_not_the_run(
    llama_checkpoint: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token's embedding is nan: the rows that hold it fail, their neighbours are
    unharmed."""

    def load_damaged(*arguments: Any, **options: Any) -> Any:
        source: Any = open_weights(*arguments, **options)
        entry = source.load_entry()
        entry["embed.weight"].plain[77] = float("nan")
        source.load_entry = lambda: entry
        return source

    monkeypatch.setattr("fminfer.runtime.load.builder.open_weights", load_damaged)
    engine = fminfer.Engine(
        str(llama_checkpoint[0]),
        dtype="float32",
        kernels="off",
        budget=512,
        # a prefix from the cache may round the last digit otherwise
        prefix_cache=False,
    )
    clean = {"prompt": [1, 2, 3, 4], "max_tokens": 5, "temperature": 0, "logprobs": 1}
    poisoned = clean | {"prompt": [1, 2, 77, 4]}
    scored = poisoned | {"echo": True, "max_tokens": 0}
    records = sorted(
        engine.run([clean, poisoned, clean, scored, *[clean] * 20]),
        key=lambda r: r.line.number,
    )
    engine.close()
    codes = [record.error.code if record.error else None for record in records]
    assert codes == [None, "nan_logits", None, "nan_logits"] + [None] * 20
    answers = [
        record.to_dict()["result"]["choices"] for record in records if not record.error
    ]
    assert all(answer == answers[0] for answer in answers), (
        "blocks of a nan row are used again"
    )
    sound = llama_checkpoint[1](torch.tensor([[77]])).logits
    assert not sound.isnan().any(), "the file is sound"


def test_a_nan_score_is_shared_with_nobody(
    llama_checkpoint: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second line took the score from the prefix cache: as null, and later as its
    own error."""

    def score_damaged(logits: torch.Tensor, ids: torch.Tensor, *rest: Any) -> Any:
        draws = score_tokens(logits, ids, *rest)
        draws.logprobs[ids == 77] = float("nan")
        return draws

    monkeypatch.setattr("fminfer.forward.stage.score_tokens", score_damaged)
    engine = fminfer.Engine(str(llama_checkpoint[0]), dtype="float32", kernels="off")
    asked = {
        "prompt": [5, 77, *range(30)],
        "max_tokens": 0,
        "echo": True,
        "logprobs": 0,
    }
    codes = []
    for _ in range(2):
        (record,) = engine.run([asked])
        codes.append(None if record.error is None else record.error.code)
    engine.close()
    assert engine.stats.num_cached_tokens == 0
    assert codes == ["nan_logits", "nan_logits"]


def test_a_cut_inside_a_character_loses_nothing_that_is_drawn(
    llama_checkpoint: tuple[Path, Any],
) -> None:
    """The cut prompt ends in half an emoji, and the model draws the other half."""
    engine = fminfer.Engine(
        str(llama_checkpoint[0]),
        dtype="float32",
        kernels="off",
        on_too_long="truncate-right",
    )
    emoji = list("🙂".encode())
    prompt = "x" * 252 + "🙂"
    asked = {"max_tokens": 1, "logit_bias": {str(emoji[3]): 100}, "temperature": 0}
    (record,) = engine.run([asked | {"prompt": prompt}])
    engine.close()
    assert (
        record.to_dict()["result"]["usage"]["prompt_tokens_details"]["truncated_tokens"]
        == 1
    )
    assert record.to_dict()["result"]["choices"][0]["text"] == "🙂"


@pytest.mark.parametrize("kernels", ["off", "auto"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits_are_as_near_as_transformers_own(
    dtype: Any, kernels: Any, llama_checkpoint: tuple[Path, Any]
) -> None:
    """On a processor without units for them they are slow, which the run says, and right."""
    folder, model = llama_checkpoint
    ids = list(range(40, 90))
    rows = [{"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 0}]
    rows.append({"prompt": ids[:9], "max_tokens": 6, "temperature": 0, "logprobs": 0})
    with closing(fminfer.Engine(str(folder), dtype=dtype, kernels=kernels)) as engine:
        scored, drawn = (
            record.to_dict()["result"]["choices"][0] for record in engine.run(rows)
        )
        assert (
            describe_slow_dtype(engine.dtype, engine.device)
            in engine.facts.measured.why_slower
        )
    assert len(drawn["logprobs"]["tokens"]) == 6 and drawn["finish_reason"] == "length"
    found = torch.tensor(scored["logprobs"]["token_logprobs"][1:])
    exact = logprobs_of(model, ids)
    theirs = logprobs_of(copy.deepcopy(model).to(getattr(torch, dtype)), ids) - exact
    assert (found - exact).abs().max() < 1.5 * theirs.abs().max()


@torch.no_grad()
def logprobs_of(model: Any, ids: list[int]) -> torch.Tensor:
    """Return transformers' logprob of each token but the first."""
    logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)
    return logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def test_what_is_no_dict_costs_one_record(engine: fminfer.Engine) -> None:
    """It ended the run, where a bad dict costs one record."""
    circle: dict[str, Any] = {"prompt": "x"}
    circle["self"] = circle
    odd: list[Any] = [
        b"hello",
        [1],
        5,
        {"prompt": b"x"},
        circle,
        object(),
        {"prompt": "x"},
    ]
    records = sorted(engine.run(odd), key=lambda record: record.line.number)
    messages = [record.error.message if record.error else "" for record in records]
    assert (
        messages[0] == "request 1 is a bytes; give a dict or a text"
        and messages[-1] == ""
    )
    assert "request 4 is no JSON" in messages[3]
    assert all(messages[:-1]) and len(messages) == len(odd)
    assert all(record.to_json() for record in records)


def test_texts_are_asked_and_answers_are_read() -> None:
    """A text cost an error, an answer was a nest of dicts, and there was no `with`."""
    ways = ["How do you go from the den to the porch?", "\ud800"]
    with fminfer.Engine(model_name=None, kernels="off", dtype="float32") as engine:
        right, wrong = sorted(engine.run(ways), key=lambda record: record.line.number)
        assert right.text == " south\n" == right.choices[0].text
        with pytest.raises(fminfer.RequestError, match="half of a surrogate pair"):
            print(wrong.text)

        def read(*texts: str) -> list[str]:
            try:
                return [answer.text for answer in engine.run(texts)]
            except fminfer.RequestError:
                return []

        assert read(*ways) == [] and read(ways[0]) == [right.text], (
            "the run before has ended"
        )
        assert engine.make_request("x", n=2).get("temperature") is None, (
            "draws are asked for"
        )
        request = engine.make_request(ways[0], is_raw=True)
        assert request == {"prompt": ways[0], "max_tokens": 256, "temperature": 0}
        for one in (ways[0], request):
            with pytest.raises(fminfer.UsageError, match="give a list, such as"):
                next(engine.run(one))
    with pytest.raises(fminfer.UsageError, match="the engine is closed"):
        engine.add({"prompt": "x"})
    with pytest.raises(fminfer.UsageError, match="give one of them"):
        fminfer.Engine("one", model_name="two")


def test_whatever_an_engine_raises_is_exported_and_in_the_docs() -> None:
    """`fminfer.PipelineError`, which `step` raises, was not there."""
    package = Path(fminfer.__file__).parent
    named = set()
    of_engine = (
        "core",
        "contract",
        "text",
        "machine",
        "compute",
        "engine",
        "pipeline",
        "models",
    )
    for file in [
        path
        for each in (*of_engine, "plan", "runtime")
        for path in (package / each).rglob("*.py")
    ]:
        named |= set(re.findall(r"raise (\w+Error)\(", file.read_text()))
    raised = {name for name in named if hasattr(errors, name)} - {"FminferError"}
    assert raised >= {"PipelineError", "OutOfMemoryError", "RequestError"}
    docs = (package.parent / "docs" / "python.md").read_text()
    for name in raised:
        assert name in fminfer.__all__ and getattr(fminfer, name) is getattr(
            errors, name
        )
        assert f"── {name} " in docs, name


def test_help_names_every_option() -> None:
    """`Engine`'s help was `**options`, and then it had names without a meaning."""
    for doc in (fminfer.Engine.__init__.__doc__, EngineConfig.__doc__):
        assert doc is not None
        for field in dataclasses.fields(EngineConfig):
            (line,) = re.findall(rf"^{field.name}: (.+)$", doc, flags=re.M)
            assert f" = {field.default!r}  {field.metadata['option'].help}" in line
        assert (
            "kernels: 'auto' | 'off' | 'require' = 'auto'  Use of fminfer's own" in doc
        )
        assert "max_rows: int | None = None  Most sequences that run at once." in doc
    shown = inspect.signature(fminfer.Engine).parameters
    for field in dataclasses.fields(EngineConfig):
        assert field.name == "model" or shown[field.name].default == field.default, (
            field.name
        )
    with pytest.raises(
        fminfer.UsageError,
        match=r"no option buget; did you mean budget\? The options are model, ",
    ):
        fminfer.Engine(buget=5)
    with pytest.raises(
        fminfer.UsageError, match="no option zzz; the options are model, "
    ):
        fminfer.Engine(zzz=5)


def test_a_config_travels_as_an_object(engine: fminfer.Engine) -> None:
    config = EngineConfig(model="somewhere", budget=64)
    assert make_config(config, budget=96) == EngineConfig(model="somewhere", budget=96)
    assert make_config("somewhere", budget=64) == config


def test_values_that_json_lacks_are_refused_and_never_become_null(
    engine: fminfer.Engine,
) -> None:
    """orjson writes nan as null, and a null temperature is 1."""
    requests = [{"prompt": "x", "temperature": math.nan}, {"prompt": "\ud800"}]
    records = [*engine.run(requests), *engine.run([{"prompt": "x", "user": "\ud800"}])]
    codes = [record.error.code if record.error else None for record in records]
    assert codes == ["invalid_json", "invalid_utf8", None]
    assert records[2].to_dict()["request"]["user"] == "\ud800"


def test_a_run_repeated_on_one_engine_gives_the_same(engine: fminfer.Engine) -> None:
    requests = [sampled(3), sampled(3)]
    assert texts(engine, requests) == texts(engine, requests)


def test_a_limit_of_steps_is_each_runs_own(llama_checkpoint: tuple[Path, Any]) -> None:
    engine = fminfer.Engine(str(llama_checkpoint[0]), dtype="float32", max_steps=4)
    short = {"prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0}
    for _ in range(3):
        assert len(list(engine.run([short]))) == 1
    with pytest.raises(
        StepLimitError, match="stopped after 4 micro-batches, as --num-iters says; rows"
    ):
        list(engine.run([short | {"max_tokens": 9, "ignore_eos": True}]))
    engine.close()


def test_an_interrupt_between_a_result_and_its_counting_hangs_nothing() -> None:
    """The count of steps in flight was one too high then, and the end waited for ever."""
    pipeline = LocalPipeline(lambda step: StepResult(step.step_id, {}, []))
    step = Step(0)
    for _ in range(2):
        pipeline.submit(step)
    pipeline._results.get()  # … and the interrupt comes here
    dropping = threading.Thread(target=pipeline.drop_steps, daemon=True)
    dropping.start()
    dropping.join(timeout=30)
    assert not dropping.is_alive() and pipeline.num_in_flight == 0
    pipeline.submit(step)
    assert pipeline.collect().step_id == 0, (
        "what was dropped is not mistaken for the next result"
    )
    pipeline.close()
    pipeline.drop_steps()


def test_a_pipeline_that_has_ended_takes_no_step() -> None:
    """It was told once alone: after an interrupt at that moment the next call waited
    for ever."""

    def fail() -> None:
        raise PipelineError("there is no such device")

    pipeline = LocalPipeline(lambda step: StepResult(step.step_id, {}, []), fail)
    assert pipeline._results.get(timeout=30), "… and the interrupt comes here"
    with pytest.raises(PipelineError, match="no such device"):
        pipeline.submit(Step(0))
    pipeline.close()


def test_a_closed_engine_says_so(llama_checkpoint: tuple[Path, Any]) -> None:
    """It used to wait for ever."""
    engine = fminfer.Engine(str(llama_checkpoint[0]))
    engine.close()
    with pytest.raises(fminfer.UsageError, match="closed"):
        list(engine.run([sampled(1)]))


def test_a_tokenizer_with_more_tokens_than_the_model(
    llama_checkpoint: tuple[Path, Any],
) -> None:
    """Llama-2 checkpoints with an added <pad>: its id, in a prompt, ended the whole run."""
    engine = fminfer.Engine(str(llama_checkpoint[0]))
    ids = engine.tokenizer.encode("a").ids
    engine.tokenizer.encode = lambda text, **_: EncodedPrompt(  # type: ignore[method-assign]
        [300] if text == "<pad>" else ids, text, []
    )
    records = list(engine.run([{"prompt": "<pad>"}, {"prompt": "a", "max_tokens": 1}]))
    engine.close()
    assert [record.error and record.error.code for record in records] == [
        "token_out_of_range",
        None,
    ]


def test_the_sum_of_row_shares_is_the_wall_time(
    engine: fminfer.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HELM reads runtime = batch_time / batch_size a row; the rows must add up to the run.

    On a clock on which each step takes a second and nothing else takes any.
    """
    now_s = 0.0
    collect = engine.pipeline.stages.collect

    def collect_later() -> StepResult:
        nonlocal now_s
        now_s += 1.0
        return collect()

    monkeypatch.setattr(engine.pipeline.stages, "collect", collect_later)
    monkeypatch.setattr("time.perf_counter", lambda: now_s)
    requests = [sampled(i, max_tokens=1 + i * 5 % 30) for i in range(40)]
    list(engine.run(requests[:2]))  # the clock goes on between two runs
    started_s = now_s
    now_s = now_s + 100.0
    records = list(engine.run(requests))
    times = [record.to_dict()["result"]["request_time"] for record in records]
    shares = sum(t["batch_time"] / t["batch_size"] for t in times)
    assert shares == pytest.approx(now_s - started_s - 100.0)
    assert shares > 26, "the longest answer takes a step a token"
    assert len({t["batch_size"] for t in times}) > 5, (
        "rows were in flight together, and not all"
    )


def test_a_shorter_context(llama_checkpoint: tuple[Path, Any]) -> None:
    config = EngineConfig(
        model=str(llama_checkpoint[0]), max_model_len=20, dtype="float32"
    )
    assert open_model(config).context_length == 20
    engine = fminfer.Engine(config, kernels="off")
    whole, long = (
        next(engine.run([{"prompt": [5] * n, "max_tokens": 4}])) for n in (16, 17)
    )
    engine.close()
    assert whole.error is None and long.error is not None
    assert (
        long.error.code == "context_length_exceeded"
        and "20 tokens" in long.error.message
    )
    with pytest.raises(
        fminfer.UsageError, match=r"--max-model-len is 257.* 256 tokens"
    ):
        open_model(replace(config, max_model_len=257))


@pytest.mark.parametrize(
    "on_too_long, echoed",
    [("truncate-left", "0123456789"), ("truncate-right", "abcdefghij")],
)
def test_prompts_are_cut_when_asked_and_it_is_told(
    llama_checkpoint: tuple[Path, Any], on_too_long: str, echoed: str
) -> None:
    engine = fminfer.Engine(
        str(llama_checkpoint[0]),
        dtype="float32",
        kernels="off",
        on_too_long=on_too_long,
        max_model_len=64,
    )
    asked = {"echo": True, "max_tokens": 54, "ignore_eos": True, "logprobs": 0}
    requests = [
        asked | {"prompt": "abcdefghij" + "." * 200 + "0123456789"},
        asked | {"prompt": "x"},
    ]
    cut, whole = sorted(engine.run(requests), key=lambda record: record.line.number)
    hopeless = next(engine.run([{"prompt": "xx", "max_tokens": 64}]))
    engine.close()
    result = cut.to_dict()["result"]
    assert result["choices"][0]["text"].startswith(echoed)
    assert result["choices"][0]["logprobs"]["text_offset"][:10] == list(range(10))
    assert result["usage"]["prompt_tokens_details"]["truncated_tokens"] == 210
    assert (
        "truncated_tokens"
        not in whole.to_dict()["result"]["usage"]["prompt_tokens_details"]
    )
    assert (
        hopeless.error is not None and hopeless.error.code == "context_length_exceeded"
    )


def test_a_cut_prompt_keeps_its_bos(llama_checkpoint: tuple[Path, Any]) -> None:
    engine = fminfer.Engine(
        str(llama_checkpoint[0]),
        dtype="float32",
        kernels="off",
        on_too_long="truncate-left",
    )
    engine.tokenizer.bos_id = 1
    asked = {"max_tokens": 200, "return_token_ids": True}
    (record,) = engine.run([asked | {"prompt": [1, *range(100, 200)]}])
    engine.close()
    assert engine.warnings == {"prompts were cut by --on-too-long truncate-left": 1}
    ids = record.to_dict()["result"]["choices"][0]["prompt_token_ids"]
    assert ids == [1, *range(145, 200)]
