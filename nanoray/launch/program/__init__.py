"""`nanoray run`: any program as ranks on Ray, with what torchrun would give it.

    __main__.py   the command: its flags, and a process that imports torch meanwhile
    on_ray.py     devices, a folder, and everything given back
    driver.py     start all ranks, watch them, name the first cause, start all again
    output.py     what the ranks print, on the console; ends.py: why a rank has ended
    rank.py       the Ray actor of one rank: it owns the program's process
    forked.py     that process is forked where torch is imported already, by fork_server.py
    traced.py     with --trace, in that process: notes every collective; counts.py: a file that survives it
    rank_observer.py, observed.py   memory, GPUs and notes on their way to the records; who is behind in a hang
    files.py      what was run, and how it ended

These files know ranks, processes and exit codes, and nothing of steps, checkpoints or states.
"""
