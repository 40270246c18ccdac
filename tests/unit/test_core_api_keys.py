"""A key in its two spellings."""

from hypothesis import given
from hypothesis import strategies as st

from skerry.control.keys import new_secret
from skerry.core.api_keys import e2b_spelling, native_spelling


def test_both_spellings_are_the_same_key() -> None:
    for secret in (new_secret() for _ in range(20)):
        spelled = e2b_spelling(secret)
        assert spelled.startswith("e2b_")
        assert set(spelled.removeprefix("e2b_")) <= set("0123456789abcdef")
        assert native_spelling(spelled) == secret == native_spelling(secret)
        assert e2b_spelling(spelled) == spelled


@given(st.text())
def test_what_is_no_key_is_no_error(text: str) -> None:
    for given_text in (text, f"e2b_{text}"):
        assert isinstance(native_spelling(given_text), str)


def test_what_is_no_spelling_stays_what_it_is() -> None:
    for text in ("", "skerryabc", "e2b_zz", "e2b_ff", "e2b_0"):
        assert native_spelling(text) == text
