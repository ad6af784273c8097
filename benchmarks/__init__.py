"""Measurements of this software, run by hand: each script says how in its first lines."""
