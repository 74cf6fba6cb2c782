"""A module for each format, and `formats`, which finds out whose a folder or a file is."""
