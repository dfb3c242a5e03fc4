"""`python -m dunes` is the command."""

from dunes.cli.main import main

main()
