"""How arrays are stored: metadata, codecs and shards."""
