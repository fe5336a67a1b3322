"""Every layout of a number of ranks, by trying all sizes: the reference of the search."""

from __future__ import annotations

from itertools import product

from nanoray.config.layout import Layout


def factorizations(ranks: int, experts: bool = False, tokens: int = 0) -> set[Layout]:
    """Return every dp·cp·tp·pp = ranks; with experts each ep that divides dp.

    `tokens`: of a sequence; 0: any. Each rank of cp has two equal parts of it, 128 tokens or more.
    """
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    found = set()
    for tp, pp, cp in product(divisors, repeat=3):
        dp, rest = divmod(ranks, tp * pp * cp)
        fits = cp == 1 or not tokens or (tokens % (2 * cp) == 0 and tokens // cp >= 128)
        if rest or not dp or not fits:
            continue
        for ep in divisors if experts else [1]:
            if dp % ep == 0:
                found.add(Layout(dp=dp, tp=tp, pp=pp, ep=ep, cp=cp))
    return found
