"""Subtrees of the prefix tree: their figures, from a picture of the index that is taken while it changes."""
