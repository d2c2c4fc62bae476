"""docs/theory.md on random quadratic problems: lemma, dynamic regret, contraction, and what they do not cover."""

from dataclasses import dataclass

import numpy as np
import pytest

DRAWS = 300
SLACK = 1e-8


def soft(x: np.ndarray, threshold: float) -> np.ndarray:
    return np.sign(x) * np.maximum(np.abs(x) - threshold, 0)


@dataclass(frozen=True)
class Sparse:
    """sum h (w - m)^2 / 2 + lambda_p |short half|_1 + lambda_s |long half - c|^2 / 2 on the box |w_i| <= 1.

    Separable, so minimisers are exact coordinate by coordinate.
    """

    h: np.ndarray
    m: np.ndarray
    c: np.ndarray
    lambda_p: float
    lambda_s: float

    @property
    def long(self) -> np.ndarray:
        return np.arange(len(self.h)) < len(self.h) // 2

    def value(self, w: np.ndarray) -> float:
        fit = self.h * (w - self.m) ** 2 / 2
        anchor = self.lambda_s / 2 * (w - self.c) ** 2 * self.long
        return float((fit + anchor + self.lambda_p * np.abs(w) * ~self.long).sum())

    def prox(self, x: np.ndarray, eta: float) -> np.ndarray:
        pull = self.lambda_s * self.long
        slope = self.h * self.m + pull * self.c + x / eta
        return np.clip(soft(slope, self.lambda_p * ~self.long) / (self.h + pull + 1 / eta), -1, 1)

    def inside(self, rng: np.random.Generator) -> np.ndarray:
        return rng.uniform(-1, 1, len(self.h))

    @property
    def diameter(self) -> float:
        return 2 * np.sqrt(len(self.h))


def a_sparse(rng: np.random.Generator, d: int) -> Sparse:
    return Sparse(
        rng.exponential(size=d), rng.normal(size=d), rng.normal(size=d), rng.uniform(0, 1), rng.uniform(0.1, 1)
    )


@dataclass(frozen=True)
class OnBall:
    """(w - m)^T H (w - m) / 2 on the unit ball, H dense; the multiplier of the constraint is found by bisection."""

    hessian: np.ndarray
    m: np.ndarray

    def value(self, w: np.ndarray) -> float:
        return float((w - self.m) @ self.hessian @ (w - self.m) / 2)

    def prox(self, x: np.ndarray, eta: float) -> np.ndarray:
        values, vectors = np.linalg.eigh(self.hessian)
        slope = vectors.T @ (self.hessian @ self.m + x / eta)

        def at(multiplier: float) -> np.ndarray:
            return slope / (values + 1 / eta + multiplier)

        low, high = 0.0, float(np.linalg.norm(slope))
        if np.linalg.norm(at(low)) <= 1:
            return vectors @ at(low)
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if np.linalg.norm(at(middle)) > 1 else (low, middle)
        return vectors @ at(high)

    def inside(self, rng: np.random.Generator) -> np.ndarray:
        direction = rng.normal(size=len(self.m))
        return direction / np.linalg.norm(direction) * rng.uniform(0, 1)

    diameter = 2.0


def on_ball(rng: np.random.Generator, d: int) -> OnBall:
    a = rng.normal(size=(d + 2, d))
    return OnBall(a.T @ a / d, rng.normal(size=d))


def square(x: np.ndarray) -> float:
    return float(x @ x)


def gap(problem, x: np.ndarray, after: np.ndarray, y: np.ndarray, eta: float) -> float:
    """Right side minus left side of the three-point inequality."""
    right = (square(y - x) - square(y - after) - square(after - x)) / (2 * eta)
    return right - (problem.value(after) - problem.value(y))


def lemma_gaps(make) -> np.ndarray:
    rng, gaps = np.random.default_rng(0), []
    for _ in range(DRAWS):
        problem = make(rng, int(rng.integers(2, 13)))
        x, y, eta = problem.inside(rng), problem.inside(rng), 10 ** rng.uniform(-2, 1)
        gaps.append(gap(problem, x, problem.prox(x, eta), y, eta))
    return np.array(gaps)


def test_the_three_point_inequality_holds_with_a_box_and_a_sparse_block():
    assert lemma_gaps(a_sparse).min() >= -SLACK


def test_the_three_point_inequality_holds_on_a_ball():
    assert lemma_gaps(on_ball).min() >= -SLACK


