"""Re-rank candidates with a local language model: `python scripts/recicl_llm.py --help`."""

import argparse
import sys
from pathlib import Path

from protofed.errors import ProtoFedError
from protofed.methods.baselines.recicl_llm import Shape, load_language_model, rank_candidates, read_titles


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Rank candidates by logit(Yes) - logit(No) of a causal language model."
    )
    parser.add_argument("--model", type=Path, required=True, help="a local Hugging Face folder of a causal model")
    parser.add_argument("--titles", type=Path, required=True, help="CSV or parquet with the columns item and title")
    parser.add_argument("--history", nargs="*", default=[], help="the user's item ids, oldest first")
    parser.add_argument("--candidates", nargs="+", required=True, help="the item ids to rank")
    parser.add_argument("--demonstrations", type=int, default=Shape().demonstrations)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    try:
        titles, language = read_titles(given.titles), load_language_model(given.model, given.device)
        shape = Shape(demonstrations=given.demonstrations, seed=given.seed)
        ranking = rank_candidates(language, titles, given.history, given.candidates, shape=shape)
    except ProtoFedError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    for place, (item, score) in enumerate(ranking, start=1):
        print(f"{place}\t{item}\t{score:.4f}\t{titles[item]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
