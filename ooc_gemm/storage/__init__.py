"""Zarr arrays: operands that are read, and C that is written. The only importer of zarr."""
