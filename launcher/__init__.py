"""The supervisor's parts: children, their health, the run directory, systemd's socket, the screen.

``launch.py`` puts them together. Imports ``common`` only; the processes are started by package name.
"""
