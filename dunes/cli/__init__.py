"""The `dunes` command: parses arguments, calls the library, prints results.

`main.main` is the command; `main.run_recipe` runs a recipe like one of its verbs.
"""
