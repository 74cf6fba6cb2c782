"""Pickles, read without running them: an `interpreter`, and the `globals` that they may name."""
