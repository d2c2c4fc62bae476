"""The dial on the command line: what --share takes, and one line for what it does not."""

import pytest

from protofed.cli.demo import meaning
from protofed.cli.run import check_dial, settle
from protofed.errors import ConfigError
from protofed.methods.catalogue import shares_nothing


@pytest.mark.parametrize(
    ("method", "share", "mode", "said"),
    [
        ("protofed", "raw", None, r"^--share raw is not built yet; use --share private, or a method that shares raw"),
        ("protofed", "some", None, r"^--share must be nothing or private, got 'some'$"),
        ("frozen", "nothing", None, r"^--share is of protofed alone, got --method frozen; leave it out$"),
        ("protofed", None, "nodp", r"^--mode is of protofed-sp; protofed takes --share nothing or --share private$"),
        (None, "nothing", "nodp", r"^--share is of protofed and --mode of protofed-sp; give one of them$"),
    ],
)
def test_what_the_dial_does_not_take_is_one_line(method, share, mode, said):
    with pytest.raises(ConfigError, match=said) as problem:
        check_dial(method, share, mode)
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize("flag", ["privacy.target_epsilon", "privacy.noise_multiplier"])
def test_sharing_nothing_takes_no_budget_and_no_noise(flag):
    with pytest.raises(ConfigError, match=f"^{flag} has no meaning with --share nothing: nothing leaves a device"):
        settle({"method": "protofed", "protofed.mode": "nothing", flag: 1.0})


def test_the_dial_stands_at_private_with_a_budget_of_3_4():
    config = settle({"method": "protofed"})
    assert (config.protofed.mode, config.privacy.target_epsilon, config.scoring.head) == ("private", 3.4, True)
    assert not shares_nothing(config)
    assert shares_nothing(settle({"method": "protofed", "protofed.mode": "nothing"}))


def summary(full: float) -> dict[str, object]:
    return {"headline": [{"candidates": "full", "subset": "all", "ndcg@10": full}]}


@pytest.mark.parametrize(
    ("frozen", "said"),
    [
        (0.3, "reaches 0.250, behind frozen; the rows that are not protofed's"),
        (0.2, "reaches 0.250, ahead of all other methods here; the rows that are not protofed's"),
    ],
)
def test_one_sentence_says_what_the_demos_table_means(frozen, said):
    ours = ["protofed (nothing)", "protofed (private)"]
    rows = [("frozen", frozen), (ours[0], 0.25), (ours[1], 0.4), ("protofed-sp (reference)", 0.1)]
    told = meaning([(name, summary(full)) for name, full in rows], ours)
    assert told.startswith(
        "In full ranking protofed (nothing), whose devices tell nobody anything after the base block,"
    )
    assert said in told
    assert told.count(".") - told.count("0.") == 1  # one sentence
