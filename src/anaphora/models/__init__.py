"""One file per architecture, read top to bottom."""
