"""Linear attention in graphs that were not written with it, found by algebra and proven by running.

forms     every tensor as a sum of products over labelled axes
roles     its factors as query, key, value, mask, decay and denominator
emit      roles as operands of a fused op, and the op in place of the nodes
proof     both sides on the same random inputs
search    attention in a graph, by kinds of notation, and what is in the way
"""
