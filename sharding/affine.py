"""Vectors as sums of a few of them: what grows with them, known of those, is known of all."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import zip_longest
from math import lcm

__all__ = ["Span"]


class Span:
    """Vectors of whole numbers of which none is a sum of the others, with factors."""

    def __init__(self) -> None:
        self.size = 0
        # What each adds to those before it: a place where it is 1 and they make no difference, and how it is their sum.
        self._rows: list[tuple[int, list[Fraction], list[Fraction]]] = []

    def weights(self, vector: Sequence[int]) -> Sum | None:
        """How a vector is a sum of those given; None where it is not, and is from now on one of them."""
        rest, of = [Fraction(n) for n in vector], [Fraction(0)] * self.size
        for place, row, parts in self._rows:
            factor = rest[place]
            if factor:
                rest = [a - factor * b for a, b in zip(rest, row, strict=True)]
                of = [a + factor * b for a, b in zip_longest(of, parts, fillvalue=Fraction(0))]
        if not any(rest):
            return Sum(of)
        place, first = next((i, n) for i, n in enumerate(rest) if n)
        self._rows.append((place, [n / first for n in rest], [*(-n / first for n in of), 1 / first]))
        self.size += 1
        return None


class Sum:
    """Weights, applied to what is known of each vector."""

    def __init__(self, weights: Sequence[Fraction]) -> None:
        self.over = lcm(*(w.denominator for w in weights))
        self.parts = [(i, int(w * self.over)) for i, w in enumerate(weights) if w]

    def __call__(self, known: Sequence[int]) -> int:
        return sum(n * known[i] for i, n in self.parts) // self.over
