"""What OpenBLAS is told of the processor, where it does not know it: of AMD's Zen 5.

OpenBLAS 0.3.31, numpy's, takes it for a processor without AVX-512, and multiplies matrices at half its speed. It reads the
environment once, when numpy is first imported: `loka-sim` tells it before that.
"""

import os
import sys

_VARIABLE, _KERNELS = "OPENBLAS_CORETYPE", "SkylakeX"
_ZEN_5 = ("AuthenticAMD", "26")
# What those kernels are made of.
_NEEDED = frozenset(("avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"))


def tell_openblas(processor: str = "/proc/cpuinfo") -> None:
    """Name the kernels to use in `OPENBLAS_CORETYPE`, unless that is set, numpy is there already, or nothing needs to be said.

    Args:
        processor: File that describes the processor, as Linux does; without it nothing is said.
    """
    if _VARIABLE in os.environ or "numpy" in sys.modules:
        return
    try:
        with open(processor) as file:
            first = file.read().split("\n\n", 1)[0]
    except (OSError, UnicodeDecodeError):
        return
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
    if (said.get("vendor_id"), said.get("cpu family")) == _ZEN_5 and set(said.get("flags", "").split()) >= _NEEDED:
        os.environ[_VARIABLE] = _KERNELS
