"""Writing a step: what each rank writes, and the commit that makes all of it exist at once."""
