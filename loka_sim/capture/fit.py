"""From runs at several batches to one specification: each dimension as an affine function of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from loka_sim.capture.record import RawGemm, RawSite
from loka_sim.capture.trace import TABLE_ROWS
from loka_sim.fusion import RawGroup, kernels, measured
from loka_sim.loops import Lowered, Scheduled
from loka_sim.modelspec import PASSES, Dim, Fused, Gemm, Site
from loka_sim.step_loops import SCALED, find_sites, joined, line, phases, without
from loka_sim.step_loops import written as lines_of
from perfmodel.attention import FORWARD, sizes_of

DIMS = ("m", "n", "k", "groups")


def affine(batches: Sequence[int], sizes: Sequence[Any]) -> Dim | None:
    """The dimension that has these sizes at these batches, or None if no affine one in whole numbers has."""
    if not all(isinstance(size, int) for size in sizes):
        return None
    rise, run = sizes[1] - sizes[0], batches[1] - batches[0]
    if rise % run:
        return None
    dim = Dim(sizes[0] - rise // run * batches[0], rise // run)
    return dim if dim.per_batch >= 0 and all(dim.at(batch) == size for batch, size in zip(batches, sizes, strict=True)) else None


def said(flops: int, batch: int) -> str:
    """FLOPs in words: 0 stands for what nobody counts."""
    return f"{flops} FLOPs at batch {batch}" if flops else "its FLOPs are not known"


def fit_gemm(batches: Sequence[int], runs: Sequence[RawGemm]) -> Gemm | str:
    """One pass of a site over the batches, or what keeps it from being affine."""
    dims = {}
    for key in DIMS:
        sizes = [getattr(run, key) for run in runs]
        dim = affine(batches, sizes)
        if dim is None:
            if not all(isinstance(size, int) for size in sizes):
                return f"{key} depends on the data"
            listed = ", ".join(map(str, sizes))
            return f"{key} is {listed} at batch {', '.join(map(str, batches))}, which is not affine in the batch"
        dims[key] = dim
    return Gemm(dims["m"], dims["n"], dims["k"], dims["groups"], runs[0].layout_a, runs[0].layout_b)


def fit_sites(batches: Sequence[int], runs: Sequence[Sequence[RawSite]]) -> tuple[list[Site], list[str]]:
    """The sites that all runs have, in the first run's order, and what cannot be accounted for.

    Args:
        batches: Batch of each run; the first is the one that the user gave.
        runs: The sites of each run.
    """
    sites, unaccounted = [], []
    by_name = [{site.name: site for site in run} for run in runs]
    any_reads = any(site.reads_tables for site in runs[0])
    for name, first in by_name[0].items():
        same = [run.get(name) for run in by_name]
        flops = sum(gemm.flops for gemm in first.passes.values())
        reason = ""
        passes: dict[str, Gemm] = {}
        if any(site is None or site.op != first.op or site.passes.keys() != first.passes.keys() for site in same):
            reason = f"computed differently at batch {', '.join(map(str, batches))}"
        for key in [key for key in PASSES if key in first.passes and not reason]:
            fitted = fit_gemm(batches, [site.passes[key] for site in same if site])
            if isinstance(fitted, str):
                reason = f"{key}: {fitted}"
                break
            passes[key] = fitted
        if reason:
            unaccounted.append(f"{name}: {reason} ({said(flops, batches[0])})")
        else:
            reads = first.reads_tables or not any_reads
            sites.append(Site(name, first.op, passes, first.weight, first.bias, first.norm, first.activation, reads))
    for batch, run in zip(batches[1:], by_name[1:], strict=True):
        extra = [name for name in run if name not in by_name[0]]
        unaccounted += [f"{name}: computed at batch {batch}, not at batch {batches[0]}" for name in extra]
    return sites, unaccounted


def fit_fused(
    batches: Sequence[int], runs: Sequence[dict[str, Lowered]], sites: Sequence[Site]
) -> tuple[list[Fused], tuple[str, ...], list[Site], str]:
    """The kernels beside the GEMMs over two batches; those that are alike stand in one entry.

    What fuses is decided at the first batch: at another, sizes may be equal by chance. Filling and converting tables'
    dense gradients is left out.

    Args:
        batches: In samples.
        runs: The graphs of each.
        sites: The GEMMs.

    Returns:
        The kernels in the order of their first, the loops that they are made of (see `loka_sim.step_loops`), the sites that
        are run as GEMMs with what torch.compile pads, and why there are no kernels where there are none.
    """
    found: dict[Fused, int] = {}
    steps = [joined(run) for run in runs]
    labels = [[loop.label for loop in step.scheduled] for step in steps]
    if labels[0] != labels[1]:
        return [], (), list(sites), f"the step is computed differently at batch {batches[0]} and {batches[1]}"
    for phase, lowered in phases(steps[0]).items():
        together = kernels(lowered)
        for one, two in zip(measured(lowered, together), measured(phases(steps[1])[phase], together), strict=True):
            kernel = fused_kernel(phase, batches, one, two)
            if not (kernel.kind in ("fill", "pointwise") and _of_tables(kernel.kept.per_batch, kernel.kept.const)):
                found[kernel] = found.get(kernel, 0) + 1
    padded, lines = _lines(batches, steps, sites)
    if all(SCALED in run for run in runs):
        lines += _scaled(batches, [joined(run, SCALED) for run in runs], sites, lines)
    run = [_padded(site, padded) for site in sites if not _attended(site, steps[0], batches[0])]
    return [replace(kernel, count=count) for kernel, count in found.items()], lines, run, ""


def _lines(
    batches: Sequence[int], steps: Sequence[Lowered], sites: Sequence[Site]
) -> tuple[set[tuple[str, str]], tuple[str, ...]]:
    """Which products have padded sizes, and the loops of a step as lines, those of tables' gradients left out."""
    padded, _ = (find_sites(step, sites, batch) for step, batch in zip(steps, batches, strict=True))
    alone = {id(loop) for pair in zip(steps[0].scheduled, steps[1].scheduled, strict=True) for loop in pair if _table_loop(*pair)}
    return padded, lines_of([without(step, lambda loop: id(loop) in alone) for step in steps], batches)


