# Aliases: a fresh Debian has no make, so the scripts in bin/ are what counts.
.PHONY: demo test test-quick lint bench soak redteam
demo:
	bin/demo
test:
	bin/test
test-quick:
	bin/test --quick
lint:
	bin/lint
bench:
	bin/bench
soak:
	bin/soak
redteam:
	bin/redteam
