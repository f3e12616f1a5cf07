"""Checks of an artifact in the forms that continuous integration reads."""
