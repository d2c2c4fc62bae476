"""Lets tests import tests/worlds.py; property tests depend neither on luck nor on how busy the machine is."""

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
settings.register_profile("patient", deadline=None, derandomize=True)
settings.register_profile("searching", deadline=None)  # --hypothesis-profile=searching looks for new examples
settings.load_profile("patient")
