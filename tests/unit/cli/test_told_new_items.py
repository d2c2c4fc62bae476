"""What a newcomer reads of new items at the end of `protofed demo`."""

import io
import re

from rich.console import Console
from worlds import CPU, tiny_config, tiny_log

from protofed.cli.demo import print_new_items
from protofed.data.synthetic import drifting_world, preset
from protofed.data.synthetic_items import describe_items
from protofed.experiments.new_items import rank_new_items
from protofed.features.build import content_of
from protofed.seeds import stream


def test_a_new_item_is_shown_ranked_with_its_description_and_without(tmp_path):
    told, table = io.StringIO(), describe_items(drifting_world(preset("tiny"), stream(0, "tests")), stream(0, "items"))
    print_new_items(tiny_config(), tiny_log(), table, tmp_path, CPU, Console(file=told, width=1_000))
    config = tiny_config(content__features="place,category")
    content = content_of(config.content, tiny_log(), table, tmp_path)
    found = rank_new_items(tiny_config(), tiny_log(), content, tmp_path, CPU)
    text = told.getvalue()
    medians = re.search(r"median rank (\d+) without, (\d+) with their place and category", text)
    assert medians is not None
    assert [int(n) for n in medians.groups()] == [round(float(m.median())) for m in (found.without, found.with_content)]
    item, before, after = re.search(r"; (\S+) moved from (\d+) to (\d+) of", text).groups()
    assert item in tiny_log().item_ids.to_pylist()
    assert int(before) - int(after) == round(float((found.without - found.with_content).max()))
    assert print_new_items(tiny_config(), tiny_log(), None, tmp_path, CPU, Console(file=told)) is None
    assert told.getvalue() == text  # without a table there is nothing to tell
