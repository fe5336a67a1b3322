"""Stand-ins for packages that a GPU machine may lack: see gpu_day.py, which alone puts them on a path.

They have as much of a package as a run of the presets needs, and are no replacement for it.
tests/unit/test_standins.py compares them with the real ones.
"""
