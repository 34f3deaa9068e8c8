"""What a rank can be told to do with a case: one file a pass."""
