"""The machine and the process: memory, environment, progress."""
