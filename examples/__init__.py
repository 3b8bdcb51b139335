"""Programs to run and to read: `python -m examples.NAME --help`."""
