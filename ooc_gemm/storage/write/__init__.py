"""Writes C: its chunks, its journal, its attributes, and the metadata of groups above it."""
