"""What a handoff costs: bytes a second, time to decode-ready, the decode loop, blocks held."""
