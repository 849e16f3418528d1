"""What a recorded server did (``--trace DIR``), read back.

================  ====================================================================
``__main__.py``   the command line: ``python -m tools.replay TRACE``
``reader.py``     segments from files, also those of processes that were killed
``rows.py``       which request each row of a batch worked on
``lives.py``      every request's life, put together from all processes' records
``timeline.py``   one life, and all of them in summary, as text
``perfetto.py``   the run as Chrome trace events, for ui.perfetto.dev
``picture.py``    the run as an SVG: requests from top to bottom, time from left to right
``rerun.py``      the recorded inputs through ``Scheduler.step`` again
================  ====================================================================
"""
