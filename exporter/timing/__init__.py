"""Measure the artifact against its baselines."""
