"""Moves KV blocks between workers, and nothing else: shared memory, TCP, adapters of engines."""
