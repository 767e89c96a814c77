"""From numbers to a plan of what is read when. Standard library only; no store, no device."""
