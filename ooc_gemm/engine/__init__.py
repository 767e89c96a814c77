"""Runs a plan. It knows its own ports (`ports`) and nothing of Zarr or of any device."""
