"""How far rounding alone moves outputs, of the original and of the artifact."""
