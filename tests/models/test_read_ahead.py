"""Layers are read one by one while others are packed, and a thread reads ahead of them."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fminfer.compute.values.weights import Function, Weight
from fminfer.forward.layer import TransformerLayer
from fminfer.forward.layer_step import PartBuilder
from fminfer.forward.registry import Registry
from fminfer.forward.transformer import Transformer
from fminfer.models.checkpoint import open_checkpoint
from fminfer.models.holding import Holding
from fminfer.models.layer_source import open_weights
from fminfer.models.stored import tensor_table
from fminfer.models.stored.tensor_table import PartToRead, reading_ahead
from tests.forward.test_transformer import one_stage

ALL = range(12)  # parts, two of a group, of 100 bytes


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Give the parts that are read, while three groups may be read ahead."""
    parts: list[int] = []
    monkeypatch.setattr(tensor_table, "AHEAD", 3 * 200)
    yield parts
    assert not [
        each
        for each in threading.enumerate()
        if each.name.startswith("fminfer weights")
    ]


def groups_of(read: list[int]) -> list[list[PartToRead]]:
    parts = [PartToRead(100, partial(read.append, number)) for number in ALL]
    return [parts[first : first + 2] for first in ALL[::2]]


def wait_for(read: list[int], num_groups: int) -> None:
    for _ in range(500):
        if read == list(ALL[: 2 * num_groups]):
            break
        time.sleep(0.01)
    time.sleep(0.05)
    assert read == list(ALL[: 2 * num_groups])


def test_groups_are_read_in_order_and_not_too_far_ahead(read: list[int]) -> None:
    with reading_ahead(groups_of(read)) as next_group:
        wait_for(read, 3)
        next_group()
        wait_for(read, 4)
    assert read == list(ALL), "the last ones, which nobody waited for"


def test_an_error_ends_it_at_once(read: list[int]) -> None:
    with pytest.raises(KeyError), reading_ahead(groups_of(read)):
        wait_for(read, 3)
        raise KeyError
    assert read == list(ALL[:6])
    with reading_ahead([]):  # a part without layers
        pass


@pytest.mark.parametrize("is_random", [False, True])
def test_one_layer_is_in_memory_beside_the_packed_ones(
    is_random: bool, llama_checkpoint: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers' joined weights were there before the first one was packed."""
    checkpoint = open_checkpoint(str(llama_checkpoint[0]))
    if is_random:
        checkpoint = replace(checkpoint, folder=None)
    joined: list[weakref.ref[torch.Tensor]] = []
    left: list[int] = []

    class Unpacked(Registry):
        """A registry whose products keep no weight, as packed ones do."""

        def choose_product(self, weight: Weight, bias: torch.Tensor | None) -> Function:
            if len(weight.spec.outputs) == 3:  # queries, keys and values
                joined.append(weakref.ref(weight.plain))
            return lambda x: x

    def count_others(layer: TransformerLayer) -> TransformerLayer:
        left.append(sum(each() is not None for each in joined[:-1]))
        return layer

    def see(done: int, total: int) -> None:
        left.append(sum(each() is not None for each in joined))

    tensors = open_weights(
        checkpoint,
        one_stage()[0],
        holding=Holding(torch.float32),
        device=torch.device("cpu"),
        seed=0,
        on_progress=see,
    )
    Transformer(
        checkpoint.model,
        tensors,
        builder=PartBuilder(
            Unpacked("off", None, torch.float32, torch.device("cpu")), 64
        ),
        join=count_others,
    )
    assert len(joined) == 3 and set(left) == {0}
