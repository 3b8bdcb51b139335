"""Load for a server, and what it makes of it: no torch here, so that the client takes little of the machine."""
