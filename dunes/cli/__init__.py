"""The `dunes` command: parses arguments, calls the library, prints results."""
