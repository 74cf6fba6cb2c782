"""Checkpoints of Orbax, as JAX saves them: a tree of Zarr arrays, mostly in a database."""
