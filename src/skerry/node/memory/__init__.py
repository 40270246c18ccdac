"""Memory images: which pages a VM wrote, RAM files made of them, and the manifest that says what fits together."""
