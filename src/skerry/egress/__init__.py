"""What leaves a sandbox: its resolver and its relay, which live on the host and go by names. Never imports the node."""
