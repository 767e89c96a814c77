"""Operands."""
