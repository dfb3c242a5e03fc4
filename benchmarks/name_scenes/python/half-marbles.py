"""A workshop that sells marbles."""

from marbles import weigh_marbles, zorbify_marble


def heaviest_box(boxes):
    """The box with the heaviest marbles."""
    return max(boxes, key=weigh_marbles)


def polish(boxes):
    """All marbles of all boxes, polished."""
    for box in boxes:
        for marble in box:
            yield zor▏bify_marble…▕
