"""A line has the same bytes however a run goes: its text, ids, logprobs and vectors."""

from __future__ import annotations

from pathlib import Path

import pytest

from fminfer.compute.kernels.kernel_build import find_compiler
from tests.conftest import IS_ALL, more
from tests.same_bytes.answer_differences import describe_differences, summarize_pair
from tests.same_bytes.mixed_lines import NUM_LINES, make_lines
from tests.same_bytes.tiny_models import DTYPES, MODELS
from tests.same_bytes.varied_runs import RUNS, Answers, RunBench

# How many runs of which models are the sample: they differ in attention, layers, products
# and rounding.
SAMPLE = {
    ("llama-3x64", "bfloat16"): 4,
    ("gemma2-2x80", "float32"): 3,
    ("mixtral-2x32", "int8"): 3,
    ("deepseek_v3-latent", "float32"): 2,
    ("t5-1x32", "bfloat16"): 2,
    ("bert-1x64", "float32"): 4,
}
NUM_SAMPLE_LINES = 40
LEAST_TEXTS = 0.8  # part of the texts that are different ones


@pytest.mark.usefixtures("without_tiles")
@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        pytest.param(model, dtype, marks=[] if (model, dtype) in SAMPLE else [more])
        for model in MODELS
        for dtype in DTYPES
    ],
)
def test_every_run_gives_the_same_bytes(model: str, dtype: str, tmp_path: Path) -> None:
    """In bfloat16, 14 of 96 texts changed with the number of rows that run at once."""
    folder = tmp_path / model
    MODELS[model].save(folder)
    kind = MODELS[model].kind
    lines = make_lines(kind, NUM_LINES if IS_ALL else NUM_SAMPLE_LINES)
    bench = RunBench(folder, kind, DTYPES[dtype], lines, tmp_path)
    first, *others = RUNS if IS_ALL else RUNS[: SAMPLE[model, dtype]]
    expected = bench.answer(first)
    check_variety(expected)

    reports = []
    for run in others:
        differences = describe_differences(expected, bench.answer(run))
        if differences:
            reports.append(summarize_pair(first.name, run.name, differences))
    assert not reports, "\n" + "\n".join(reports)


def check_variety(answers: Answers) -> None:
    """Fail if many texts are equal: then little would be compared."""
    texts = [
        choice["text"]
        for answer in answers.values()
        for choice in answer.get("choices", ())
    ]
    assert len({*texts}) >= LEAST_TEXTS * len(texts)


def test_runs_hold_pairs_of_values() -> None:
    """Each order, number of rows and way meets each chunk, number of threads and of stages."""
    columns = [
        [run.order for run in RUNS],
        [run.max_rows for run in RUNS],
        [run.way for run in RUNS],
        [run.chunk_size for run in RUNS],
        [run.threads for run in RUNS],
        [run.num_stages for run in RUNS],
    ]
    for place, column in enumerate(columns):
        for other in columns[max(place + 1, 3) :]:
            pairs = {*zip(column, other, strict=True)}
            assert len(pairs) == len({*column}) * len({*other})
