"""Prints the polynomial coefficients of vector_math.h.

Each is the relative or absolute minimax fit on Chebyshev nodes, found by Lawson's reweighting in
40-digit arithmetic and rounded to the target type.

    python tools/fit_polynomials.py        (needs mpmath and numpy)
"""

from collections.abc import Callable

import mpmath as mp
import numpy as np

mp.mp.dps = 40


def fit(
    function: Callable[[mp.mpf], mp.mpf],
    weight: Callable[[mp.mpf], mp.mpf],
    low: float,
    high: float,
    terms: int,
    rounds: int,
) -> list[mp.mpf]:
    """Coefficients c of sum_k c_k y^k closest to function(y) in max-norm times weight."""
    count = 6 * terms + 1
    nodes = [
        mp.mpf(low) + (mp.mpf(high) - low) * (1 - mp.cos(mp.pi * (i + mp.mpf(1) / 2) / count)) / 2
        for i in range(count)
    ]
    values = mp.matrix([function(y) for y in nodes])
    lawson = [mp.mpf(1)] * count
    best: tuple[mp.mpf, list[mp.mpf]] | None = None
    for _ in range(rounds):
        scale = [mp.sqrt(w) * weight(y) for w, y in zip(lawson, nodes, strict=True)]
        system = mp.matrix(count, terms)
        for i, y in enumerate(nodes):
            for k in range(terms):
                system[i, k] = scale[i] * y**k
        right = mp.matrix([s * v for s, v in zip(scale, values, strict=True)])
        solution = mp.lu_solve(system, right)
        error = [
            abs(weight(y) * (sum(solution[k] * y**k for k in range(terms)) - v))
            for y, v in zip(nodes, values, strict=True)
        ]
        worst = max(error)
        if best is None or worst < best[0]:
            best = (worst, [solution[k] for k in range(terms)])
        lawson = [w * e for w, e in zip(lawson, error, strict=True)]
        total = sum(lawson)
        lawson = [w / total for w in lawson]
    assert best is not None
    print(f"// largest error {mp.nstr(best[0], 3)}")
    return best[1]


def show(name: str, coefficients: list[mp.mpf], dtype: type) -> None:
    """One line of C++ per polynomial."""
    rounded = [dtype(mp.nstr(c, 30)) for c in coefficients]
    suffix = "f" if dtype is np.float32 else ""
    print(f"{name}: " + ", ".join(f"{np.format_float_scientific(c)}{suffix}" for c in rounded))


def main() -> None:
    """All polynomials of vector_math.h, lowest power first."""
    two_pi = 2 * mp.pi

    def sine(y: mp.mpf) -> mp.mpf:  # sin(2 pi r) / r, y = r^2
        r = mp.sqrt(y)
        return mp.sin(two_pi * r) / r if r else two_pi

    def cosine(y: mp.mpf) -> mp.mpf:  # cos(2 pi r)
        return mp.cos(two_pi * mp.sqrt(y))

    eighth, quarter, half_ln2 = mp.mpf(1) / 64, mp.mpf(1) / 16, mp.log(2) / 2
    root = mp.sqrt
    one = mp.mpf(1)
    for dtype, sin_terms, cos_terms, wide_terms, exp_terms in (
        (np.float32, 4, 4, 6, 7),
        (np.float64, 8, 8, 11, 13),
    ):
        show("sin", fit(sine, lambda y: root(y), 0, eighth, sin_terms, 60), dtype)
        show("cos", fit(cosine, lambda y: one, 0, eighth, cos_terms, 60), dtype)
        show("cos on a quarter turn", fit(cosine, lambda y: one, 0, quarter, wide_terms, 60), dtype)
        show("exp", fit(mp.exp, lambda y: one, -half_ln2, half_ln2, exp_terms, 60), dtype)


if __name__ == "__main__":
    main()
