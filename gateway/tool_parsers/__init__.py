"""Tool calls: parsers of each model family's syntax, and grammars that enforce it.

The gateway uses ``base`` (events), ``registry`` (``create``, ``detect``) and ``grammar``
(``plan_tools``: from ``tools`` and ``tool_choice`` to a grammar and a parser).
"""
