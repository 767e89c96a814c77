"""Carries out requests: opens operands, plans, runs the plan, and returns the result."""
