"""Is a step what was written, and what is in it?"""
