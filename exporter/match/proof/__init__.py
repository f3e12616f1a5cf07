"""Proof of a match: both sides run on the same random inputs."""
