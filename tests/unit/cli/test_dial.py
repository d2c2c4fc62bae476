"""The dial on the command line: what --share takes, and one line for what it does not."""

import pytest

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
