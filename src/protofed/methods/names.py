"""The one method whose name others may know, apart from the catalogue so that asking for it loads nothing."""

OURS = "protofed-sp"  # the method that reports are about
