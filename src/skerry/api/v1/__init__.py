"""The native REST interface. `docs/reference/rest.md` says what it promises."""
