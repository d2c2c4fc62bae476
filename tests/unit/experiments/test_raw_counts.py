"""No run may state ε and rank by raw counts, whoever made it private."""

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


@pytest.mark.parametrize(("method", "wrap"), [("fedavg", True), ("finetune-last", True), ("protofed-sp", False)])
def test_a_private_run_with_such_a_prior_is_refused_before_anything_is_released(method, wrap, tmp_path):
    config = tiny_config(method=method, privacy__wrap=wrap, scoring__popularity_prior=0.5)
    with pytest.raises(ConfigError, match="counts raw events"):
        Experiment(config, tiny_log(), tmp_path / "cache", torch.device("cpu")).run(tmp_path / "run")
    assert not (tmp_path / "run" / "ledger.json").exists() or '"releases": []' in (
        tmp_path / "run" / "ledger.json"
    ).read_text(encoding="utf-8")
