"""What an order costs."""

from dataclasses import dataclass


@dataclass
class Order:
    """So many pieces at a price."""

    pieces: int
    price: float


def discounted_total(order: Order, percent: float = 0.0) -> float:
    """The total of an order after a discount."""
    return order.pieces * order.price * (1 - percent / 100)


def cheapest(orders: list[Order], percent: float) -> float:
    """The lowest total of some orders."""
    return min(discounted_total(▏order, percent)…▕ for order in orders)
