"""Asyncio drivers: the worker and gateway processes, their supervisor, clock and logs."""
