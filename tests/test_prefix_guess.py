"""What the host believes to be cached."""

from __future__ import annotations

from jbatch.prefix_guess import PrefixGuess

PROMPT = tuple(range(10))


def test_whole_pages_seen_before_and_never_the_last_token() -> None:
    guess = PrefixGuess(page_size=4, num_pages=100)
    assert guess.cached_tokens(PROMPT, b"a") == 0
    assert guess.cached_tokens(PROMPT, b"a") == 8
    assert guess.cached_tokens(PROMPT[:8], b"a") == 4
    assert guess.cached_tokens((*PROMPT[:4], 99, *PROMPT[5:]), b"a") == 4
    assert guess.cached_tokens(PROMPT[4:], b"a") == 0


def test_salts_are_apart() -> None:
    guess = PrefixGuess(page_size=4, num_pages=100)
    guess.cached_tokens(PROMPT, b"a")
    assert guess.cached_tokens(PROMPT, b"b") == 0


def test_it_forgets_the_oldest_and_stays_bounded() -> None:
    guess = PrefixGuess(page_size=1, num_pages=12)
    for first in range(50):
        guess.cached_tokens((first, 1, 2, 3, 4), b"")
        assert len(guess._seen) <= 12
    assert guess.cached_tokens((0, 1, 2, 3, 4), b"") == 0
    assert guess.cached_tokens((49, 1, 2, 3, 4), b"") == 4
