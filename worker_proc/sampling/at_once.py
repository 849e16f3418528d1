"""A sampler that is waited for, in the place of one that is not: both halves follow each other at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worker_proc.sampling.request import F32, I32, LogprobRequest, Sampler, SampleRequest, TopTokens


@dataclass(slots=True)
class DrawnIds:
    """See ``Drawn``."""

    ids: I32
    bad: NDArray[np.bool_]
    reports: dict[int, tuple[np.float32, TopTokens]] = field(default_factory=dict)

    def ready(self) -> bool:
        """See ``Drawn``."""
        return True

    def wait(self) -> tuple[I32, NDArray[np.bool_]]:
        """See ``Drawn``."""
        return self.ids, self.bad

    def report(self, place: int) -> tuple[np.float32, TopTokens]:
        """See ``Drawn``."""
        return self.reports[place]


@dataclass(frozen=True, slots=True)
class KnownReports:
    """See ``Reports``."""

    values: F32
    tops: list[TopTokens]

    def ready(self) -> bool:
        """See ``Reports``."""
        return True

    def wait(self) -> tuple[F32, list[TopTokens]]:
        """See ``Reports``."""
        return self.values, self.tops


class AtOnce:
    """An ``AheadSampler`` that has done everything when it returns."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def begin(self, logits: Any, requests: Sequence[SampleRequest]) -> DrawnIds:
        """See ``AheadSampler``."""
        drawn = DrawnIds(*self._sampler.sample(logits, requests))
        wanted = {
            r: LogprobRequest(request.logit_row, int(drawn.ids[r]), request.params.logprobs)
            for r, request in enumerate(requests)
            if request.params.logprobs is not None and not drawn.bad[r]
        }
        if wanted:
            values, tops = self._sampler.logprobs(logits, list(wanted.values()))
            drawn.reports.update(zip(wanted, zip(values, tops, strict=True), strict=True))
        return drawn

    def begin_logprobs(self, logits: Any, requests: Sequence[LogprobRequest]) -> KnownReports:
        """See ``AheadSampler``."""
        if not requests:
            return KnownReports(np.empty(0, np.float32), [])
        return KnownReports(*self._sampler.logprobs(logits, requests))
