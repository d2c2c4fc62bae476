"""What `protofed run` says of a finished run in words."""

from protofed.cli.run import in_words


def row(candidates, subset, hr, queries):
    return {"candidates": candidates, "subset": subset, "ndcg@10": 0.1, "hr@10": hr, "queries": queries}


def test_the_two_rows_that_matter_most_are_said_in_words_and_no_others():
    rows = [row("sampled", "all", 0.674, 2440), row("sampled", "novel", 0.3, 1039), row("full", "all", 0.354, 2440)]
    assert list(in_words([*rows, row("full_unseen", "all", 0.5, 2440)])) == [
        "the user's next item was among the ten best of it and 99 others in 67 % of 2,440 questions",
        "the user's next item was among the ten best of all items in 35 % of 2,440 questions",
    ]
