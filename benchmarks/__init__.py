"""One question per file; each prints one table. `python -m benchmarks.NAME --help`."""
