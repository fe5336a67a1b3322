"""nanoray: train nanoGPT on many accelerators with raw PyTorch DDP on Ray, nothing hidden."""

__version__ = "0.1.0"
