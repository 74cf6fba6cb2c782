"""Other people's checkpoints, read as steps: `formats.recognise` finds out whose a folder or a file
is, one module for each format reads its metadata, and `contents` makes of it what our own manifest
says: which bytes of which file are which elements of which array. No tensor is read here, no pickle
is ever run, and torch is not needed.
"""
