"""Gradient-boosted trees as xgboost saved them, evaluated by xgboost's own library, or many rows by `perfmodel.forest`.

Importing the package `xgboost` also imports SciPy and scikit-learn, about a second that a prediction has no use for. The
trees need the package's shared library only, which is called here through its C API: the results are xgboost's own.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import sys
from functools import cache, cached_property
from pathlib import Path
from threading import Lock

import numpy as np
import numpy.typing as npt

from perfmodel.compiled import worth_compiling
from perfmodel.forest import FEW_ROWS, Forest
from perfmodel.packed import is_packed, unpack

_FILES = {"win32": "xgboost.dll", "darwin": "libxgboost.dylib"}


@cache
def _library() -> ctypes.CDLL:
    found = importlib.util.find_spec("xgboost")
    folders = list(found.submodule_search_locations or []) if found else []
    name = _FILES.get(sys.platform, "libxgboost.so")
    for path in (*(Path(folder) / "lib" / name for folder in folders), Path(sys.base_prefix) / "lib" / name):
        if path.is_file():
            library = ctypes.CDLL(str(path))
            library.XGBGetLastError.restype = ctypes.c_char_p
            return library
    raise ModuleNotFoundError("xgboost's library is not found; install it with: pip install xgboost-cpu")


def _check(status: int) -> None:
    if status:
        message = (_library().XGBGetLastError() or b"").decode(errors="replace")
        raise ValueError(f"xgboost refuses the trees: {(message.splitlines() or ['no reason given'])[0]}")


class _Booster:
    """Trees in xgboost's library, on one thread."""

    def __init__(self, saved: bytes) -> None:
        """Read them; raises as `Trees`."""
        self._handle = ctypes.c_void_p()
        library = _library()
        _check(library.XGBoosterCreate(None, ctypes.c_uint64(0), ctypes.byref(self._handle)))
        _check(library.XGBoosterLoadModelFromBuffer(self._handle, saved, ctypes.c_uint64(len(saved))))
        _check(library.XGBoosterSetParam(self._handle, b"nthread", b"1"))
        number = ctypes.c_uint64()
        _check(library.XGBoosterGetNumFeature(self._handle, ctypes.byref(number)))
        self.features = number.value
        # The library configures a booster when it is first asked.
        self._alone = Lock()

    def __del__(self) -> None:
        """Free what the library holds."""
        if self._handle:
            _library().XGBoosterFree(self._handle)

    def evaluate(self, values: npt.NDArray[np.float32], contributions: bool) -> npt.NDArray[np.float32]:
        """What `Trees.predict` or `Trees.contributions` gives, of rows that lie densely in memory, (rows, 1 or more)."""
        if not len(values):
            return np.empty((0, self.features + 1 if contributions else 1), dtype=np.float32)
        with self._alone:
            return self._evaluate(values, contributions)

    def _evaluate(self, values: npt.NDArray[np.float32], contributions: bool) -> npt.NDArray[np.float32]:
        library, interface = (
            _library(),
            json.dumps({"data": [values.ctypes.data, True], "shape": values.shape, "typestr": "<f4", "version": 3}).encode(),
        )
        options = json.dumps(
            {"type": 2 if contributions else 0, "training": False, "iteration_begin": 0, "iteration_end": 0,
             "strict_shape": False, "missing": float("nan"), "cache_id": 0}
        ).encode()  # fmt: skip
        shape, dimensions = ctypes.POINTER(ctypes.c_uint64)(), ctypes.c_uint64()
        out = ctypes.POINTER(ctypes.c_float)()
        results = ctypes.byref(shape), ctypes.byref(dimensions), ctypes.byref(out)
        if contributions:
            data = ctypes.c_void_p()
            _check(library.XGDMatrixCreateFromDense(interface, b'{"missing": NaN}', ctypes.byref(data)))
            try:
                _check(library.XGBoosterPredictFromDMatrix(self._handle, data, options, *results))
                return self._copied(shape, dimensions, out)
            finally:
                library.XGDMatrixFree(data)
        _check(library.XGBoosterPredictFromDense(self._handle, interface, options, None, *results))
        return self._copied(shape, dimensions, out)

    @staticmethod
    def _copied(shape: ctypes._Pointer, dimensions: ctypes.c_uint64, out: ctypes._Pointer) -> npt.NDArray[np.float32]:
        # The library owns its result, and overwrites it at the next prediction.
        extents = tuple(int(shape[axis]) for axis in range(dimensions.value))
        return np.ctypeslib.as_array(out, shape=extents).copy()


class Trees:
    """An ensemble of trees, ready to predict."""

    def __init__(self, saved: bytes) -> None:
        """Read trees as a file holds them.

        Args:
            saved: What `perfmodel.packed.pack` made or `xgboost.Booster.save_raw` saved, as UBJSON or JSON, compressed by gzip
                or not. It is kept.

        Raises:
            EOFError: they are truncated, or damaged so that they cannot be unpacked.
            ValueError: xgboost cannot read them.
            ModuleNotFoundError: xgboost is not installed.
        """
        self._saved = saved
        # xgboost has read its own document sooner.
        self._packed = is_packed(saved)
        some = self._forest if self._packed or worth_compiling(0) else None
        self.features = (some or self._booster).features

    @cached_property
    def _forest(self) -> Forest | None:
        return Forest.of(self._saved)

    @cached_property
    def _booster(self) -> _Booster:
        return _Booster(unpack(self._saved))

    def predict(self, matrix: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
        """The sum of the trees' leaves for each row.

        Args:
            matrix: Features, (rows, features); NaN where one is missing.

        Returns:
            (rows,).

        Raises:
            ValueError: the matrix has another number of columns than the trees were fitted on.
        """
        values = self._values(matrix)
        by_ourselves = (self._packed and len(values) <= FEW_ROWS) or worth_compiling(len(values))
        if by_ourselves and self._forest and not np.isnan(values).any():
            return self._forest.sums(values)
        return self._booster.evaluate(values, contributions=False).reshape(-1)

    def contributions(self, matrix: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
        """What each feature adds to each row's prediction (SHAP values), and in the last column the mean prediction.

        Args:
            matrix: Features, (rows, features).

        Returns:
            (rows, features + 1); a row's sum is its prediction.
        """
        return self._booster.evaluate(self._values(matrix), contributions=True)

    def _values(self, matrix: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
        values = np.ascontiguousarray(matrix, dtype=np.float32)
        if values.ndim != 2 or values.shape[1] != self.features:
            raise ValueError(
                f"these trees were fitted on {self.features} features, and this version of loka-sim makes {values.shape[-1]}; "
                "fit them again: loka-sim collect --gpu, or python -m perfmodel.fit"
            )
        return values
