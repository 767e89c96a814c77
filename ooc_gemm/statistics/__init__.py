"""Statistics that people compute products for: thin functions that build a Request."""
