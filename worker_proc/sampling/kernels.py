"""Sampling one row in Numba. No sorting of the vocabulary: cuts are found by bisecting a threshold.

Scratch arrays belong to the calling thread and are reused between rows; ``counts`` is all zero
between calls. The functions release the GIL.
"""

from __future__ import annotations

import numba
import numpy as np

from worker_proc.vector_math import FAST_MATH, exp_in_place

SMALL = 96
"""So many candidates are sorted rather than split by another pass."""
BLOCK = 512


@numba.njit(cache=True, nogil=True, error_model="numpy")  # a division by zero gives inf, which fails the row alone
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
def _num_not_below(values, best):  # type: ignore[no-untyped-def]  # pragma: no cover
    """How many of a slice are above ``best`` or NaN, in vector code."""
    count = np.int32(0)
    for i in range(values.size):
        count += np.int32(not (values[i] <= best))
    return count


@numba.njit(cache=True, nogil=True)
def argmax_allowed(row, mask):  # type: ignore[no-untyped-def]  # pragma: no cover
    """(id, logit) of the first maximum of ``row`` [V] among the ids whose bit in ``mask`` is 1; nothing is copied.

    The logit is NaN if an allowed one is, and -inf (with id 0) where none is above that. Runs of words that
    allow everything, the bulk of a mask within a string, are looked into only where they hold something greater.
    """
    best, token = np.float32(-np.inf), 0
    num_words = min((row.size + 31) // 32, mask.size)
    word = 0
    while word < num_words:
        first, word = word, word + 1
        if mask[first] == 0:
            continue
        if mask[first] == -1:
            while word < num_words and word - first < BLOCK // 32 and mask[word] == -1:
                word += 1
            if _num_not_below(row[32 * first : 32 * word], best) == 0:
                continue
        for token_id in range(32 * first, min(32 * word, row.size)):
            bits = mask[token_id // 32]
            if (bits >> np.int32(token_id % 32)) & np.int32(1) and not row[token_id] <= best:
                best, token = row[token_id], token_id
                if best != best:
                    return token, best
    return token, best


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


@numba.njit(fastmath=FAST_MATH, cache=True, nogil=True)
def _above(values, weights, bound):  # type: ignore[no-untyped-def]  # pragma: no cover
    """(count, mass) of the entries with value >= bound, in vector code.

    Two loops over a slice, each with one float sum: in any other form LLVM leaves them scalar, six times as slow.
    """
    count, mass = 0, 0.0
    for begin in range(0, values.size, BLOCK):
        v, w = values[begin : begin + BLOCK], weights[begin : begin + BLOCK]
        block_count, block_mass = np.float32(0), np.float32(0)
        for i in range(v.size):
            block_mass += w[i] if v[i] >= bound else np.float32(0)
        for i in range(v.size):
            block_count += np.float32(1) if v[i] >= bound else np.float32(0)
        count += int(block_count)
        mass += np.float64(block_mass)
    return count, mass


@numba.njit(fastmath=FAST_MATH, cache=True, nogil=True)
def _between(values, low, high, members):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Collect the ids with low <= value < high, ascending, in ``members``; how many. Most blocks hold none."""
    n = 0
    for begin in range(0, values.size, 64):
        v = values[begin : begin + 64]
        hits = np.float32(0)
        for i in range(v.size):
            hits += np.float32((v[i] >= low) & (v[i] < high))
        if hits > 0:
            for i in range(v.size):
                if v[i] >= low and v[i] < high:
                    members[n] = begin + i
                    n += 1
    return n


@numba.njit(cache=True, nogil=True)
def find_cut(values, weights, want_count, want_mass, members):  # type: ignore[no-untyped-def]  # pragma: no cover
    """The shortest prefix, in order of value (descending, ties by id), that holds enough.

    ``values`` [V] <= 0 are scaled log-weights (-inf: not a candidate), ``weights`` their exponentials.
    Enough is ``want_count`` entries or a mass of ``want_mass``. Returns (value, id, mass): the last
    entry kept and the prefix's mass; (-inf, V, total) if everything is needed. ``members`` int32 [V] is scratch.

    A threshold is bisected by passes of vector code until few entries (or equal ones) are left
    between "not enough" and "enough"; only these are sorted.
    """
    size = values.size
    low, high = np.float32(0), np.float32(np.inf)
    count_high, mass_high = 0, 0.0
    count_low, mass_low = _above(values, weights, low)
    step = np.float32(1)
    while count_low < want_count and mass_low < want_mass:
        high, count_high, mass_high = low, count_low, mass_low
        if low == -np.inf:
            return low, size, mass_low
        low = -step if step < np.float32(1e30) else np.float32(np.finfo(np.float32).min)
        if high == low:
            return np.float32(-np.inf), size, mass_low
        step *= np.float32(2)
        count_low, mass_low = _above(values, weights, low)
    while count_low - count_high > SMALL:
        middle = np.float32(0.5) * low + np.float32(0.5) * min(high, np.float32(0))
        if middle <= low or middle >= high:
            break
        count, mass = _above(values, weights, middle)
        if count < want_count and mass < want_mass:
            high, count_high, mass_high = middle, count, mass
        else:
            low, count_low, mass_low = middle, count, mass
    n = _between(values, low, high, members)
    if n <= SMALL:
        _sort_candidates(values, members, n)
    count, mass, last = count_high, mass_high, members[0]
    for j in range(n):
        last = members[j]
        count += 1
        mass += weights[last]
        if count >= want_count or mass >= want_mass:
            break
    return values[last], last, mass


@numba.njit(fastmath=FAST_MATH, cache=True, nogil=True)
def _block_sum(block):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Sum of a block (a slice: see :func:`_above`), in vector code."""
    total = np.float32(0)
    for i in range(block.size):
        total += block[i]
    return np.float64(total)


@numba.njit(fastmath=FAST_MATH, cache=True, nogil=True)
def _keep_until(values, weights, cut_value, cut_id):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Drop what comes after the entry (cut_value, cut_id) in order of value, ties by id."""
    for i in range(values.size):
        keep = values[i] > cut_value or (values[i] == cut_value and i <= cut_id)
        weights[i] = weights[i] if keep else np.float32(0)
        values[i] = values[i] if keep else np.float32(-np.inf)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def draw(work, peak, temperature, top_k, top_p, min_p, u, weights, bits, members, sums):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Draw one id from softmax(work / temperature) after the filters, by inverse CDF in order of ids.

    ``work`` [V] float32 is overwritten. ``u`` in (0, 1).
    """
    size = work.size
    inverse = np.float32(1.0 / temperature)
    for i in range(size):
        work[i] = (work[i] - peak) * inverse
        weights[i] = work[i]
    exp_in_place(weights, bits)
    huge = np.int64(1) << 62
    limit = -1.0
    if 0 < top_k < size:
        value, token, limit = find_cut(work, weights, top_k, np.inf, members)
        _keep_until(work, weights, value, token)
    if top_p < 1.0:
        if limit < 0:
            limit = _above(work, weights, np.finfo(np.float32).min)[1]
        value, token, limit = find_cut(work, weights, huge, top_p * limit, members)
        _keep_until(work, weights, value, token)
    if min_p > 0.0:
        _keep_until(work, weights, np.float32(np.log(min_p)), size)
    total = 0.0
    num_blocks = (size + BLOCK - 1) // BLOCK
    for b in range(num_blocks):
        sums[b] = _block_sum(weights[b * BLOCK : (b + 1) * BLOCK])
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
        total += _block_sum(weights[begin : begin + BLOCK])
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
