# Real schedulers on this machine, and the suites under them: leaves reports/cluster.md. For root, on a clean commit;
# needs Debian's slurmctld slurmd slurm-client munge iproute2 iptables faketime; Ray and torchft are installed where they
# are not there. `make test` skips every trial (tests/test_cluster_trials.py). Included by the Makefile.
.PHONY: cluster-test
cluster-test: install
	$(BIN)/python -c "import ray, torchft" || $(BIN)/pip install -q -c constraints.txt -e ".[ray,torchft]"
	$(BIN)/python -m benchmarks.cluster
