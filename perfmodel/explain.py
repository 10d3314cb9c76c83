"""Why the model says what it says of one kernel call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from perfmodel.calls import columns_of
from perfmodel.choice import are_largest
from perfmodel.kernels import BIASED, KERNELS, of_kernel
from perfmodel.model import PerfModel
from perfmodel.prediction import (
    LAUNCH_FLOOR_US,
    baseline_us,
    by_digits,
    few_neighbours,
    gap_octaves,
    in_few_groups,
    no_less,
    wider_beyond,
)
from perfmodel.roofline import limits_us


@dataclass(frozen=True)
class Explanation:
    """A prediction taken apart: `time_us` is `(roofline_us + launch_us)` times `typical` times every factor of `factors`.

    Attributes:
        kernel: Which kernel.
        shape: Its m, n, k and groups.
        time_us: Predicted time.
        low_us: Lower end of the 90% interval.
        high_us: Upper end.
        compute_us: Time of the FLOPs at the GPU's peak.
        memory_us: Time of the least bytes at the copy bandwidth.
        launch_us: What the model adds to the roofline, so that it stays finite for the smallest calls.
        typical: How much longer this kernel takes than roofline and launch, over the shapes that it was fitted on.
        factors: What each feature of this shape multiplies that by (SHAP values of the trees), the strongest
            first; `network` is what the network makes of all of them.
        correction: What a refinement on the user's machine multiplies the time by; 1 without one.
        outside: Which of m, n, k, groups, product lie outside the sizes that the kernel was measured at.
        layout: By which factor it takes longer than with K fastest in both operands and no bias; 1 for a kernel that is so.
        clipped: Whether all this is less than is possible (`perfmodel.prediction.no_less`), which it takes instead.
        wider: The power of the interval's factors for the doubt about which of its kernels the library chooses; 1 without.
        wider_beyond: Likewise for how far it is from what was measured, beyond the largest sizes or between others; 1 where it
            is not.
        wider_where_few: Likewise for how few calls were timed carefully around it, if that is more; 1 where many were.
        wider_where_largest: By what that power is raised for one of the largest calls (`perfmodel.choice.are_largest`), of
            which few were timed; 1 where it is none.
        wider_in_few_groups: Likewise for one of products in few groups (`perfmodel.prediction.in_few_groups`); 1 elsewhere.
        wider_by_digits: Likewise for how many binary digits its sizes take (`perfmodel.prediction.digits`): less than 1 for round
            ones, of which most is known; 1 of what is no GEMM, and of the largest calls.
        gap_octaves: By how many octaves it lies in a hole between calls that were measured (`perfmodel.cells`); 0 outside one.
    """

    kernel: str
    shape: dict[str, int]
    time_us: float
    low_us: float
    high_us: float
    compute_us: float
    memory_us: float
    launch_us: float
    typical: float
    factors: dict[str, float]
    correction: float
    outside: tuple[str, ...]
    layout: float
    clipped: bool
    wider: float
    wider_beyond: float
    wider_where_few: float
    wider_where_largest: float
    wider_in_few_groups: float
    wider_by_digits: float
    gap_octaves: float

    @property
    def roofline_us(self) -> float:
        """The larger of compute and memory time."""
        return max(self.compute_us, self.memory_us)

    @property
    def bound(self) -> str:
        """`launch` where the roofline is shorter than a launch, otherwise `compute` or `memory`."""
        if self.roofline_us < self.launch_us:
            return "launch"
        return "compute" if self.compute_us > self.memory_us else "memory"

    def words(self, most: int = 5) -> str:
        """The explanation as text, with the `most` strongest features."""
        size = " x ".join(str(self.shape[name]) for name in ("m", "n", "k") if self.shape[name] > 1 or name != "n")
        times = f", {self.shape['groups']} products" if self.shape["groups"] > 1 else ""
        lines = [
            f"{self.kernel} on {size}{times}: {self.time_us:.2f} us, 90% between {self.low_us:.2f} and {self.high_us:.2f}",
            f"  roofline {self.roofline_us:.2f} us (compute {self.compute_us:.2f}, memory {self.memory_us:.2f}), "
            f"launch {self.launch_us:.2f} us: bound by {self.bound}",
            f"  this kernel typically takes {self.typical:.2f} times that; this shape, of it:",
        ]
        shown = list(self.factors.items())[:most]
        lines += [f"    {factor:5.2f} x  {name}" for name, factor in shown]
        rest = float(np.prod(list(self.factors.values())[most:]))
        lines.append(f"    {rest:5.2f} x  all {len(self.factors) - len(shown)} other features")
        if self.clipped:
            lines.append("  less than the roofline or than its shortest measured call, which it takes instead")
        if self.wider > 1.0:
            lines.append(f"  which of its kernels the library takes is in doubt: an interval {self.wider:.1f} times as wide")
        if self.wider_where_few > self.wider_beyond and round(self.wider_where_few, 1) > 1.0:
            lines.append(f"  calls like it are less well known: an interval {self.wider_where_few:.1f} times as wide")
        if self.wider_where_largest > 1.0:
            lines.append(f"  few calls as large were timed: an interval {self.wider_where_largest:.1f} times as wide")
        if round(self.wider_in_few_groups, 1) > 1.0:
            lines.append(
                f"  products in few groups are less well known: an interval {self.wider_in_few_groups:.1f} times as wide"
            )
        if round(self.wider_by_digits, 1) != 1.0:
            kind = "round" if self.wider_by_digits < 1 else "not round"
            lines.append(f"  its sizes are {kind}: an interval {self.wider_by_digits:.1f} times as wide")
        if self.layout != 1.0:
            what = (
                "with its bias, over none"
                if KERNELS[self.kernel].layout == BIASED
                else "as its operands lie, over K fastest in both"
            )
            lines.append(f"  {what}: {self.layout:.2f} x")
        if self.correction != 1.0:
            lines.append(f"  measurements on this machine: {self.correction:.2f} x")
        if self.outside or self.gap_octaves:
            wider = f", its interval {self.wider_beyond:.1f} times as wide" if self.wider_beyond > 1.0 else ""
            gap = f"{self.gap_octaves:g} octaves and more from whatever was measured"
            where = f"{', '.join(self.outside)} outside the measured sizes" if self.outside else gap
            lines.append(f"  {where}: an extrapolation{wider}")
        return "\n".join(lines)


def explain(model: PerfModel, row: Mapping[str, Any] | pd.Series) -> Explanation:
    """Take one prediction apart.

    Args:
        model: The time model.
        row: `kernel`, `m`, `n`, `k` and optionally `groups`.

    Raises:
        ValueError: as `PerfModel.predict`; or the kernel is known from a refinement alone, which has no trees.
    """
    names = ("kernel", "m", "n", "k", "groups")
    frame = pd.DataFrame([{name: row[name] for name in names if name in row}])
    time, low, high = model.predict(frame).to_numpy()[0]
    asked, sizes = str(frame["kernel"].iloc[0]), columns_of(frame)
    kernel, layout = of_kernel(asked), 1.0
    if kernel != asked and model.layouts is not None:
        layout = float(model.layouts.told([KERNELS[asked].layout], *sizes)[0][0])
    if "interval_factors" not in model.manifest["kernels"][kernel]:
        raise ValueError(f"{kernel} is known from measurements on this machine alone: there are no trees to explain it by")
    compute, memory = (float(limit[0]) for limit in limits_us(kernel, *sizes, model.hardware))
    seen = model.seen(kernel, sizes)
    added = model.learned(kernel)[1].contributions(seen.matrix)[0].astype(float)
    # The network's value counts by itself and as a feature of the trees: together they are its factor.
    added[-2] += float(np.asarray(seen.smooth).sum())
    order = np.argsort(-np.abs(added[:-1]), kind="stable")
    baseline = float(baseline_us(kernel, *sizes, model.hardware, model.planned(kernel))[0])
    learned = np.array([baseline * np.exp(added.sum())])
    possible = no_less(learned, kernel, sizes, model.hardware, model.least_us(kernel))
    ratio = time / (layout * possible[0])
    typical = float(np.exp(added[-1])) * baseline / (max(compute, memory) + LAUNCH_FLOOR_US)
    shape = dict(zip(("m", "n", "k", "groups"), (int(size[0]) for size in sizes), strict=True))
    product = float(np.prod(list(shape.values()), dtype=float))
    entry = model.manifest["kernels"][kernel]
    ranges = entry["range"]
    outside = tuple(
        name for name, value in (*shape.items(), ("product", product)) if not ranges[name][0] <= value <= ranges[name][1]
    )
    return Explanation(
        asked, shape, float(time), float(low), float(high), compute, memory, LAUNCH_FLOOR_US, typical,
        {seen.names[index]: float(np.exp(added[index])) for index in order},
        1.0 if abs(ratio - 1) < 1e-4 else float(ratio), outside, layout, bool(possible[0] > learned[0]),
        float(wider[seen.doubt[0]]) if (wider := entry.get("wider_in_doubt")) else 1.0,
        float(wider_beyond(kernel, sizes, entry)[0]),
        float(few[few_neighbours(sizes, entry)[0]]) if (few := entry.get("wider_where_few")) else 1.0,
        float(entry.get("wider_where_largest", 1.0)) if are_largest(sizes)[0] else 1.0,
        float(entry.get("wider_in_few_groups", 1.0)) if in_few_groups(kernel, sizes)[0] else 1.0,
        float(by_digits(sizes, entry)[0]),
        float(gap_octaves(sizes, entry)[0]),
    )  # fmt: skip
