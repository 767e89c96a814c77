"""Makes plans from numbers: what is read, multiplied and written when. It uses the standard library only, and
touches neither a store nor a device."""
