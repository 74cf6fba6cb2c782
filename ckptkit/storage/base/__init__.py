"""What every store stands on: what it promises, locations and options, sinks, memory, the disk."""
