"""The faces that E2B's clients speak to: thin translations onto the services."""
