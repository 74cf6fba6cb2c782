"""Other people's checkpoints, read as steps: `readers` has a module for each format that reads its
metadata, and `contents` makes of it what our own manifest says: which bytes of which file are which
elements of which array. No tensor is read here, no pickle is ever run, and torch is not needed.
"""
