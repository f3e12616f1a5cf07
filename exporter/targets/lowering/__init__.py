"""linexport ops as nodes that a runtime has kernels of, and the choice among these."""
