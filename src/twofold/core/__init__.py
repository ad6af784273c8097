"""Sans-IO state machines: `handle(message, now_ns) -> effects`, driven live or by virtual time."""
