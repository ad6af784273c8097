"""Load on any OpenAI-compatible endpoint at a trace's times, measured as the simulator measures."""
