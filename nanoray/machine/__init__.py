"""This machine: GPUs, MIG slices, CPUs, network interfaces, files, the clock, output."""
