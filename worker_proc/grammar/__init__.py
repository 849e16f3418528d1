"""Constrained decoding with llguidance: the only place that names it in the worker."""

from worker_proc.grammar.backend import LLGuidanceBackend
from worker_proc.grammar.session import LLGuidanceSession

__all__ = ["LLGuidanceBackend", "LLGuidanceSession"]
