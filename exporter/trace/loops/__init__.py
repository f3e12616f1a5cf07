"""Loops over tokens in a traced program, marked and written as Scan."""
