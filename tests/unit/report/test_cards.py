"""Cards of prototypes and users: the titles are those of the model's own answers."""

import pyarrow as pa
import pytest
from run_folders import embedded, shown_in
from worlds import CPU, tiny_config, tiny_log

import protofed
from protofed.experiments.publish import Surroundings
from protofed.experiments.run import Experiment
from protofed.inference.folder import MODEL
from protofed.report.cards import SHOWN, USERS, cards, titles, typical
from protofed.report.layout import Missing, Part
from protofed.report.page import build
from protofed.report.runs import find_runs
from protofed.report.sections import group


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of our method and a frozen one, both kept as models; the first forty items have titles."""
    out = tmp_path_factory.mktemp("cards")
    around = Surroundings(
        None, pa.table({"item": tiny_log().item_ids[:40], "title": [f"Title {n}" for n in range(40)]})
    )
    for method in ("protofed-sp", "frozen"):
        Experiment(tiny_config(method=method), tiny_log(), out / "cache", CPU, keep=around).run(out / "runs" / method)
    return out / "runs"


def test_cards_show_the_titles_of_what_the_model_answers(runs):
    (part,) = cards(group(find_runs(runs)[0])[0], runs)  # the frozen row uses no prompt and has none
    assert isinstance(part, Part)
    prototypes, users = (shown_in(table) for table in part.tables)
    model = protofed.load(runs / "protofed-sp")
    assert len(prototypes) == len(model.model.v)
    for k in range(len(prototypes)):
        told = [model.catalogue.number(item) for item in model.prototype_items(k)]
        assert prototypes[f"prototype {k}"]["items it lifts most"].text.startswith(titles(model.catalogue, told))
    places = typical(model)
    counts = model.devices.memory.counts[places]
    assert len(users) == len(places) == USERS
    assert counts.tolist() == sorted(counts.tolist())
    ids = {int(key): user for user in tiny_log().user_ids.to_pylist() for key in protofed.seeds.user_keys([user])}
    for place, card in zip(places, users.values(), strict=True):
        device = model.device(ids[int(model.devices.users[place])])
        offered = device.recommend(SHOWN)
        assert card["offered"].text == ", ".join(found.title or str(found.item) for found in offered)
        assert card["events"].text == str(len(device.state.memory.items))


def test_the_page_has_the_cards_and_says_where_a_model_is_damaged(runs, tmp_path):
    page, _ = build(runs)
    tables = embedded(page)["tables"]
    assert [name for name in tables if "-cards-" in name] == [
        f"synthetic-cards-protofed-sp-reference-{kind}" for kind in ("prototypes", "users")
    ]
    broken = tmp_path / "protofed-sp"
    broken.mkdir()
    for file in (runs / "protofed-sp").iterdir():
        if file.is_file():
            (broken / file.name).write_bytes(file.read_bytes())
    (broken / MODEL).write_bytes((broken / MODEL).read_bytes()[:-9])
    (told,) = cards(group(find_runs(broken)[0])[0], broken)
    assert isinstance(told, Missing)
    assert "cannot be read" in told.why
