"""C, its journal, its attributes, and what is around it."""
