#!/bin/sh
# The template's start command: the service, started again should the code it runs have ended it.
# -I -S: nothing that is installed or written in the sandbox gets into the service.
while :; do
  /usr/bin/python3 -I -S -c '
import runpy, sys
sys.path.insert(0, "/opt/skerry/interpreter")
runpy.run_module("skerry.interpreter", run_name="__main__", alter_sys=True)'
  sleep 0.2
done
