"""The supervisor's parts: children, their health, the run directory, the screen.

``launch.py`` puts them together. Imports ``common`` only; the processes are started by package name.
"""
