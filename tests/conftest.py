"""Lets every test import the small worlds of tests/worlds.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
