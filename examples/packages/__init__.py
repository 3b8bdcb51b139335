"""Which package of the standard library a piece of source is from."""
