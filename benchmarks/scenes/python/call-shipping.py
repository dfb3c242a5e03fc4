from dataclasses import dataclass


@dataclass
class Parcel:
    weight: float
    distance: float
    express: bool


def shipping_cost(weight, distance, express):
    """What it costs to send so much so far."""
    base = 2.5 + 0.4 * weight + 0.01 * distance
    return base * 1.5 if express else base


def cheaper_parcel(first: Parcel, second: Parcel) -> Parcel:
    """The parcel that costs less to send."""
    first_cost = shipping_cost(first.weight, first.distance, first.express)
    second_cost = shipping_cost(▏second.weight, second.distance, second.express)▕
    return first if first_cost <= second_cost else second
