"""The fault matrix and the soak: real processes, real faults, and what clients have at the end."""
