"""The steps of a run: listed, pruned, copied to another place, verified and compared."""