def _scaled(batches: Sequence[int], steps: Sequence[Lowered], sites: Sequence[Site], known: tuple[str, ...]) -> tuple[str, ...]:
    """The backward's loops as lines where its products are scaled behind them, if they are not those known."""
    if len({tuple(loop.label for loop in step.scheduled) for step in steps}) > 1:
        return ()
    _, lines = _lines(batches, steps, sites)
    if lines == known:
        return ()
    return tuple(line.replace("backward", SCALED, 1) for line in lines if line.startswith("backward"))


def _attended(site: Site, step: Lowered, batch: int) -> bool:
    """Whether a site's product is part of an attention kernel, which torch.compile put in the place of products and a softmax."""
    if any(loop.site[0] == site.name for loop in step.scheduled):
        return False
    product = site.passes["output"]
    for loop in step.scheduled:
        if loop.kind == FORWARD:
            queries, keys, features, _ = sizes_of(loop.label)
            alike = sorted(product.shape(batch)) == sorted((queries, keys, features))
            if alike and product.groups.at(batch) * queries == loop.space[0]:
                return True
    return False


def _padded(site: Site, padded: set[tuple[str, str]]) -> Site:
    passes = {name: replace(gemm, padded=(site.name, name) in padded) for name, gemm in site.passes.items()}
    return replace(site, passes=passes)


def fused_kernel(phase: str, batches: Sequence[int], one: RawGroup, two: RawGroup) -> Fused:
    """A kernel from its sizes at two batches."""
    sizes = [(*raw.space, raw.read_bytes, raw.written_bytes, raw.unordered_bytes) for raw in (one, two)]
    kept, reduced, read, written, unordered = (line(batches, pair) for pair in zip(*sizes, strict=True))
    return Fused(phase, one.kind, one.label, kept, reduced, read, written, unordered, one.uneven)


def _of_tables(per_batch: int, const: int) -> bool:
    return not per_batch and bool(const) and const % TABLE_ROWS == 0


def _table_loop(one: Scheduled, two: Scheduled) -> bool:
    return one.kind in ("fill", "pointwise") and one.space == two.space and _of_tables(0, one.space[0])
