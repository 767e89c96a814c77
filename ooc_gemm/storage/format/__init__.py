"""What is stored: metadata, codecs, shards."""
