"""The formats that are read: a file for each, found by ``linexport.sources.packed``."""
