"""Thin faces over the services: they parse, call, and write the answer. No decision about a sandbox is made here."""
