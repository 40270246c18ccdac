"""The gateway: HTTP and whatever an HTTP connection can be upgraded to, to the servers inside a sandbox."""
