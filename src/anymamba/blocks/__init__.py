"""Blocks: one file or folder per family, each with a config, a cache and a module around the scan."""
