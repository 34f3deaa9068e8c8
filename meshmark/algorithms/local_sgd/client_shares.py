"""How unequal the shares of FedAvg's replicas are."""

from __future__ import annotations

from fractions import Fraction


def client_shares(count: int) -> list[Fraction]:
    """Return each replica's share of the rows under FedAvg. Of every two neighbours the second has three times as
    many.
    """
    alone = [Fraction(1, count)] * (count % 2)
    return [Fraction(1, 2 * count), Fraction(3, 2 * count)] * (count // 2) + alone
