"""Runs a plan. It knows only its own ports (`ports`), and nothing of Zarr or of any device."""
