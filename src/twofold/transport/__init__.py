"""Moves KV blocks between workers, and nothing else: shared memory and TCP."""
