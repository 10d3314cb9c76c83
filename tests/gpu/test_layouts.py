"""Products in the layouts of their operands on a real GPU: both ways to time them agree, and what is told is near."""

import time

import numpy as np
import pytest

from hil import layouts as timed
from hil.kernels.base import Shape
from perfmodel import hardware, layouts
from perfmodel.kernels import ACROSS, BIASED, K_FASTEST

ALL = (K_FASTEST, *ACROSS)
SHAPES = [Shape(1024, 2048, 8192), Shape(936, 936, 6144), Shape(367, 513, 16384), Shape(64, 128, 256, 512)]


@pytest.fixture(scope="module")
def tables():
    deadline = time.time() + 120
    return [list(measure(SHAPES, ALL, deadline)) for measure in (timed.quickly, timed.carefully)]


def test_quick_and_careful_timings_agree(tables):
    quick, careful = tables
    assert len(quick) == len(careful) == len(SHAPES)
    for one, other in zip(quick, careful, strict=True):
        for layout in ALL:
            assert one[layouts.column(layout)] == pytest.approx(other[layouts.column(layout)], rel=0.3)


def test_what_is_told_is_nearer_than_k_fastest(tables):
    lie = [layout for _ in SHAPES for layout in ACROSS]
    sizes = [[getattr(shape, name) for shape in SHAPES for _ in ACROSS] for name in ("m", "n", "k", "groups")]
    told = layouts.load(hardware.load("h200")).told(lie, *sizes)[0]
    fastest = layouts.column(layouts.K_FASTEST)
    measured = [row[layouts.column(layout)] / row[fastest] for row in tables[1] for layout in ACROSS]
    assert np.abs(np.log(told / measured)).mean() < 0.5 * np.abs(np.log(measured)).mean()


def test_a_bias_takes_about_as_long_as_is_told():
    shapes = [Shape(8192, 128, 512), Shape(2048, 400, 600), Shape(16384, 64, 256), Shape(4096, 264, 520), Shape(1000, 1001, 1003)]
    rows = list(timed.carefully(shapes, (K_FASTEST, BIASED), time.time() + 120))
    sizes = [[row[name] for row in rows] for name in ("m", "n", "k", "groups")]
    told = layouts.load(hardware.load("h200")).told([BIASED] * len(rows), *sizes)[0]
    measured = [row[layouts.column(BIASED)] / row[layouts.column(K_FASTEST)] for row in rows]
    assert len(rows) == len(shapes) and np.abs(np.log(told / measured)).mean() < 0.7 * np.abs(np.log(measured)).mean()
