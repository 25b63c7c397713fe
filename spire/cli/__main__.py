"""`python -m spire.cli`: the `spire` command without an installed script."""

from spire.cli import main

main()
