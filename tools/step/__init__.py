"""Single-step mode: the scheduler in a terminal, one step per key.

===============  ================================================================
``__main__.py``  the command line and the keys: ``python -m tools.step``
``engine.py``    scheduler, worker and clock, moved by one step at a time
``links.py``     the worker it drives: a fake one, or the real process
``words.py``     text to ids and back: the model's tokenizer, or plain words
``view.py``      the screen, from the scheduler's state
``style.py``     colours, and the screen as an SVG
===============  ================================================================
"""
