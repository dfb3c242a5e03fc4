"""Marbles and how they are polished."""


def zorbify_marble(marble, grain=400):
    """The marble after it was polished with paper of this grain."""
    return {**marble, "roughness": marble["roughness"] / grain}


def weigh_marbles(marbles):
    """The weight of some marbles, in grams."""
    return sum(marble["weight"] for marble in marbles)
