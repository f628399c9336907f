"""`lt-parallel scaling`: how throughput grows with the number of devices, measured or read, and what limits it."""
