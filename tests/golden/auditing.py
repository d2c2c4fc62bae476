"""What two samples of a statistic show about a mechanism: μ of Gaussian differential privacy, from below."""

import numpy as np
from scipy import stats

ALPHA = 1e-3


def upper(errors: np.ndarray | int, trials: int, alpha: float = ALPHA / 2) -> np.ndarray:
    """Clopper and Pearson's upper limit of an error rate."""
    errors = np.asarray(errors)
    return np.where(errors < trials, stats.beta.ppf(1 - alpha, errors + 1, np.maximum(trials - errors, 1)), 1.0)


def limits(without: np.ndarray, with_: np.ndarray, thresholds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Upper limits of both error rates of every threshold."""
    alarms = len(without) - np.searchsorted(np.sort(without), thresholds, side="right")
    misses = np.searchsorted(np.sort(with_), thresholds, side="right")
    return upper(alarms, len(without)), upper(misses, len(with_))


def mu_of(fpr: np.ndarray, fnr: np.ndarray) -> np.ndarray:
    return stats.norm.ppf(1 - fpr) - stats.norm.ppf(fnr)


def mu_lower_bound(without: np.ndarray, with_: np.ndarray) -> float:
    """μ that the mechanism is at least (Gaussian DP), at confidence 1 - ALPHA.

    Half of the trials choose the threshold (least sum of error rates: steadier than the largest μ, whose error rates
    may be rare events), the other half measure its two error rates.
    """
    half = len(without) // 2
    candidates = np.quantile(np.concatenate((without[:half], with_[:half])), np.linspace(0.01, 0.99, 99))
    best = np.argmin(np.add(*limits(without[:half], with_[:half], candidates)))
    return float(mu_of(*limits(without[half:], with_[half:], candidates[best : best + 1]))[0])
