# Real schedulers on this machine, and the suites under them: leaves reports/cluster.md. For root, on a clean commit;
# needs Debian's slurmctld slurmd slurm-client munge iproute2 iptables faketime, and Ray, installed where it is not there.
# No part of `make test`. Included by the Makefile.
.PHONY: cluster-test
cluster-test: install
	$(BIN)/python -c "import ray" || $(BIN)/pip install -q -c constraints.txt -e ".[ray]"
	$(BIN)/python -m benchmarks.cluster
