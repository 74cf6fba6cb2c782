"""A step written as files of other formats."""
