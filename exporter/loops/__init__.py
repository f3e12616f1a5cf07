"""Scan and Loop over tokens: how a step depends on its state, and the loop written otherwise."""
