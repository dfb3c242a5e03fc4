"""The `dunes` command: parses arguments, calls the library, prints results.

`main.main` is the command; `recipe.run_recipe` runs a recipe like one of its verbs.
"""
