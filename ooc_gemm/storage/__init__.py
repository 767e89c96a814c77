"""Reads operands from Zarr arrays and writes C to one. Only this package imports zarr."""
