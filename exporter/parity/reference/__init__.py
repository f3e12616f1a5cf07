"""The original as reference: its module, its outputs, the values inside it."""
