"""Factors from units of length to metres."""

FACTORS = {
    "inch": 0.0254,
    "foot": 0.3048,
    "yard": 0.9144,
    "mile": 1609.344,
}

NAMES = {
    "inch": "inches",
    "foot": "feet",
    "yard": "yards",
    "mi▏le": "miles",▕
}


def convert(value, unit):
    return value * FACTORS[unit]
