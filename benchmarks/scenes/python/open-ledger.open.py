class Ledger:
    """Payments by month."""

    def __init__(self):
        self.payments = {}


def monthly_balance(ledger, month, include_pending=False):
    """The sum of a month's payments."""
    payments = ledger.payments.get(month, [])
    return sum(p.amount for p in payments if include_pending or not p.pending)


def yearly_balance(ledger, year):
    """The sum of a year's payments."""
    total = 0
    for number in range(1, 13):
        month = f"{year}-{number:02}"
        total += monthly_balance(ledger, month, include_pending=False)
    return total
