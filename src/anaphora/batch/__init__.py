"""Many rows at once: planned, run, resumed."""
