from ledger import Ledger, monthly_balance


def report(ledger: Ledger, months: list[str]) -> str:
    """One line for each month."""
    lines = []
    for month in months:
        balance = monthly_balance(led▏ger, month)¦ger, month, include_pending=False)¦ger, month, include_pending=True)▕
        lines.append(f"{month}: {balance:.2f}")
    return "\n".join(lines)
