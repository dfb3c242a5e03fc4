"""The `dunes` command: parses arguments, calls the library, prints results.

`main.main` runs the command; `process.run_recipe` runs a recipe like a verb of the command.
"""
