"""Which package of the standard library a chunk of source code is from."""
