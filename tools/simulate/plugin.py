"""A scheduling policy or an eviction of your own, from a Python file, without touching the server.

The file may define

``Policy``  a class with ``preempts`` and ``order(queue, tree, now)`` as in ``scheduler_proc/policy.py``
``Tree``    a subclass of ``scheduler_proc.radix.RadixTree``, say with another ``evict(num_pages)``
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError
from scheduler_proc.policy import Policy
from scheduler_proc.radix import RadixTree
from scheduler_proc.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Plugin:
    """What a policy file brought."""

    name: str
    policy: type[Policy] | None
    tree: type[RadixTree] | None

    def apply_policy(self, scheduler: Scheduler) -> None:
        """Before the first request."""
        if self.policy is not None:
            scheduler.batcher.policy = self.policy()

    def apply_tree(self, scheduler: Scheduler) -> None:
        """Right after the worker became ready, while the tree is empty."""
        pool = scheduler.state.need_pool()
        if self.tree is not None:
            pool.tree = self.tree(pool.allocator, pool.page_size, enabled=pool.tree.enabled)


def load_plugin(path: Path) -> Plugin:
    """Run a policy file. Raises ConfigError when it brings nothing, or not what it should."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"--policy-file {path}: no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    policy, tree = getattr(module, "Policy", None), getattr(module, "Tree", None)
    if policy is None and tree is None:
        raise ConfigError(f"--policy-file {path}: defines neither a class Policy nor a class Tree")
    if policy is not None and not (hasattr(policy, "order") and hasattr(policy, "preempts")):
        raise ConfigError(f"--policy-file {path}: Policy needs `preempts` and `order(queue, tree, now)`")
    if tree is not None and not (isinstance(tree, type) and issubclass(tree, RadixTree)):
        raise ConfigError(f"--policy-file {path}: Tree must be a subclass of scheduler_proc.radix.RadixTree")
    return Plugin(path.stem, policy, tree)
