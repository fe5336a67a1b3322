"""One opening of a run, for every command: configuration → plan → data → folder → record.

    cli, config ─► Settings ─► opening.Opening ─► RunSpec ─► train or launch

plan.py decides the configuration for a number of ranks, which need not exist.
The driver uses this room, so torch is imported late.
"""
