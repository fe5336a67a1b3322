"""Kubernetes: render, submit and follow a run."""
