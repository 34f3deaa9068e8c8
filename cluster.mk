# Real schedulers on this machine, and the suites under them: leaves reports/cluster.md. For root, on a clean commit;
# needs Debian's slurmctld slurmd slurm-client munge iproute2 iptables. No part of `make test`. Included by the Makefile.
.PHONY: cluster-test
cluster-test: install
	$(BIN)/python -m benchmarks.cluster
