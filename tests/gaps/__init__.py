"""What frameworks get wrong, in the fewest lines that show it, without Meshmark: the proof of each known gap."""
