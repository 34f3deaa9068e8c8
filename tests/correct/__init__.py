"""Correct engines by other hands: the same step in another order of operations. No suite may accuse one of them."""
