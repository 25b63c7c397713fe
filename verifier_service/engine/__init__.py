"""The engine: one thread that owns the target, its cache and every sequence."""
