"""Load for a server, and the figures that it gives. Nothing here imports torch, so that the client stays small."""
