"""Virtual machine monitors behind one Protocol."""
