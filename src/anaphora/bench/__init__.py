"""``anaphora bench``: what a server does for its clients, measured from outside."""
