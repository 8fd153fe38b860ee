# The two commands: `make demo` and `make test`. Each does all of its own set-up.

CARGO ?= cargo
TARGET_DIRECTORY := $(or $(CARGO_TARGET_DIR),target)

.PHONY: demo test test-whole test-libvirt test-emulated test-guest deb test-deb test-storage chaos soak fuzz fuzz-api style bench setup guest emulated \
	emulated-if-possible real-guest-if-possible tests-compiled

demo: setup guest
	$(CARGO) build --release --package drainpipe-cli
	scripts/as-root $(TARGET_DIRECTORY)/release/drainpipe demo --output target/demo --qemu "$$(scripts/qemu)"
	@test -O target/demo/report.html || scripts/as-root chown -R "$$(id -u):$$(id -g)" target/demo

# Tests each mechanism once; the aim is 20 minutes on two cores. Labs need root: the tests are built without it, and run by
# scripts/as-root. The real guest is made while the tests are compiled, because that waits half of the time. --all-targets
# saves the 20 s of looking for tests in the documentation, which has none. Many unit tests wait rather than compute: four at
# a time take two thirds of the time that one for each core takes.
test: setup guest emulated-if-possible
	$(MAKE) --no-print-directory --jobs=2 real-guest-if-possible tests-compiled
	released="$$(CARGO="$(CARGO)" scripts/released)" && CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="$(CURDIR)/scripts/as-root" \
		DRAINPIPE_TEST_QEMU="$$(scripts/qemu)" DRAINPIPE_TEST_LIBVIRT="$$(scripts/libvirt)" RUST_TEST_THREADS=4 \
		DRAINPIPE_TEST_RELEASED="$$released" $(CARGO) test --workspace --all-targets --no-fail-fast

tests-compiled:
	CARGO="$(CARGO)" scripts/released >/dev/null
	$(CARGO) test --workspace --all-targets --no-run

# The end-to-end tests in full: also the same faults at the other end, by other means and options, and with the
# distribution's QEMU throughout. Half an hour or more.
test-whole: setup guest emulated-if-possible real-guest-if-possible
	released="$$(CARGO="$(CARGO)" scripts/released)" && CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="$(CURDIR)/scripts/as-root" \
		DRAINPIPE_TEST_WHOLE=1 DRAINPIPE_TEST_QEMU="$$(scripts/qemu)" DRAINPIPE_TEST_LIBVIRT="$$(scripts/libvirt)" \
		DRAINPIPE_TEST_RELEASED="$$released" \
		$(CARGO) test --package drainpipe-cli --test end_to_end

# Runs the end-to-end tests of Drainpipe's own VMs in full, with libvirt's domains in their place; `make test` has two of
# them. Tests that cannot run with domains say why. The libvirt is the distribution's or another one, as in
# `make test-libvirt LIBVIRT_DAEMON="$(scripts/libvirt)/usr/sbin/libvirtd"`, or
# `make test-libvirt LIBVIRT_DAEMON="$(scripts/virtqemud)/usr/sbin/virtqemud"`, which compiles modular daemons first.
LIBVIRT_DAEMON ?=
test-libvirt: setup guest
	DRAINPIPE_TEST_WITH_LIBVIRT="$(or $(LIBVIRT_DAEMON),1)" CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="$(CURDIR)/scripts/as-root" \
		DRAINPIPE_TEST_QEMU="$$(scripts/qemu)" $(CARGO) test --package drainpipe-cli --test end_to_end

# Labs of emulated machines in full; `make test` has most of it.
test-emulated: setup guest emulated
	CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="$(CURDIR)/scripts/as-root" DRAINPIPE_TEST_WHOLE=1 \
		DRAINPIPE_TEST_QEMU="$$(scripts/qemu)" $(CARGO) test --package drainpipe-cli --test end_to_end -- emulated::

# A whole Debian with PostgreSQL under pgbench, moved twenty times by all options, as a VM of Drainpipe's and as a domain of
# libvirt's; `make test` moves it twice. The first run fetches some 120 MB of packages.
REAL_GUEST_NEEDS = debootstrap e2fsprogs
MAKE_REAL_GUEST = scripts/setup $(REAL_GUEST_NEEDS) && scripts/as-root scripts/guest-debian
test-guest: setup guest
	$(MAKE_REAL_GUEST)
	for all in DRAINPIPE_TEST_WHOLE DRAINPIPE_TEST_WITH_LIBVIRT; do \
		env $$all=1 CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="$(CURDIR)/scripts/as-root" \
			DRAINPIPE_TEST_QEMU="$$(scripts/qemu)" $(CARGO) test --package drainpipe-cli --test end_to_end -- real_guest:: \
			|| exit 1; \
	done

# A Debian package of this version: target/deb/drainpipe_VERSION_amd64.deb.
deb: setup
	$(CARGO) build --release --package drainpipe-cli
	scripts/deb

# Tests what apt and systemd do with the package, in a Debian of its own: installation, an agent with a running VM, upgrade,
# removal, purge; also runs lintian. The first run fetches some 250 MB of packages.
test-deb: deb
	scripts/setup debootstrap lintian systemd-container
	scripts/as-root scripts/test-deb $(TARGET_DIRECTORY)/deb

# Tests disks on file systems that share blocks and on those that do not. `make test` skips a file system that it cannot
# make; this fails.
test-storage:
	scripts/setup btrfs-progs e2fsprogs xfsprogs
	CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="$(CURDIR)/scripts/as-root" DRAINPIPE_TEST_STORAGE=1 \
		$(CARGO) test --package drainpipe-storage --all-targets

