"""Numba helpers that LLVM turns into vector code, shared by attention and sampling on CPU."""

from __future__ import annotations

import numba
import numpy as np

FAST_MATH = {"reassoc", "contract", "arcp", "nsz", "afn"}
"""All of fastmath but "nnan" and "ninf": running maxima begin at -inf, and a row that became NaN must stay NaN to
be reported."""


@numba.njit(fastmath=FAST_MATH, cache=True, nogil=True)
def exp_in_place(x, bits):  # type: ignore[no-untyped-def]  # pragma: no cover
    """x[i] = exp(x[i]) for x <= 0 (below -87: 1e-38). ``bits``: int32 scratch of the same length.

    2**n * p(r) with r in [-ln2/2, ln2/2] and the degree-5 polynomial of Cephes' expf; exp(0) is exactly 1.
    """
    scale = bits.view(np.float32)
    for i in range(x.size):
        v = max(x[i], np.float32(-87.0))
        n = np.floor(v * np.float32(1.44269504) + np.float32(0.5))
        r = v - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
        p = np.float32(1.9875691500e-4)
        p = p * r + np.float32(1.3981999507e-3)
        p = p * r + np.float32(8.3334519073e-3)
        p = p * r + np.float32(4.1665795894e-2)
        p = p * r + np.float32(1.6666665459e-1)
        p = p * r + np.float32(5.0000001201e-1)
        x[i] = p * r * r + r + np.float32(1.0)
        bits[i] = (np.int32(n) + np.int32(127)) << np.int32(23)
    for i in range(x.size):
        x[i] *= scale[i]
