"""No run may state ε and rank by raw counts, whichever switch made it private."""

import pytest
import torch
from worlds import tiny_config, tiny_log

from protofed.errors import ConfigError
from protofed.experiments.run import Experiment, refuse_raw_counts
from protofed.privacy.ledger import Release


def test_a_prior_of_raw_counts_is_refused_beside_any_release_and_only_there():
    with_prior = tiny_config(scoring__popularity_prior=0.5)
    with pytest.raises(ConfigError, match=r"^scoring.popularity_prior counts raw events .* got 0.5$"):
        refuse_raw_counts((Release(1.0, 0.1),), with_prior)
    refuse_raw_counts((), with_prior)
    refuse_raw_counts((Release(1.0, 0.1),), tiny_config())


def test_a_method_made_private_by_its_own_switch_is_refused_too(tmp_path):
    config = tiny_config(method="fedavg", hyper="private = true", scoring__popularity_prior=0.5)
    with pytest.raises(ConfigError, match="counts raw events"):
        Experiment(config, tiny_log(), tmp_path / "cache", torch.device("cpu")).run(tmp_path / "run")
    assert not (tmp_path / "run" / "ledger.json").exists() or '"releases": []' in (
        tmp_path / "run" / "ledger.json"
    ).read_text(encoding="utf-8")
