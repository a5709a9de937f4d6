"""``python -m anaphora`` is the ``anaphora`` command."""

from anaphora.cli import main

main()
