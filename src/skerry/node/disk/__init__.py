"""A sandbox's disk: a qcow2 layer over its template's raw image."""
