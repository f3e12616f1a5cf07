"""linexport's ops, each whole: schema, shape checks, float64 oracle, standard operators."""
