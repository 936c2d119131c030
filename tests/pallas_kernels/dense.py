"""Attention in float64 numpy, one query at a time: what every paged kernel must equal. And random paged problems."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Problem:
    """Requests of some lengths whose pages lie scattered among pages full of not-a-numbers."""

    q: np.ndarray  # [C, Q, H, D]
    k_pages: np.ndarray  # [P, page_size, K, D]
    v_pages: np.ndarray  # [P, page_size, K, D]
    page_table: np.ndarray  # [C, N], -1 where unused
    start: np.ndarray  # [C]
    lengths: np.ndarray  # [C]
    scale: float
    skipped: np.ndarray | None = None  # [C]
    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None

    def expected(self) -> np.ndarray:
        """[C, Q, H, D] float64; zeros for queries at or past a row's length."""
        return self._expected()[0]

    def expected_lse(self) -> np.ndarray:
        """[C, Q, H] float64, base 2; -inf for queries at or past a row's length."""
        return self._expected()[1]

    def real(self) -> np.ndarray:
        """[C, Q] bool, queries whose result means something, idle rows among them."""
        position = self.start[:, None] + np.arange(self.q.shape[1])
        return (position < self.lengths[:, None]) | (self.lengths == 0)[:, None] | (not self.causal)

    def rounded(self, dtype: np.dtype) -> Problem:
        """The same with queries, keys and values of another dtype."""
        fields = {name: getattr(self, name).astype(dtype) for name in ("q", "k_pages", "v_pages")}
        return Problem(**{**self.__dict__, **fields})

    def _expected(self) -> tuple[np.ndarray, np.ndarray]:
        out, lse = np.zeros(self.q.shape), np.full(self.q.shape[:3], -np.inf)
        for row, query in np.ndindex(self.q.shape[:2]):
            position = self.start[row] + query
            if self.real()[row, query]:
                begin = 0 if self.window is None else max(0, position - self.window + 1)
                begin = max(begin, 0 if self.skipped is None else self.skipped[row])
                end = min(position + 1, self.lengths[row]) if self.causal else self.lengths[row]
                if begin < end:
                    out[row, query], lse[row, query] = self._attend(row, query, begin, end)
        return out, lse

    def _attend(self, row: int, query: int, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        page_size = self.k_pages.shape[1]
        at = np.arange(begin, end)
        pages = self.page_table[row, at // page_size]
        keys = self.k_pages[pages, at % page_size].astype(np.float64)  # [length, K, D]
        values = self.v_pages[pages, at % page_size].astype(np.float64)
        heads = self.q.shape[2]
        group = heads // keys.shape[1]
        out, lse = np.zeros(self.q.shape[2:]), np.zeros(heads)
        for head in range(heads):
            scores = keys[:, head // group] @ self.q[row, query, head].astype(np.float64) * self.scale
            if self.soft_cap is not None:
                scores = self.soft_cap * np.tanh(scores / self.soft_cap)
            weights = np.exp(scores - scores.max())
            out[head] = weights @ values[:, head // group] / weights.sum()
            lse[head] = np.log2(weights.sum()) + scores.max() * np.log2(np.e)
        return out, lse


def make_problem(
    lengths: list[int],
    starts: list[int],
    queries: int,
    *,
    kv_heads: int = 2,
    group: int = 3,
    dim: int = 16,
    page_size: int = 16,
    width: int | None = None,
    seed: int = 0,
    unseen: list[int] | None = None,
) -> Problem:
    """`width` is the table's: as wide as the longest request needs unless given.

    `unseen` are tokens at each row's beginning that nobody sees: their pages are gone from the table.
    """
    rng = np.random.default_rng(seed)
    needed = [-(-length // page_size) for length in lengths]
    width = width or max(1, *needed)
    total = sum(needed) + 4
    shape = (total, page_size, kv_heads, dim)
    k_pages, v_pages = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
    table = np.full((len(lengths), width), -1, np.int32)
    ids = iter(rng.permutation(np.arange(1, total)))
    for row, length in enumerate(lengths):
        first = unseen[row] if unseen else 0
        for column in range(first // page_size, needed[row]):
            page = table[row, column] = next(ids)
            used = slice(max(0, first - column * page_size), min(page_size, length - column * page_size))
            part = (max(0, used.stop - used.start), kv_heads, dim)
            k_pages[page, used] = rng.standard_normal(part)
            v_pages[page, used] = rng.standard_normal(part)
    q = rng.standard_normal((len(lengths), queries, kv_heads * group, dim)).astype(np.float32) * 2
    return Problem(q, k_pages, v_pages, table, np.int32(starts), np.int32(lengths), dim**-0.5)


def decode_problem(lengths: list[int], **shape: int) -> Problem:
    """One query a row, at its request's last token."""
    return make_problem(lengths, [length - 1 for length in lengths], 1, **shape)
