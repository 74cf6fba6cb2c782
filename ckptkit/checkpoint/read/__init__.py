"""Reading a committed step: any box of any array, checked, into memory of the caller."""
