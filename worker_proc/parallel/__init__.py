"""Tensor parallelism: one model over several processes, each with its part of every large weight."""
