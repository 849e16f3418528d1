"""Reasoning blocks: what a model thinks before it answers, told from the answer.

The gateway uses ``registry.create`` (a parser for one choice of a response) and ``parser``
(``feed``, ``flush``). gpt-oss carries reasoning in its own message format: see
``gateway.tool_parsers.harmony``.
"""