def test_the_step_of_each_problem_is_its_minimiser():
    """No point of a cloud around the step has a smaller objective: the problems themselves are right."""
    rng = np.random.default_rng(1)
    for make in (a_sparse, on_ball):
        for _ in range(20):
            problem = make(rng, 4)
            x, eta = problem.inside(rng), 10 ** rng.uniform(-1, 1)
            best = problem.prox(x, eta)
            others = [best + t * (problem.inside(rng) - best) for t in 10 ** rng.uniform(-4, 0, 50)]
            lowest = min(problem.value(w) + square(w - x) / (2 * eta) for w in others)
            assert problem.value(best) + square(best - x) / (2 * eta) <= lowest + SLACK


def test_the_three_point_inequality_is_an_equality_for_linear_functions():
    rng = np.random.default_rng(2)
    for _ in range(DRAWS):
        slope, x, y = rng.normal(size=(3, 6))
        eta = 10 ** rng.uniform(-2, 1)
        after = x - eta * slope
        right = (square(y - x) - square(y - after) - square(after - x)) / (2 * eta)
        assert slope @ (after - y) == pytest.approx(right, rel=1e-9, abs=1e-9)


def test_strong_convexity_sharpens_the_inequality():
    rng = np.random.default_rng(3)
    for _ in range(DRAWS):
        problem = on_ball(rng, int(rng.integers(2, 13)))
        x, y, eta = problem.inside(rng), problem.inside(rng), 10 ** rng.uniform(-2, 1)
        after = problem.prox(x, eta)
        gain = np.linalg.eigvalsh(problem.hessian)[0] / 2 * square(y - after)
        assert gap(problem, x, after, y, eta) >= gain - SLACK


def regret_and_bound(make, rng: np.random.Generator, *, best: bool, rounds: int = 20) -> tuple[float, float]:
    d, eta = int(rng.integers(2, 9)), 10 ** rng.uniform(-1, 1)
    problems = [make(rng, d) for _ in range(rounds)]
    start = w = problems[0].inside(rng)
    rivals = [p.prox(np.zeros(d), 1e9) if best else p.inside(rng) for p in problems]
    regret = 0.0
    for problem, rival in zip(problems, rivals, strict=True):
        w = problem.prox(w, eta)
        regret += problem.value(w) - problem.value(rival)
    path = sum(np.linalg.norm(a - b) for a, b in zip(rivals[1:], rivals, strict=False))
    return regret, square(rivals[0] - start) / (2 * eta) + problems[0].diameter / eta * float(path)


