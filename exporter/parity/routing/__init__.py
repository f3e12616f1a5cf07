"""Discrete choices, as of a router among its experts, where rounding decides them."""
