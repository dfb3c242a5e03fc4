"""Bytes on disk: atomic writes, staging folders, locks, JSON and JSON lines, and trust in cards."""
