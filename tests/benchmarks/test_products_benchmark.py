"""The benchmark of packed products: its roof, whom it times, and that it times right
ones only."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

from fminfer.compute.kernels.kernel_build import find_compiler
from fminfer.machine import processor

# scripts
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "benchmarks"))

import products

ROOF = products.Roof(floats=100.0, pairs=200.0, bytes=10.0)


def test_the_least_time_is_of_products_or_of_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processor, "has_unit", lambda name: False)
    assert ROOF.least_s(1000.0, torch.float32, 10) == 10.0
    assert ROOF.least_s(1000.0, torch.bfloat16, 10) == 5.0
    assert ROOF.least_s(1000.0, torch.bfloat16, 1000) == 100.0
    assert products.Roof(100.0, 0.0, 10.0).least_s(1000.0, torch.bfloat16, 10) == 10.0
    monkeypatch.setattr(processor, "has_unit", lambda name: name == "amx_bf16")
    assert ROOF.least_s(1000.0, torch.bfloat16, 10) == 0.0, "nobody has measured tiles"
    assert ROOF.least_s(1000.0, torch.float32, 10) == 10.0


def test_a_share_is_of_the_best_roof_that_was_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reads ran at half their rate in the second in which the roof was measured: 120 % of it."""
    roof = ROOF.best_with(products.Roof(floats=90.0, pairs=0.0, bytes=20.0))
    assert roof == products.Roof(100.0, 200.0, 20.0)
    record = {"kind": "k", "shape": "1×1", "rows": 1, "rows_dtype": torch.float32}
    found = products.rate(
        record | {"flop": 10.0, "weight_bytes": 40, "took_s": {"linear": 4.0}}, roof
    )
    assert found["share"] == {"linear": 0.5} and found["gflops"] == {"linear": 2.5e-9}


def test_wrong_products_are_not_timed() -> None:
    weight = torch.randn(8, 4)
    with pytest.raises(click.ClickException, match="ours is wrong by 0"):
        products.check(
            {"ours": [lambda x: x @ weight.T * 1.01]}, torch.randn(3, 4), weight
        )


def test_a_table_has_medians_over_shapes_and_gaps() -> None:
    records = [
        {
            "kind": "k",
            "shape": shape,
            "rows": 4,
            "gflops": {"linear": g},
            "share": {"linear": s},
        }
        for shape, g, s in (("1×1", 1.0, 0.1), ("2×2", 7.0, 0.0), ("3×3", 9.0, 0.5))
    ]
    *_, row = products.table(records, None)
    assert row == "| 4 | – | – | 7 | 10% | – | – |"
    *_, row = products.table(records, "2×2")
    assert row == "| 4 | – | – | 7 | – | – | – |", "a share that nobody knows"


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_a_tiny_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "ROOF_TURNS", 1000)
    monkeypatch.setattr(products, "ROOF_S", 0.001)
    monkeypatch.setattr(products, "READ_FLOATS", 1 << 16)
    monkeypatch.setattr(products, "cache_bytes", lambda: 1 << 14)
    flags = [
        "--rows",
        "2",
        "--shape",
        "64",
        "128",
        "--threads",
        "1",
        "--seconds",
        "0.001",
    ]
    found = CliRunner().invoke(products.main, flags)
    assert found.exit_code == 0, found.output
    assert "float32 rows, float32 weights, medians over 1 shapes" in found.output
    assert (
        "bfloat16 rows, bfloat16 weights" in found.output and "\n| 2 | " in found.output
    )
