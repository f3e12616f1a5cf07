"""GPU kernels of the linexport ops, and the plan of which of them a node is run with.

sources/   the kernels, in Triton
plans/     for each op, the tiles and launches of a node
plan       the launches of any node, as the data of ``launch``; needs no Triton
compile    binaries of a plan, made ahead of time on a machine without a GPU
run        a plan run by Triton itself, in its interpreter or on a GPU
"""
