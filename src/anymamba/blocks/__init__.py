"""Blocks: one family a file, each a config, a cache and a module around the scan."""
