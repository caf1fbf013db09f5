"""Graphs in which a large value is computed in chunks, one after the other.

Recomputation cannot go below what one operator reads and writes.  Where the rows of a value are
independent of each other, from operator to operator, as the scores of a language model's tokens
are, a few rows at a time can be computed, used and forgotten: `region_of` finds the operators for
which that can be proven, `chunked` writes the graph.
"""
