"""Stages of engines are forked, which takes no imports."""

from tests.forked import forked_ranks as forked_ranks
