"""The methods whose names others may know, apart from the catalogue so that asking for it loads nothing."""

OURS = "protofed-sp"  # the method that reports are about
FLAGSHIP = "protofed"
FROZEN = "frozen"  # what others are compared with
