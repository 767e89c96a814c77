"""Files and objects: direct, cached and asynchronous reads and writes, flushes and locks."""