# Runs real hosts, QEMUs and guests against random faults for an hour, or CHAOS_SECONDS. It stops at the first error, and
# leaves everything that helps to understand it in target/chaos, or in DRAINPIPE_CHAOS_DIRECTORY. The same CHAOS_SEED makes
# the same decisions again.
CHAOS_SECONDS ?= 3600
CHAOS_VMS ?= 10
chaos: setup guest
	CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="$(CURDIR)/scripts/as-root" DRAINPIPE_TEST_QEMU="$$(scripts/qemu)" \
		DRAINPIPE_CHAOS_SECONDS=$(CHAOS_SECONDS) DRAINPIPE_CHAOS_SEED=$(CHAOS_SEED) DRAINPIPE_CHAOS_VMS=$(CHAOS_VMS) \
		$(CARGO) test --quiet --package drainpipe-cli --test end_to_end

# Migrations and drains against modelled faults, seed by seed: half an hour for a million. A seed that fails is
# named, and replays with DRAINPIPE_SEED.
SEEDS ?= 1000000
soak:
	DRAINPIPE_SEEDS=$(SEEDS) $(CARGO) test --release --package drainpipe-engine --test simulation --test drain_simulation

# Feeds bytes from libFuzzer to everything that parses a peer's bytes, FUZZ_SECONDS for each fuzzer, or only for the named
# ones, as in `make fuzz FUZZERS="relay_stream relay_records"`. Nothing else needs a C++ compiler.
FUZZ_SECONDS ?= 60
fuzz:
	CARGO="$(CARGO)" FUZZ_SECONDS=$(FUZZ_SECONDS) fuzz/run $(FUZZERS)

# Fuzzes the agents' API by its OpenAPI document: API_REQUESTS requests each as a host, an operator and root, or only as the
# named ones, as in `make fuzz-api API_CALLERS="operator root"`. API_SEED makes the same requests again. Nothing else needs
# Python and socat.
API_REQUESTS ?= 10000
fuzz-api:
	scripts/setup python3-venv socat
	$(CARGO) build --package drainpipe-cli
	API_REQUESTS=$(API_REQUESTS) API_SEED=$(API_SEED) fuzz/api $(API_CALLERS)

style:
	scripts/layers
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- --deny warnings

MEASURE_WITH = CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="$(CURDIR)/scripts/as-root"
MEASURE_BY = $(CARGO) test --release --quiet --package drainpipe-cli --test end_to_end
MEASURE = $(MEASURE_WITH) DRAINPIPE_TEST_QEMU="$$(scripts/qemu)" $(MEASURE_BY)

# How many labs run at once. Each needs a core only now and then, and waits most of the time.
SCENARIO_LABS ?= 3

# Measures all figures in bench/, which takes hours: three or four for compression alone.
bench: setup guest
	$(CARGO) build --release --package drainpipe-cli
	scripts/as-root bench/run $(TARGET_DIRECTORY)/release/drainpipe "$$(scripts/qemu)" plain links loop memory compression
	DRAINPIPE_MEASURE_FAULTS=10 $(MEASURE) | tee bench/results/faults.md
	DRAINPIPE_MEASURE_KILLS=1 $(MEASURE) | tee bench/results/kills.md
	DRAINPIPE_MEASURE_BOTH=5 $(MEASURE) | tee bench/results/both.md
	for qemu in "$$(scripts/qemu)" qemu-system-x86_64; do \
		DRAINPIPE_MEASURE_LIMITS=1 $(MEASURE_WITH) DRAINPIPE_TEST_QEMU=$$qemu $(MEASURE_BY) || exit 1; \
	done | tee bench/results/limits.md
	DRAINPIPE_MEASURE_BUSY=3 $(MEASURE) | tee bench/results/busy.md
	DRAINPIPE_MEASURE_CAPTURE=1 $(MEASURE) | tee bench/results/capture.md
	DRAINPIPE_MEASURE_PAUSE=5 $(MEASURE) | tee bench/results/pause.md
	DRAINPIPE_MEASURE_TLS=9 $(MEASURE) | tee bench/results/tls.md
	DRAINPIPE_MEASURE_DOMAINS=3 $(MEASURE) | tee bench/results/domains.md
	DRAINPIPE_MEASURE_DISKS=3 $(MEASURE) | tee bench/results/disks.md
	DRAINPIPE_MEASURE_AUTO=5 $(MEASURE) | tee bench/results/auto.md
	for qemu in "$$(scripts/qemu)" qemu-system-x86_64; do \
		DRAINPIPE_MEASURE_SCENARIOS=20 DRAINPIPE_MEASURE_LABS=$(SCENARIO_LABS) \
			$(MEASURE_WITH) DRAINPIPE_TEST_QEMU=$$qemu $(MEASURE_BY) \
			|| exit 1; \
	done | tee bench/results/scenarios.md
	for mix in 1 2 3; do \
		DRAINPIPE_MEASURE_DRAIN=3 DRAINPIPE_MEASURE_DRAIN_MIX=$$mix $(MEASURE) | tee bench/results/drain-$$mix.md; \
	done

setup:
	scripts/setup

guest: setup
	scripts/guest

emulated: setup
	scripts/emulated

# If the files that emulated machines or the real guest boot cannot be had, their tests are skipped, and say so.
emulated-if-possible: setup
	-scripts/emulated

real-guest-if-possible: setup guest
	-$(MAKE_REAL_GUEST)
