"""Counts compiles. Before ready they are start-up; after ready each one is a fault."""

from vitbatch.compile_guard import CompileGuard

__all__ = ["CompileGuard"]
