"""The word problem of A5, the smallest group whose products a rotation in the plane cannot track."""
