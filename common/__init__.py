"""What every process shares: wire messages, channels, configuration, errors, life-cycle, trace.

This package imports nothing of ours and no torch; its list of files is closed
(``tests/unit/test_imports.py`` holds it).
"""
