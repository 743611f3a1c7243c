"""The picture of `fminfer bench --plot` shows each figure where it belongs."""

from __future__ import annotations

import xml.etree.ElementTree as Xml

import pytest

from fminfer.core.messages import MemoryPeak, RankMemory
from fminfer.job.report.bench_picture import draw_bench, find_log_ticks

GIB = 1 << 30
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("least", "most", "ticks"),
    [
        (2.05, 11.7, [2, 5, 10, 20]),
        (1, 100, [1, 2, 5, 10, 20, 50, 100]),
        (0.66, 283, [0.1, 1, 10, 100, 1000]),
        (1, 1, [1, 2]),
        (0.05, 0.05, [0.05, 0.1]),
        (3, 4, [2, 5]),
        (999, 1001, [500, 1000, 2000]),
    ],
)
def test_ticks_of_a_logarithmic_axis(
    least: float, most: float, ticks: list[float]
) -> None:
    assert find_log_ticks(least, most) == pytest.approx(ticks)


def test_a_picture_has_a_point_for_each_size_and_a_bar_for_each_rank() -> None:
    curves = {"msecs a token": [(1, 40.0), (8, 20.0), (64, None), (128, None)]}
    ranks = [
        RankMemory(
            rank, True, 44 * GIB, MemoryPeak(3 * GIB, 30 * GIB, (40 + rank) * GIB)
        )
        for rank in range(3)
    ]
    root = Xml.fromstring(draw_bench("M <1>", "msecs a token", curves, ranks))
    texts = [each.text for each in root.iter(f"{SVG}text")]
    assert texts[0] == "M <1>" and texts.count("oom") == 2
    assert {"40", "20", "1", "8", "64", "128", "rank 2"} <= {*texts}
    assert "GPU 41.00 GiB (44.00 GiB foreseen), CPU 3.00 GiB" in texts
    points = [each.attrib for each in root.iter(f"{SVG}circle")]
    assert len(points) == 2 and float(points[0]["cy"]) < float(points[1]["cy"]), (
        "down is less"
    )
    _, *bars = root.iter(f"{SVG}rect")
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert widths == pytest.approx(
        [widths[0] * (40 + rank) / 40 for rank in range(3)], abs=0.2
    )


def test_a_picture_where_nothing_fits() -> None:
    told = draw_bench("M", "msecs a token", {"msecs a token": [(1, None)]}, [])
    assert Xml.fromstring(told) is not None and told.count(">oom<") == 1


def test_curves_of_several_lengths_have_their_names() -> None:
    curves = {f"rows/s of {each}": [(1, 9.0 * each), (4, None)] for each in (16, 64)}
    told = draw_bench("M", "rows a second", curves, [])
    assert all(f">{name}<" in told for name in curves)
    assert told.count(">oom<") == 2
