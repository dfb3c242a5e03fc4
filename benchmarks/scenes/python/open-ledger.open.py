class Ledger:
    """Payments by month."""

    def __init__(self):
        self.payments = {}


def monthly_balance(ledger, month, include_pending=False):
    """The sum of a month's payments."""
    payments = ledger.payments.get(month, [])
    return sum(p.amount for p in payments if include_pending or not p.pending)


def report_january(ledger):
    return monthly_balance(ledger, "2024-01", include_pending=False)
