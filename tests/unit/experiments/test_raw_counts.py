"""No run may state ε and rank by raw counts, whoever made it private."""

import pytest
import torch
from worlds import tiny_config, tiny_log

from protofed.errors import ConfigError
from protofed.experiments.run import Experiment


@pytest.mark.parametrize(("method", "wrap"), [("fedavg", True), ("finetune-last", True), ("protofed-sp", False)])
def test_a_private_run_with_such_a_prior_is_refused_before_anything_is_released(method, wrap, tmp_path):
    config = tiny_config(method=method, privacy__wrap=wrap, scoring__popularity_prior=0.5)
    with pytest.raises(ConfigError, match="counts raw events"):
        Experiment(config, tiny_log(), tmp_path / "cache", torch.device("cpu")).run(tmp_path / "run")
    assert not (tmp_path / "run" / "ledger.json").exists() or '"releases": []' in (
        tmp_path / "run" / "ledger.json"
    ).read_text(encoding="utf-8")
