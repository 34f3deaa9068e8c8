"""torchtitan: its own Trainer (`trainer`), and its SimpleFSDP as a library (`simple_fsdp`).

Both run in the environment `torchtitan` (`make env NAME=torchtitan`).
"""
