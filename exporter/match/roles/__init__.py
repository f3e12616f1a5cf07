"""Roles of the factors of a normal form: query, key, value, mask, decay, denominator."""
