# Horovod from its source package, into the environment: no wheel is published, and what is published builds by C++14,
# which PyTorch's headers have left behind. Over gloo, for PyTorch alone. Takes a C++ compiler, CMake (3.13 to 3.x) and
# minutes, so it is no part of `make install`; adapters that need it skip where it is not built. Included by the Makefile.
.PHONY: horovod
HOROVOD_VERSION := 0.28.1
HOROVOD_SOURCE := results/horovod
HOROVOD_BUILD := HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1 \
	HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_NVTX=1 HOROVOD_CPU_OPERATIONS=GLOO MAKEFLAGS=-j$(shell getconf _NPROCESSORS_ONLN)
# Its build type asks for symbols too, which no run needs: they are half of the time.
HOROVOD_PATCH := sed -i -e 's/CMAKE_CXX_STANDARD 14/CMAKE_CXX_STANDARD 17/' \
	-e 's/"-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO/"-O2 -g" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO/'
horovod: install
	rm -rf $(HOROVOD_SOURCE)
	mkdir -p $(HOROVOD_SOURCE)
	$(BIN)/python -m pip install -q cffi cloudpickle psutil pyyaml packaging
	$(BIN)/python -m pip download -q --no-binary :all: --no-deps --no-build-isolation -d $(HOROVOD_SOURCE) horovod==$(HOROVOD_VERSION)
	tar -xzf $(HOROVOD_SOURCE)/horovod-$(HOROVOD_VERSION).tar.gz -C $(HOROVOD_SOURCE) --strip-components 1
	cd $(HOROVOD_SOURCE) && $(HOROVOD_PATCH) CMakeLists.txt horovod/torch/CMakeLists.txt
	$(HOROVOD_BUILD) $(BIN)/python -m pip install -q --no-deps --no-build-isolation ./$(HOROVOD_SOURCE)
	$(BIN)/python -c "import horovod.torch as hvd; assert hvd.gloo_built()"
	rm -rf $(HOROVOD_SOURCE)
