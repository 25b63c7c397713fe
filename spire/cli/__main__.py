"""`python -m spire.cli`: the same as the `spire` command, where no script is installed."""

from spire.cli import main

main()
