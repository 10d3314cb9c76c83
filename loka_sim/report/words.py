"""Numbers and names as the report prints them."""

from __future__ import annotations

STATUSES = {
    "fast": ("FP8 chosen", "FP8 is surely faster, quantization included, and accurate enough"),
    "not_worth_it": ("not worth it", "no FP8 kernel is surely faster once quantization is counted, or the step does not gain"),
    "unsafe": ("unsafe", "an FP8 kernel would be faster, and too inaccurate"),
    "illegal": ("illegal", "no FP8 kernel can run this shape or call"),
}
"""Status of a pass: what to call it, and what it means."""

PASSES = {"output": "output", "grad_input": "grad input", "grad_weight": "grad weight"}


def micro(value: float | None) -> str:
    """A time in microseconds, to about four digits and without its unit."""
    if value is None:
        return "–"
    size = abs(value)
    return f"{value:,.2f}" if size < 10 else f"{value:,.1f}" if size < 1000 else f"{value:,.0f}"


def ratio(value: float | None) -> str:
    """A speedup."""
    return "–" if value is None else f"{value:.2f}×" if value < 10 else f"{value:.1f}×"


def percent(share: float | None) -> str:
    """A share, as a percentage of about two digits."""
    if share is None:
        return "–"
    value = 100 * share
    size = abs(value)
    digits = 0 if size >= 9.95 or size == 0 else 1 if size >= 0.995 else 2
    return f"{value:.{digits}f}%"


def count(value: float, unit: str = "") -> str:
    """A large number with an SI prefix, three digits."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}".rstrip()
    return f"{value:.3g} {unit}".rstrip()


def kernel(name: str) -> str:
    """A kernel's short name: the format is said once, in the legend, and a library only where it is not torch."""
    library, _, short = name.rpartition("/")
    short = short.removeprefix("fp8_").replace("_batched", "").replace("_", " ")
    return short if library in ("torch", "") else f"{library} {short}"


def operation(name: str) -> str:
    """A collective or a phase of a step: `all_to_all` as people write it."""
    return {
        "all_to_all": "all-to-all",
        "all_reduce": "all-reduce",
        "reduce_scatter": "reduce-scatter",
        "all_gather": "all-gather",
    }.get(name, name)


def hardware(name: str) -> str:
    """A GPU's name: `h200` as people write it."""
    return name.upper() if name.isalnum() else name


def plural(number: int, noun: str) -> str:
    """`1 pass`, `2 passes`, `1 site`, `1,200 sites`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith('s') else 's'}"
