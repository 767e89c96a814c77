"""The report of a run: one HTML page with its plan, timeline, memory, checks and environment."""