@pytest.mark.parametrize("best", [True, False], ids=["minimisers", "any"])
def test_dynamic_regret_stays_below_its_bound_with_a_box_and_a_sparse_block(best):
    rng = np.random.default_rng(4)
    for _ in range(DRAWS // 3):
        regret, bound = regret_and_bound(a_sparse, rng, best=best)
        assert regret <= bound + SLACK


@pytest.mark.parametrize("best", [True, False], ids=["minimisers", "any"])
def test_dynamic_regret_stays_below_its_bound_on_a_ball(best):
    rng = np.random.default_rng(5)
    for _ in range(DRAWS // 3):
        regret, bound = regret_and_bound(on_ball, rng, best=best)
        assert regret <= bound + SLACK


def test_the_best_sequence_has_regret_that_is_not_negative():
    rng = np.random.default_rng(6)
    for make in (a_sparse, on_ball):
        assert min(regret_and_bound(make, rng, best=True)[0] for _ in range(20)) >= -1e-6


@dataclass(frozen=True)
class Anchored:
    """One draw of the long-term surrogate |A u - b|^2 / 2 + lambda_s |u - c|^2 / 2."""

    a: np.ndarray
    lambda_s: float

    @property
    def hessian(self) -> np.ndarray:
        return self.a.T @ self.a

    @property
    def ends(self) -> tuple[float, float]:
        values = np.linalg.eigvalsh(self.hessian)
        return float(values[0]), float(values[-1])

    def free(self, b: np.ndarray) -> np.ndarray:
        return np.linalg.lstsq(self.a, b, rcond=None)[0]

    def held(self, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        """The minimiser from the normal equations, not from the formula under test."""
        root = np.sqrt(self.lambda_s)
        stacked = np.concatenate([self.a, root * np.eye(len(c))])
        return np.linalg.lstsq(stacked, np.concatenate([b, root * c]), rcond=None)[0]

    @property
    def kappa(self) -> float:
        return self.ends[1] / (self.ends[1] + self.lambda_s)

    @property
    def alpha(self) -> float:
        return self.lambda_s / (self.ends[0] + self.lambda_s)


def anchored(rng: np.random.Generator) -> Anchored:
    d = int(rng.integers(2, 11))
    return Anchored(rng.normal(size=(2 * d, d)) / np.sqrt(d), rng.uniform(0.1, 1))


def test_the_contraction_constants_are_the_operator_norms():
    rng = np.random.default_rng(7)
    for _ in range(DRAWS):
        draw = anchored(rng)
        inverse = np.linalg.inv(draw.hessian + draw.lambda_s * np.eye(draw.a.shape[1]))
        assert draw.kappa == pytest.approx(np.linalg.norm(inverse @ draw.hessian, 2), rel=1e-10)
        assert draw.alpha == pytest.approx(np.linalg.norm(draw.lambda_s * inverse, 2), rel=1e-10)
        assert draw.kappa < 1


def test_the_optimum_moves_no_further_than_the_bound():
    rng = np.random.default_rng(8)
    for _ in range(DRAWS):
        draw = anchored(rng)
        b, c = rng.normal(size=(2, draw.a.shape[0])), rng.normal(size=(2, draw.a.shape[1]))
        moved = np.linalg.norm(draw.held(b[1], c[1]) - draw.held(b[0], c[0]))
        drift, anchor = np.linalg.norm(draw.free(b[1]) - draw.free(b[0])), np.linalg.norm(c[1] - c[0])
        assert moved <= draw.kappa * drift + draw.alpha * anchor + SLACK


def test_the_constants_are_attained_along_eigenvectors():
    rng = np.random.default_rng(9)
    for _ in range(30):
        draw = anchored(rng)
        vectors = np.linalg.eigh(draw.hessian)[1]
        low, high = vectors[:, 0], vectors[:, -1]
        rest = np.zeros_like(low)
        assert np.linalg.norm(draw.held(draw.a @ high, rest)) == pytest.approx(draw.kappa, rel=1e-9)
        assert np.linalg.norm(draw.held(draw.a @ rest, low)) == pytest.approx(draw.alpha, rel=1e-9)


def test_the_printed_bound_exceeds_one_in_most_draws():
    rng = np.random.default_rng(10)
    draws = [anchored(rng) for _ in range(DRAWS)]
    printed = np.array([draw.ends[1] / (draw.ends[0] + draw.lambda_s) for draw in draws])
    assert (printed >= [draw.kappa for draw in draws]).all()
    assert (printed > 1).mean() > 0.9


def test_no_regret_does_not_mean_no_loss():
    rng = np.random.default_rng(11)
    for _ in range(30):
        draw = anchored(rng)
        b, c = rng.normal(size=draw.a.shape[0]), rng.normal(size=draw.a.shape[1])
        held, free = draw.held(b, c), draw.free(b)
        inverse = np.linalg.inv(draw.hessian + draw.lambda_s * np.eye(len(c)))
        np.testing.assert_allclose(held - free, draw.lambda_s * inverse @ (c - free), atol=1e-9)
        assert square(draw.a @ held - b) > square(draw.a @ free - b)  # though the regret in F at `held` is 0


def test_an_explicit_step_may_break_the_inequality():
    problem = OnBall(3 * np.eye(1), np.zeros(1))
    x, y = np.array([0.3]), np.zeros(1)
    explicit = x - 1.0 * problem.hessian @ (x - problem.m)  # eta L = 3: it overshoots
    assert gap(problem, x, explicit, y, 1.0) < -0.1
    assert gap(problem, x, problem.prox(x, 1.0), y, 1.0) >= 0


def test_noise_alone_moves_the_printed_anchor_every_round():
    rng, beta = np.random.default_rng(12), 0.5
    for sigma, expected in ((0.2, 0.92), (0.4, 1.85), (0.8, 3.70)):
        v, steps = np.zeros(64), []
        for _ in range(2000):
            new = (1 - beta) * v + beta * rng.normal(0, sigma, 64)
            steps.append(np.linalg.norm(new - v))
            v = new
        assert np.mean(steps) == pytest.approx(expected, abs=0.02 * expected)
        assert 8 * sigma / np.sqrt(3) == pytest.approx(expected, abs=0.005)
