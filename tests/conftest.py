"""Lets every test import the small worlds of tests/worlds.py, and no property test fail because a machine is busy."""

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
