"""What a validation is asked."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loka_sim.dispatch.operands import DEFAULT_LIBRARIES

if TYPE_CHECKING:
    from loka_sim.whatif import WhatIf


@dataclass(frozen=True)
class Request:
    """What is validated; a folder holds one.

    Attributes:
        model: As `whatif` takes it.
        batch: Samples per GPU.
        mods: Changes to the model.
        hardware: Whose shipped timings are validated.
        statistics: As given; None for the default.
        minutes: Time to spend.
        seed: Of the fresh shapes and samples.
        max_mere: As in `whatif`.
        min_speedup: As in `whatif`.
        libraries: Whose FP8 kernels to choose from, and to measure beside torch's.
    """

    model: str
    batch: int
    mods: tuple[str, ...]
    hardware: str
    statistics: str | None
    minutes: float
    seed: int
    max_mere: float = 0.2
    min_speedup: float = 1.05
    libraries: tuple[str, ...] = DEFAULT_LIBRARIES

    def to_dict(self) -> dict[str, Any]:
        """The request as JSON values."""
        return {**asdict(self), "mods": list(self.mods), "libraries": list(self.libraries)}

    def answer(self, calibration: Path | None = None) -> WhatIf:
        """The what-if of this request."""
        from loka_sim.whatif import whatif

        return whatif(
            self.model, batch=self.batch, hardware=self.hardware, statistics=self.statistics, mods=self.mods,
            max_mere=self.max_mere, min_speedup=self.min_speedup, calibration=calibration, libraries=self.libraries,
        )  # fmt: skip
