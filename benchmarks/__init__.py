"""Benchmarks of anymamba against its peers: `python -m benchmarks --help`."""
