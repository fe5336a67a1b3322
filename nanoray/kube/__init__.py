"""Kubernetes: render, submit, follow and fetch a run."""
