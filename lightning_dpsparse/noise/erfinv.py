"""The inverse error function, as exact as noise needs it and no slower.

It turns uniform draws into normal ones (`keystream.py`). PyTorch asks MKL for more digits than
noise needs, so MKL is called directly here. Where there is no MKL, PyTorch's own function is used.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_MODE = 0x1 | 0x100
"""Flags of MKL. VML_LA allows an error of four units in the last place (torch asks for one, which
takes twice as long). With VML_ERRMODE_IGNORE an infinite result is no error."""


def _of_mkl() -> Any:
    """Find vmsErfInv(count, from, to, mode) in the MKL of torch. Return None if there is none."""
    try:
        function = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libtorch_cpu.so")).vmsErfInv
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    function.restype = None
    return function


_VMS_ERF_INV = _of_mkl()


def erfinv_(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Compute the inverse error function in place, for fewer than 2^31 contiguous numbers."""
    assert x.dtype == np.float32
    assert x.flags.c_contiguous
    if _VMS_ERF_INV is None:
        torch.from_numpy(x).erfinv_()
    else:
        _VMS_ERF_INV(x.size, x.ctypes.data, x.ctypes.data, _MODE)
    return x
