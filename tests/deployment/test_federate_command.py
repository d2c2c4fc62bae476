"""What `protofed federate` refuses, and how its demo ends."""

import pytest

pytest.importorskip("flwr", reason="the extra `federated` is not installed")

from worlds import tiny_config, tiny_log

from protofed.cli import federate
from protofed.cli.federate import check_method, prepare_folders, print_demo, round_line
from protofed.deployment.deal import SERVER
from protofed.deployment.flower.processes import APP, write_app
from protofed.deployment.server import read_server, rounds_of
from protofed.errors import ConfigError
from protofed.methods.protofed import ProtoFed


@pytest.mark.parametrize(
    ("method", "share", "message"),
    [
        ("popularity", None, "--method must be protofed-sp or protofed, got 'popularity'"),
        ("protofed-sp", "nothing", "--share is of protofed alone, got --method protofed-sp"),
        ("protofed", "raw", "--share raw is not built yet"),
        ("protofed", "some", "--share must be nothing or private, got 'some'"),
    ],
)
def test_what_has_no_devices_or_no_such_dial_is_one_line(method, share, message):
    with pytest.raises(ConfigError, match=message):
        check_method(method, share)


def test_the_app_of_a_run_names_both_sides(tmp_path):
    import tomllib

    write_app(tmp_path / "app")
    written = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text(encoding="utf-8"))
    assert written == tomllib.loads(APP)
    assert set(written["tool"]["flwr"]["app"]["components"]) == {"serverapp", "clientapp"}
    assert {"folder", "slice", "nodes", "timeout", "patience"} == set(written["tool"]["flwr"]["app"]["config"])


@pytest.mark.parametrize("pay", [True, False])
def test_prepared_hosts_are_asked_for_prompts_only_where_they_pay_under_the_head(pay, tmp_path, monkeypatch):
    choose = ProtoFed.choose_under
    monkeypatch.setattr(ProtoFed, "choose_under", lambda self, world, state: (choose(self, world, state)[0], pay))
    monkeypatch.setattr(federate, "load", lambda config, root: tiny_log())
    settings = {"method": "protofed", "protofed__mode": "private", "protofed__ablate": "popularity"}
    config = tiny_config(scoring__head=True, protofed__newcomers="mean-row", **settings)
    prepare_folders(config, tmp_path, tmp_path / "made", 2, tmp_path / "cache")
    server = read_server(tmp_path / "made" / SERVER)
    planned = [rounds_of(server.config, server.read_state(), cut) for cut in server.cuts]
    assert [bool(rounds) for rounds in planned] == [pay] * len(server.cuts)


def a_round(number: int, asked: int, lost: tuple[str, ...] = (), refused: int = 0) -> dict[str, object]:
    return {"round": number, "uploads": 20, "asked": asked, "lost": lost, "refused": {"sent twice": refused}}


def test_a_round_in_words_and_the_demos_end_say_who_was_lost_and_what_is_promised(capsys):
    assert round_line(a_round(4, 4, ("7",), 2)) == "round 5: 20 uploads from 3 SuperNodes, 1 lost, 2 refused"
    privacy = {"epsilon_release": 3.4, "epsilon_server": None, "delta": 1e-5, "adjacency": "add", "trust": "central"}
    print_demo(
        {
            "rounds": [a_round(0, 4), a_round(1, 4, ("7",)), a_round(2, 3)],
            "before": {"all": 0.3, "novel": 0.1},
            "after": {"all": 0.4, "novel": 0.2},
            "privacy": privacy,
            "killed": 3,
            "processes_left": 0,
            "seconds": 9,
        }
    )
    told = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for part in ("lost in round 2", "rounds without it round 3", "3, 60", "processes left behind none", "δ = 1e-05"):
        assert part in told
