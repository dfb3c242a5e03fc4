"""Entry point of `python -m dunes`."""

from dunes.cli.main import main

main()
