"""Rows of a run: tokenised once into a memory-mapped file, then put in order and collated into batches.

`cache` writes and opens the rows of any task, and packs them. `records`, `pairs` and `trajectories` make rows.
`batches` pads text rows, and `sampling` puts rows in the order of an epoch.

Shapes: B rows of a batch (samples, packs or interleaved questions), T tokens of the longest row.
"""
