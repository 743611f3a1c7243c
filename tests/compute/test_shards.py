"""Sums over ranks in shared memory: exact, in one order, and ended when a rank fails."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from fminfer.compute.formats.block_rows import Blocks
from fminfer.compute.formats.gguf_rows import GGUF_FORMATS
from fminfer.compute.formats.joined import Joined, join_formats
from fminfer.compute.formats.own_rows import INT4, INT8, OWN_FORMATS
from fminfer.compute.kernels.kernel_build import find_compiler
from fminfer.compute.shards import CAPACITY
from fminfer.core.errors import PipelineError
from tests.conftest import built_library
from tests.random_blocks import random_blocks
from tests.shard_threads import make_shards

pytestmark = pytest.mark.skipif(
    find_compiler() is None, reason="there is no C++ compiler"
)


def on_each(count: int, work: Any) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return [*pool.map(work, make_shards(count, built_library()))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_all_ranks_get_the_sum_in_the_order_of_ranks(
    count: int, dtype: torch.dtype
) -> None:
    """Also of odd sizes, of none, and of more than fits at once; whoever comes first."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(1,), (7, 13), (0, 5), (64, 768), (CAPACITY // 4 + 3,), (3, CAPACITY // 2)]
    given = [
        [torch.randn(s, generator=generator).to(dtype) for s in sizes]
        for _ in range(count)
    ]

    def work(shards: Any) -> list[torch.Tensor]:
        found = []
        for number, x in enumerate(given[shards.index]):
            if (number + shards.index) % 3 == 0:
                time.sleep(0.005)
            found.append(shards.sum(x.clone()))
            found.append(shards.gather(x))
        return found

    for found in on_each(count, work):
        for number in range(len(sizes)):
            parts = [own[number] for own in given]
            total = parts[0].float()
            for part in parts[1:]:
                total = total + part.float()
            assert torch.equal(found[2 * number], total.to(dtype))
            assert torch.equal(found[2 * number + 1], torch.stack(parts))


def test_a_tensor_that_is_not_in_one_piece(count: int = 2) -> None:
    x = torch.arange(12.0).view(3, 4)
    for found in on_each(count, lambda shards: shards.sum(x.T)):
        assert torch.equal(found, 2 * x.T)
    assert torch.equal(x, torch.arange(12.0).view(3, 4)), "what was given stays"


def test_whoever_waits_ends_when_a_rank_has_failed() -> None:
    """A thread in the library heard of nothing, and would have waited for ever."""
    first, _ = make_shards(2, built_library())
    threading.Timer(0.3, first.stop).start()
    started = time.monotonic()
    with pytest.raises(PipelineError, match="another rank of this stage has failed"):
        first.sum(torch.ones(5))
    assert time.monotonic() - started < 5


def test_ranks_that_compute_other_steps_are_no_sum() -> None:
    def work(shards: Any) -> str:
        with pytest.raises(PipelineError) as caught:
            shards.sum(torch.ones(5 + shards.index))
        return str(caught.value)

    assert all("different sizes" in each for each in on_each(2, work))


@pytest.mark.parametrize(
    "form", [*OWN_FORMATS, *GGUF_FORMATS], ids=lambda form: form.name
)
def test_blocks_are_cut_along_their_inputs(form: Blocks) -> None:
    """Each number of a cut is the one that the whole weight has there, to the last bit."""
    unit = form.block or 32
    packed = random_blocks(form, 5, 6 * unit)
    for columns in (range(unit), range(2 * unit, 5 * unit), range(6 * unit)):
        (cut,) = form.cut_inputs((packed,), columns)
        assert cut.shape[-1] == form.row_bytes(len(columns))
        found = form.dequantize((cut,), torch.float32)
        whole = form.dequantize((packed,), torch.float32)[
            ..., columns.start : columns.stop
        ]
        assert torch.equal(found.nan_to_num(), whole.nan_to_num())


def test_rows_of_several_formats_are_cut() -> None:
    joined = join_formats([(INT8, 64), (INT4, 32), (INT8, 32)])
    assert isinstance(joined, Joined)
    assert joined.cut_outputs([range(64)]) == INT8
    found = joined.cut_outputs([range(60, 70), range(96, 100), range(100, 128)])
    assert found == join_formats([(INT8, 4), (INT4, 6), (INT8, 32)])
