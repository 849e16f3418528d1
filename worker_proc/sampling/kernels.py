"""Sampling one row in Numba. No sorting of the vocabulary: cuts are found by histograms that are refined.

Scratch arrays belong to the calling thread and are reused between rows; ``counts`` is all zero
between calls. The functions release the GIL.
"""

from __future__ import annotations

import numba
import numpy as np

from worker_proc.vector_math import FAST_MATH, exp_in_place

NUM_BINS = 512
FIRST_RANGE = 32.0
"""The first histogram spans 32 nats below the likeliest token; what lies lower shares the last bin."""
SMALL = 96
"""So many candidates are sorted rather than split again."""
BLOCK = 512


@numba.njit(cache=True, nogil=True)
def penalise(work, ids, prompt_len, presence, frequency, repetition, counts):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Apply the penalties to ``work`` [V]. presence/frequency: output ids; repetition: prompt and output ids.

    Repetition as in Keskar et al. 2019 (CTRL): positive logits are divided, negative ones multiplied.
    ``counts`` int32 [V] is all zero before and after: bit 30 marks an id as seen, the rest counts outputs.
    """
    seen = np.int32(1 << 30)
    for t in range(ids.size):
        counts[ids[t]] |= seen
        if t >= prompt_len:
            counts[ids[t]] += 1
    for t in range(ids.size):
        token = ids[t]
        if counts[token] == 0:
            continue
        number = counts[token] - seen
        counts[token] = 0
        logit = work[token]
        if repetition != 1.0:
            logit = logit / repetition if logit > 0 else logit * repetition
        if number > 0:
            logit -= presence + frequency * np.float32(number)
        work[token] = logit


@numba.njit(cache=True, nogil=True)
def apply_mask(work, mask):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Set the logits of ids whose bit in ``mask`` is 0 to -inf; ids beyond the mask are forbidden too."""
    size = work.size
    for word in range((size + 31) // 32):
        bits = mask[word] if word < mask.size else np.int32(0)
        if bits == np.int32(-1):
            continue
        for bit in range(min(32, size - 32 * word)):
            if not (bits >> np.int32(bit)) & np.int32(1):
                work[32 * word + bit] = -np.inf


@numba.njit(cache=True, nogil=True)
def find_peak(work):  # type: ignore[no-untyped-def]  # pragma: no cover
    """(index, value) of the first maximum; value NaN if any entry is NaN."""
    best, peak = 0, np.float32(-np.inf)
    bad = False
    for i in range(work.size):
        if work[i] > peak:
            best, peak = i, work[i]
        bad |= work[i] != work[i]
    return best, np.float32(np.nan) if bad else peak


@numba.njit(cache=True, nogil=True)
def _sort_candidates(values, members, n):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Sort members[:n] by value descending, id ascending (insertion sort; n is small or nearly sorted)."""
    for i in range(1, n):
        m = members[i]
        v = values[m]
        j = i - 1
        while j >= 0 and (values[members[j]] < v or (values[members[j]] == v and members[j] > m)):
            members[j + 1] = members[j]
            j -= 1
        members[j + 1] = m


@numba.njit(cache=True, nogil=True)
def find_cut(values, weights, want_count, want_mass, members, n, bin_count, bin_mass):  # type: ignore[no-untyped-def]  # pragma: no cover
    """The shortest prefix, in order of value (descending, ties by id), that holds enough.

    ``values`` [V] <= 0 are scaled log-weights (-inf: not a candidate), ``weights`` their exponentials.
    Enough is ``want_count`` entries or a mass of ``want_mass``. ``n`` >= 0: only ids in ``members[:n]``
    (ascending) are candidates; -1: all. ``members`` is overwritten. Returns (value, id, mass): the last
    entry kept and the prefix's mass; (-inf, V, total) if everything is needed.
    """
    size = values.size
    high, scale = np.float32(0), np.float32(NUM_BINS / FIRST_RANGE)
    count, mass = 0, 0.0
    first = True
    while True:
        bin_count[:] = 0
        bin_mass[:] = 0.0
        for j in range(size if n < 0 else n):
            i = j if n < 0 else members[j]
            v = values[i]
            if v > -np.inf:
                at = np.int64(min((high - v) * scale, np.float32(NUM_BINS - 1)))
                bin_count[at] += 1
                bin_mass[at] += weights[i]
        b = 0
        while b < NUM_BINS and count + bin_count[b] < want_count and mass + bin_mass[b] < want_mass:
            count += bin_count[b]
            mass += bin_mass[b]
            b += 1
        if b == NUM_BINS:
            if first:
                return np.float32(-np.inf), size, mass
            b = NUM_BINS - 1  # sums in another order fell short by rounding: the last candidate is the cut
            while bin_count[b] == 0:
                b -= 1
            count -= bin_count[b]
            mass -= bin_mass[b]
        kept = 0
        top, bottom = np.float32(-np.inf), np.float32(np.inf)
        for j in range(size if n < 0 else n):
            i = j if n < 0 else members[j]
            v = values[i]
            if v > -np.inf and np.int64(min((high - v) * scale, np.float32(NUM_BINS - 1))) == b:
                members[kept] = i
                kept += 1
                top, bottom = max(top, v), min(bottom, v)
        n = kept
        first = False
        scale = np.float32(NUM_BINS - 1) / (top - bottom) if top > bottom else np.float32(np.inf)
        high = top
        if n <= SMALL or not scale < np.float32(1e30):
            break
    if n <= SMALL:
        _sort_candidates(values, members, n)
    last = members[0]
    for j in range(n):
        last = members[j]
        count += 1
        mass += weights[last]
        if count >= want_count or mass >= want_mass:
            break
    return values[last], last, mass


@numba.njit(fastmath=FAST_MATH, cache=True, nogil=True)
def _block_sum(weights, begin, end):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Sum of a block, in vector code."""
    total = np.float32(0)
    for i in range(begin, end):
        total += weights[i]
    return np.float64(total)


@numba.njit(cache=True, nogil=True)
def draw(work, peak, temperature, top_k, top_p, min_p, u, weights, bits, members, bin_count, bin_mass, sums):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Draw one id from softmax(work / temperature) after the filters, by inverse CDF in order of ids.

    ``work`` [V] float32 is overwritten with (work - peak) / temperature. ``u`` in (0, 1).
    """
    size = work.size
    inverse = np.float32(1.0 / temperature)
    for i in range(size):
        work[i] = (work[i] - peak) * inverse
        weights[i] = work[i]
    exp_in_place(weights, bits)
    cut_value, cut_id = np.float32(-np.inf), size
    huge = np.int64(1) << 62
    limit, n = np.inf, -1
    if 0 < top_k < size:
        cut_value, cut_id, limit = find_cut(work, weights, top_k, np.inf, members, -1, bin_count, bin_mass)
        n = 0
        for i in range(size):  # what top_k left is few: top_p need not look at the whole vocabulary again
            if work[i] > cut_value or (work[i] == cut_value and i <= cut_id):
                members[n] = i
                n += 1
    if top_p < 1.0:
        if limit == np.inf:
            limit = 0.0
            for begin in range(0, size, BLOCK):
                limit += _block_sum(weights, begin, min(begin + BLOCK, size))
        value, token, _ = find_cut(work, weights, huge, top_p * limit, members, n, bin_count, bin_mass)
        if value > -np.inf:
            cut_value, cut_id = value, token
    if min_p > 0.0:
        floor = np.float32(np.log(min_p))
        if floor > cut_value:
            cut_value, cut_id = floor, size
    if cut_value > -np.inf:
        for i in range(size):
            if work[i] < cut_value or (work[i] == cut_value and i > cut_id):
                weights[i] = np.float32(0)
    total = 0.0
    num_blocks = (size + BLOCK - 1) // BLOCK
    for b in range(num_blocks):
        sums[b] = _block_sum(weights, b * BLOCK, min((b + 1) * BLOCK, size))
        total += sums[b]
    rest = u * total
    for b in range(num_blocks):
        if rest >= sums[b] and b + 1 < num_blocks:
            rest -= sums[b]
            continue
        last = -1
        for i in range(b * BLOCK, min((b + 1) * BLOCK, size)):
            if weights[i] > 0 and work[i] > -np.inf:
                last = i
                rest -= weights[i]
                if rest < 0:
                    return i
        if last >= 0:
            return last
        rest = np.inf if b + 1 == num_blocks else 0.0
    for i in range(size - 1, -1, -1):  # u ran past the end by rounding
        if weights[i] > 0 and work[i] > -np.inf:
            return i
    return 0


@numba.njit(fastmath=FAST_MATH, cache=True, nogil=True)
def log_normaliser(row, peak, weights, bits):  # type: ignore[no-untyped-def]  # pragma: no cover
    """log(sum(exp(row))) of one row [V] whose maximum is ``peak``."""
    for i in range(row.size):
        weights[i] = row[i] - peak
    exp_in_place(weights, bits)
    total = 0.0
    for begin in range(0, row.size, BLOCK):
        total += _block_sum(weights, begin, min(begin + BLOCK, row.size))
    return np.float64(peak) + np.log(total)


@numba.njit(cache=True, nogil=True)
def find_top(row, top_ids):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Fill ``top_ids`` [k] with the ids of the k largest entries, largest first, ties by id. k <= len(row)."""
    k, filled = top_ids.size, 0
    for i in range(row.size):
        v = row[i]
        if filled == k and not v > row[top_ids[k - 1]]:
            continue
        j = min(filled, k - 1)
        while j > 0 and row[top_ids[j - 1]] < v:
            top_ids[j] = top_ids[j - 1]
            j -= 1
        top_ids[j] = i
        filled = min(filled + 1, k)
