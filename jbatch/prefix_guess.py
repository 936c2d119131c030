"""What the host believes to be in the prefix cache. Imports no jax."""

from __future__ import annotations

from collections import OrderedDict


class PrefixGuess:
    """Remembers the prompts sent to the device, as hashes of their pages, so that a step can be sized for what is left.

    A guess: the device alone knows what it still holds, and computes whatever it does not.
    """

    def __init__(self, page_size: int, num_pages: int) -> None:
        self._page_size = page_size
        self._num_pages = num_pages
        self._seen: OrderedDict[int, None] = OrderedDict()  # least recently used first

    def cached_tokens(self, prompt: tuple[int, ...], salt: bytes) -> int:
        """Tokens at the beginning of `prompt` seen before under `salt`, in whole pages; remembers them all."""
        size = self._page_size
        keys = [hash(salt)]
        for end in range(size, len(prompt), size):  # the last token is always computed
            keys.append(hash((keys[-1], prompt[end - size : end])))
        run = next((i for i, key in enumerate(keys[1:]) if key not in self._seen), len(keys) - 1)
        for key in reversed(keys[1:]):  # the end of a prompt is forgotten first, as on the device
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > self._num_pages:
            self._seen.popitem(last=False)
        return run * size
