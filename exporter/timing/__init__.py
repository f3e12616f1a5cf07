"""Measuring the artifact beside what a user would have without it."""
