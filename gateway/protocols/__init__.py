"""One module per protocol, each a translation to ``OpenRequest`` and back.

A protocol module has a body type (what a client may send), a function that makes an exchange of
it, and a ``Formatter`` (how a reply is written). A new protocol adds a module here and a route in
``app.py``; nothing else changes.
"""
