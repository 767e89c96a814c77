"""Reads operands: Zarr arrays, NumPy arrays, and anything with shape, dtype and slicing."""
