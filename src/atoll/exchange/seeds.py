"""The seeds of codecs: equal each time a contribution is sent, and drawn anew for each contribution."""

from __future__ import annotations

_MASK = 2**64 - 1


def seed_of(number: int) -> int:
    """Return the codec's seed for a contribution of this number, below 2**31.

    It does not rise with the number. Otherwise a codec that takes turns by the seed would never write some
    elements of a parameter that has a gradient only in each second contribution. The mix is splitmix64's
    (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
    """
    mixed = (number * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return (mixed ^ (mixed >> 31)) >> 33
