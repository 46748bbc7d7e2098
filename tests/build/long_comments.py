"""Line 3 has a word to avoid.

By turns."""
by_turns = "by turns"  # short
