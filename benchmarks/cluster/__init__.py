"""Real schedulers on this machine, SLURM on two virtual nodes and on nodes in networks of their own; what the suites do
there, and under faults. `make cluster-test`."""
