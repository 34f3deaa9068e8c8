# A first run on a machine with a GPU, in pieces that each end within ten minutes and leave their records, packed at
# their end: `make gpu-1-start PYTHON=python3`, and so on in their order; `make gpu` is all of them, and ends where the
# first is red. On the machine's own python, with whatever frameworks it has.

GPU_OUT ?= results/gpu
GPU_PIECES := gpu-1-start gpu-2-correct gpu-3-shared gpu-4-fixtures gpu-5-speed gpu-6-memory gpu-7-ladder gpu-8-calibrate \
              gpu-9-conformance
GPU_PYTHON = PYTHONPATH=$(CURDIR):$$PYTHONPATH $(PYTHON)
GPU_SUITES = $(GPU_PYTHON) -m pytest suites --device cuda --results $(GPU_OUT) --max-time 8m
GPU_BIG := --workload gpt-1.3b --precision bf16 --world 1 --time-limit 150
# Whether it is green or red; the exit code is the piece's.
GPU_PACK = status=$$?; tar -czf $(GPU_OUT)-$@.tar.gz -C $(GPU_OUT) . && ls -l $(GPU_OUT)-$@.tar.gz; exit $$status

.PHONY: gpu gpu-report $(GPU_PIECES)
gpu:
	rm -f $(GPU_OUT)/records.jsonl
	$(MAKE) gpu-1-start
	status=0; for piece in $(filter-out gpu-1-start,$(GPU_PIECES)); do $(MAKE) $$piece || status=1; done; \
	$(MAKE) gpu-report && exit $$status

gpu-report:
	$(GPU_PYTHON) -m meshmark report $(GPU_OUT) -o $(GPU_OUT)/report.md

# What the machine is, and whether anything runs at all.
gpu-1-start:
	mkdir -p $(GPU_OUT)
	($(GPU_PYTHON) -m meshmark doctor && nvidia-smi -q && nvidia-smi topo -m) > $(GPU_OUT)/machine.txt 2>&1; \
	$(GPU_SUITES) -x --world 1 --adapters single,ddp --workload gpt-mini; $(GPU_PACK)

gpu-2-correct:
	$(GPU_SUITES) --world 1 --workload gpt-tiny --precision fp32,bf16 -k "not throughput"; $(GPU_PACK)

# Two ranks of one GPU, which NCCL refuses; gloo takes no pipelines of CUDA tensors.
gpu-3-shared:
	$(GPU_SUITES) --world 2 --backend gloo --workload gpt-tiny -k "not throughput"; $(GPU_PACK)

# Dumps of NCCL's flight recorder, of the driver and of the allocator, for tests to be made of.
gpu-4-fixtures:
	$(GPU_PYTHON) -m benchmarks.gpu_fixtures $(GPU_OUT)/fixtures; $(GPU_PACK)

gpu-5-speed:
	$(GPU_SUITES) $(GPU_BIG) --steps 30 -k throughput; $(GPU_PACK)

# Unjudged: a noise floor of this model takes ten minutes and most of the disk.
gpu-6-memory:
	$(GPU_SUITES) $(GPU_BIG) --assess off --steps 3 -k memory; $(GPU_PACK)

# A rung more each time, the same for all three; compiled ones last, for each compiles anew.
gpu-7-ladder:
	$(GPU_SUITES) $(GPU_BIG) --steps 30 -k throughput --adapters single,ddp,fsdp2 --tuning cudnn --tuning cudnn,fused \
	    --tuning cudnn,fused,chunked --tuning cudnn,fused,chunked,compile; $(GPU_PACK)

gpu-8-calibrate:
	mkdir -p $(GPU_OUT)
	$(GPU_PYTHON) -m meshmark calibrate --seconds 60 -o $(GPU_OUT)/here.json; $(GPU_PACK)

# Ends where a piece's time is up.
gpu-9-conformance:
	$(GPU_SUITES) --conformance --world 1 --adapters ddp,fsdp2,deepspeed -k "determinism or resum or dropout"; $(GPU_PACK)
