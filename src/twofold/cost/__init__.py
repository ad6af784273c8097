"""What steps, transfers and memory cost: shapes, accelerators, profiles, step times, links."""
